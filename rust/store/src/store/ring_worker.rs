//! One thread of the store with `io_uring`: it keeps several jobs in the kernel, and checks what has ended meanwhile.
//!
//! An abandoned request stays in the kernel with its buffer until it ends; the thread goes on with others, and ends after
//! the last.

use super::Listener;
use super::worker::{Kind, Run, Worker, settle};
use crate::device::next_step;
use crate::queue::Job;
use crate::ring::{Memory, Ring, Way};
use crate::sync::Arc;
use std::io::{self, IoSlice, IoSliceMut};

/// Requests of one thread that the kernel has at a time.
pub(super) const DEPTH: u8 = 8;

/// A job in the kernel, or a part of one.
#[derive(Debug)]
pub(super) struct Request {
    kind: Kind,
    run: Run,
    /// Bytes that were moved, and that there are to move.
    done: usize,
    whole: usize,
}

impl Request {
    fn new(kind: Kind, run: Run) -> Self {
        let whole = run.iter().flat_map(|(_, buffer)| buffer.parts()).map(|part| part.len()).sum();
        Self { kind, run, done: 0, whole }
    }
}

impl Memory for Request {
    fn sources(&self) -> Vec<IoSlice<'_>> {
        self.run.iter().flat_map(|(_, buffer)| buffer.parts()).collect()
    }

    fn targets(&mut self) -> Vec<IoSliceMut<'_>> {
        self.run.iter_mut().flat_map(|(_, buffer)| buffer.parts_mut()).collect()
    }
}

pub(super) struct RingWorker {
    pub(super) worker: Worker,
    pub(super) ring: Ring<Request>,
}

/// A request that has ended, with the bytes that its last step moved.
type Ended = (Request, io::Result<usize>);

impl RingWorker {
    pub(super) fn run(self) {
        let Self { worker, mut ring } = self;
        // Without its ring the thread goes on as one of the pool; what the kernel has stays there.
        if (RingLoop { worker: &worker, ring: &mut ring }).run().is_err() {
            worker.shared.lock().listening.retain(|other| !Arc::ptr_eq(&other.waker, ring.waker()));
            worker.run();
        }
        // The ring's share of the file goes before the thread has ended.
        drop(ring);
        worker.end();
    }
}

struct RingLoop<'a> {
    worker: &'a Worker,
    ring: &'a mut Ring<Request>,
}

impl RingLoop<'_> {
    fn run(&mut self) -> io::Result<()> {
        let mut ended = Vec::new();
        loop {
            let (jobs, is_closing) = self.take_jobs(ended.is_empty());
            let has_more = !jobs.is_empty();
            for job in jobs {
                let (kind, run) = self.worker.begin(job);
                self.push(Request::new(kind, run), &mut ended);
                if kind == Kind::Write {
                    // The disk works while the next block is hashed.
                    self.ring.submit()?;
                }
            }
            if !ended.is_empty() {
                self.ring.submit()?;
                for (request, result) in std::mem::take(&mut ended) {
                    self.proceed(request, result, &mut ended);
                }
            } else if is_closing && self.ring.in_flight() == 0 {
                return Ok(());
            } else if !has_more {
                self.ring.listen()?;
                ended = self.ring.wait()?;
            }
        }
    }

    /// Jobs that the ring has room for, and whether the store is closing. A thread that has some and would wait now leaves
    /// others to threads that have none, and is woken with them for new ones.
    fn take_jobs(&mut self, will_wait: bool) -> (Vec<Job>, bool) {
        let (waker, in_flight) = (self.ring.waker(), self.ring.in_flight());
        let room = usize::from(DEPTH).saturating_sub(in_flight);
        let mut state = self.worker.shared.lock();
        state.listening.retain(|other| !Arc::ptr_eq(&other.waker, waker));
        if state.queue.is_closing() {
            return (Vec::new(), true);
        }
        // Only to idle ones, which take them: two that leave jobs to each other would wake each other without end.
        let leaves = will_wait && in_flight > 0 && state.listening.iter().any(|other| other.is_idle);
        let jobs = if leaves { Vec::new() } else { state.queue.next_jobs(room) };
        self.worker.wake_callers(&mut state);
        if leaves && state.queue.ready() > 0 {
            state.listening.iter().filter(|other| other.is_idle).for_each(Listener::wake);
        }
        if will_wait && jobs.is_empty() && room > 0 {
            state.listening.push(Listener { waker: Arc::clone(waker), is_idle: in_flight == 0 });
        }
        (jobs, false)
    }

    /// Begins a request, or its next step; one that the kernel does not take has ended.
    fn push(&mut self, request: Request, ended: &mut Vec<Ended>) {
        let way = if request.kind == Kind::Read { Way::Read } else { Way::Write };
        let (done, offset) = (request.done, self.worker.offset(&request.run) + request.done as u64);
        if let Err((request, error)) = self.ring.push(way, offset, done, request) {
            ended.push((request, Err(error)));
        }
    }

    /// Goes on with a request that was moved in part, or settles it. If one of several blocks fails, each is moved alone,
    /// so that one bad block is no miss of the others.
    fn proceed(&mut self, mut request: Request, result: io::Result<usize>, ended: &mut Vec<Ended>) {
        let stuck = if request.kind == Kind::Read { io::ErrorKind::UnexpectedEof } else { io::ErrorKind::WriteZero };
        let result = match result {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(request.done),
            other => other.and_then(|moved| next_step(request.done, moved, request.whole).ok_or_else(|| stuck.into())),
        };
        match result {
            Ok(done) if done < request.whole => {
                request.done = done;
                self.push(request, ended);
            }
            Err(_) if request.run.len() > 1 => {
                self.worker.shared.lock().queue.split(request.run.len());
                for block in request.run {
                    self.push(Request::new(request.kind, vec![block]), ended);
                }
            }
            result => {
                let Request { kind, run, .. } = request;
                let results = match result {
                    Ok(_) => run.iter().map(|_| Ok(())).collect(),
                    Err(error) => vec![Err(error)],
                };
                let answers = self.worker.check(kind, &run, results);
                let mut state = self.worker.shared.lock();
                settle(&mut state.queue, kind, run, answers);
                self.worker.wake_callers(&mut state);
            }
        }
    }
}
