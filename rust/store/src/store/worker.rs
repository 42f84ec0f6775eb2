//! One thread of the store. It takes a job from the queue, reads or writes the job's adjacent blocks by one call to the
//! device, and hands the outcomes to the queue. It adds headers before a write, and checks blocks after a read.

use super::{Shared, StoreState};
use crate::buffer::Buffer;
use crate::device::{BlockDevice, read_blocks, write_blocks};
use crate::geometry::{Geometry, PAGE};
use crate::header::{Expected, Header, checksum_of_two};
use crate::miss::Miss;
use crate::queue::{Job, Queue, Seen};
use crate::sync::{Arc, MutexGuard};
use crate::ticket::Place;
use std::io;
use std::time::Instant;

/// Adjacent blocks.
type Run = Vec<(Place, Buffer)>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum JobKind {
    Write,
    Read,
    /// Overwrites a header with a page of zeros.
    Wipe,
}

/// A miss, and for a damaged block what was read.
type Failed = (Miss, Option<Seen>);

/// The device's answer for each block of a run, and for blocks that were read, the result of the check.
type Answers = Vec<io::Result<Result<(), Failed>>>;

pub(super) struct Worker {
    pub(super) shared: Arc<Shared>,
    pub(super) device: Arc<dyn BlockDevice>,
    pub(super) geometry: Geometry,
    pub(super) namespace: [u8; 32],
}

impl Worker {
    /// Runs jobs one after the other until the store is closing. Then it drops the device.
    pub(super) fn run(self) {
        let mut state = self.shared.lock();
        while let Some(job) = self.next_job(state) {
            let (kind, mut run) = self.begin(job);
            let results = self.each(kind, &mut run);
            let answers = self.check(kind, &run, results);
            state = self.shared.lock();
            settle(&mut state.queue, kind, run, answers);
        }
        let Self { shared, device, .. } = self;
        drop(device);
        shared.leave();
    }

    /// Waits for work; `None` when the store is closing. The lock is released.
    fn next_job<'a>(&'a self, mut state: MutexGuard<'a, StoreState>) -> Option<Job> {
        loop {
            let job = if state.queue.is_closing() { None } else { state.queue.next_job() };
            self.shared.wake(&mut state);
            if job.is_some() || state.queue.is_closing() {
                return job;
            }
            state = self.shared.sleep(state);
        }
    }

    /// The blocks of a job, ready for the device.
    fn begin(&self, job: Job) -> (JobKind, Run) {
        match job {
            Job::Write(mut run) => {
                for (place, buffer) in &mut run {
                    let header = self.expected(*place).header(buffer.payload(self.geometry.payload_bytes));
                    let header = Header { owner: place.owner, ..header };
                    header.encode(buffer.as_mut_slice());
                }
                (JobKind::Write, run)
            }
            Job::Read(run) => (JobKind::Read, run),
            Job::Wipe(place) => (JobKind::Wipe, vec![(place, Buffer::new(PAGE))]),
        }
    }

    /// Reads or writes adjacent blocks together; if that fails, each alone, so that a bad block costs only itself.
    fn each(&self, kind: JobKind, run: &mut Run) -> Vec<io::Result<()>> {
        let call = |blocks: &mut [(Place, Buffer)]| {
            let offset = self.offset(blocks);
            match kind {
                JobKind::Read => read_blocks(&*self.device, blocks.iter_mut().map(|(_, buffer)| buffer), offset),
                JobKind::Write | JobKind::Wipe => {
                    write_blocks(&*self.device, blocks.iter().map(|(_, buffer)| buffer), offset)
                }
            }
        };
        match call(run) {
            Ok(()) => run.iter().map(|_| Ok(())).collect(),
            Err(error) if run.len() == 1 => vec![Err(error)],
            Err(_) => run.chunks_mut(1).map(call).collect(),
        }
    }

    /// Offset of a run.
    fn offset(&self, run: &[(Place, Buffer)]) -> u64 {
        run.first().map_or(0, |(place, _)| self.geometry.offset(place.slot))
    }

    /// Checks blocks that were read.
    fn check(&self, kind: JobKind, run: &Run, results: Vec<io::Result<()>>) -> Answers {
        let check = |(result, (place, buffer)): (io::Result<()>, &(Place, Buffer))| {
            let payload = || buffer.payload(self.geometry.payload_bytes);
            result.map(|()| match kind {
                JobKind::Read => self.expected(*place).check(buffer.as_slice(), payload()).map_err(|miss| {
                    let header = &buffer.as_slice()[..PAGE];
                    (miss, Some(checksum_of_two(None, header, payload())))
                }),
                JobKind::Write | JobKind::Wipe => Ok(()),
            })
        };
        results.into_iter().zip(run).map(check).collect()
    }

    fn expected(&self, place: Place) -> Expected {
        Expected {
            namespace: self.namespace,
            key: place.key,
            slot: place.slot.into(),
            generation: place.generation,
            payload_bytes: self.geometry.payload_bytes,
        }
    }
}

/// Hands the outcomes of a job to the queue.
fn settle(queue: &mut Queue, kind: JobKind, run: Run, answers: Answers) {
    let what = match kind {
        JobKind::Write => "write of",
        JobKind::Read => "read of",
        JobKind::Wipe => "deletion from",
    };
    for ((place, buffer), answer) in run.into_iter().zip(answers) {
        let result = outcome(queue, what, place.slot, answer).and_then(|checked| checked);
        match kind {
            JobKind::Write => queue.finish_write(place, buffer, result.map_err(|(miss, _)| miss)),
            JobKind::Read => queue.finish_read(place, buffer, result, Instant::now()),
            JobKind::Wipe => queue.finish_wipe(place, result.map_err(|(miss, _)| miss)),
        }
    }
    queue.answered();
}

/// Turns a system error into a miss and keeps its message.
fn outcome<T>(queue: &mut Queue, what: &str, slot: u32, result: io::Result<T>) -> Result<T, Failed> {
    let truncated = |error: &io::Error| error.kind() == io::ErrorKind::UnexpectedEof;
    let error = result.as_ref().err().filter(|error| !truncated(error));
    queue.note_answer(error.map(|error| format!("{what} slot {slot}: {error}")));
    result.map_err(|error| if truncated(&error) { (Miss::Truncated, Some([0; 16])) } else { (Miss::Io, None) })
}
