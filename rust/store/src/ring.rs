//! Requests to the kernel through `io_uring`. All of this crate's `unsafe` code is here.
//!
//! Invariant: from [`Ring::push`] until its completion is taken, nobody but the kernel uses what a request owns, and nothing
//! frees it. A ring that is dropped before leaks it: the kernel may use the memory for as long as the device hangs.

use io_uring::{IoUring, opcode, squeue, types};
use rustix::event::{EventfdFlags, eventfd};
use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

/// Marks completions of [`Ring::listen`]; no request has this address.
const WAKE: u64 = 0;

/// Which way a request moves bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// From the file.
    Read,
    /// Into the file.
    Write,
}

/// Memory that a request takes along.
pub(crate) trait Memory: Send {
    /// What is written, in order.
    fn sources(&self) -> Vec<IoSlice<'_>>;

    /// What is read into, in order.
    fn targets(&mut self) -> Vec<IoSliceMut<'_>>;
}

/// A request that the kernel has. It lies in a box of its own, whose address is the request's mark.
struct Request<T> {
    owner: T,
    parts: Vec<libc::iovec>,
}

/// One thread's queue of reads and writes of one file.
pub(crate) struct Ring<T: Memory> {
    queue: IoUring,
    file: OwnedFd,
    waker: Arc<OwnedFd>,
    is_listening: bool,
    in_flight: usize,
    owners: PhantomData<T>,
}

impl<T: Memory> fmt::Debug for Ring<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring").field("in_flight", &self.in_flight).finish_non_exhaustive()
    }
}

impl<T: Memory> Ring<T> {
    /// A ring for up to `depth` requests at a time.
    ///
    /// # Errors
    /// The system's: kernels without `io_uring` say `ENOSYS`, containers often `EPERM`.
    pub(crate) fn new(file: BorrowedFd<'_>, depth: u32) -> io::Result<Self> {
        // One more for the waker. Kernels before 5.19 know no flag of these.
        let build = |builder: &mut io_uring::Builder| builder.build(depth + 1);
        let ring = build(IoUring::builder().setup_coop_taskrun()).or_else(|error| {
            if error.raw_os_error() == Some(libc::EINVAL) { IoUring::new(depth + 1) } else { Err(error) }
        })?;
        let mut probe = io_uring::Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [opcode::Readv::CODE, opcode::Writev::CODE, opcode::PollAdd::CODE];
        if !needed.into_iter().all(|code| probe.is_supported(code)) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let waker = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let file = file.try_clone_to_owned()?;
        Ok(Self { queue: ring, file, waker, is_listening: false, in_flight: 0, owners: PhantomData })
    }

    /// Requests that have not ended.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// An eventfd: [`Ring::wait`] returns when somebody has written to it.
    pub(crate) fn waker(&self) -> &Arc<OwnedFd> {
        &self.waker
    }

    /// Hands a request to the kernel: the bytes of `owner` without the first `skipped`, and the file from `offset` on.
    ///
    /// # Errors
    /// The system's, with the owner; nothing was begun.
    pub(crate) fn push(&mut self, way: Way, offset: u64, skipped: usize, owner: T) -> Result<(), (T, io::Error)> {
        let mut request = Box::new(Request { owner, parts: Vec::new() });
        // From here on the owner stays where it is, and is not touched.
        request.parts = match way {
            Way::Read => targets(&mut request.owner, skipped),
            Way::Write => sources(&request.owner, skipped),
        };
        let file = types::Fd(self.file.as_raw_fd());
        let (parts, count) = (request.parts.as_ptr(), u32::try_from(request.parts.len()).unwrap_or(0));
        let raw = Box::into_raw(request);
        let entry = match way {
            Way::Read => opcode::Readv::new(file, parts, count).offset(offset).build(),
            Way::Write => opcode::Writev::new(file, parts, count).offset(offset).build(),
        };
        match self.enter(&entry.user_data(raw.expose_provenance() as u64)) {
            Ok(()) => {
                self.in_flight += 1;
                Ok(())
            }
            Err(error) => {
                // SAFETY: `raw` is the box from above, and the kernel has not seen it.
                let request = unsafe { Box::from_raw(raw) };
                Err((request.owner, error))
            }
        }
    }

    /// Lets [`Ring::wait`] return when somebody writes to the waker.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn listen(&mut self) -> io::Result<()> {
        if !self.is_listening {
            let poll = opcode::PollAdd::new(types::Fd(self.waker.as_raw_fd()), libc::POLLIN as u32).build();
            self.enter(&poll.user_data(WAKE))?;
            self.is_listening = true;
        }
        Ok(())
    }

    /// Puts an entry into the queue, after what is there if that is full.
    fn enter(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        for _ in 0..2 {
            // SAFETY: the entry's memory is a request, which stays until its completion was taken, or it has none. Its
            // files are this ring's, which outlive the submission of what is in the queue.
            if unsafe { self.queue.submission().push(entry) }.is_ok() {
                return Ok(());
            }
            self.submit()?;
        }
        Err(io::ErrorKind::ResourceBusy.into())
    }

    /// Has the kernel begin what was pushed; never waits.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn submit(&mut self) -> io::Result<()> {
        self.submit_and_wait(0)
    }

    /// Waits until a request has ended or the waker was written to; returns the requests that have ended, each with the
    /// bytes that it moved. Waits for ever if there are none and nobody listens.
    ///
    /// # Errors
    /// The system's. The ring is of no more use then.
    pub(crate) fn wait(&mut self) -> io::Result<Vec<(T, io::Result<usize>)>> {
        self.submit_and_wait(1)?;
        let mut ended = Vec::new();
        for entry in self.queue.completion() {
            if entry.user_data() == WAKE {
                self.is_listening = false;
                // Nothing to read if it was woken twice.
                let _ = rustix::io::read(&self.waker, &mut [0; 8]);
                continue;
            }
            let mark = usize::try_from(entry.user_data()).unwrap_or(usize::MAX);
            // SAFETY: the kernel gives each mark back once, when it has let go of the request's memory. The mark is the
            // address of a box that `push` took apart.
            let request = unsafe { Box::from_raw(ptr::with_exposed_provenance_mut::<Request<T>>(mark)) };
            self.in_flight -= 1;
            let moved = usize::try_from(entry.result());
            ended.push((request.owner, moved.map_err(|_| io::Error::from_raw_os_error(-entry.result()))));
        }
        Ok(ended)
    }

    fn submit_and_wait(&self, want: usize) -> io::Result<()> {
        match self.queue.submit_and_wait(want) {
            Ok(_) => Ok(()),
            // Completions must be taken first: the caller does.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EBUSY | libc::EAGAIN)) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

fn sources<T: Memory>(owner: &T, skipped: usize) -> Vec<libc::iovec> {
    let mut parts = owner.sources();
    let mut left = &mut parts[..];
    IoSlice::advance_slices(&mut left, skipped);
    // The kernel only reads what is written to a file.
    let part = |part: &IoSlice<'_>| libc::iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() };
    left.iter().map(part).collect()
}

fn targets<T: Memory>(owner: &mut T, skipped: usize) -> Vec<libc::iovec> {
    let mut parts = owner.targets();
    let mut left = &mut parts[..];
    IoSliceMut::advance_slices(&mut left, skipped);
    let part = |part: &mut IoSliceMut<'_>| libc::iovec { iov_base: part.as_mut_ptr().cast(), iov_len: part.len() };
    left.iter_mut().map(part).collect()
}
