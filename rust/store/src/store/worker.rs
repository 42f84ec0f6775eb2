//! One thread of the store: it takes neighbouring blocks from the queue and moves them by one call to the device.

use super::{Shared, State};
use crate::buffer::Buffer;
use crate::device::{BlockDevice, read_blocks, write_blocks, write_whole};
use crate::geometry::{Geometry, PAGE};
use crate::header::Expected;
use crate::miss::Miss;
use crate::queue::{Job, Queue};
use crate::sync::{Arc, MutexGuard, PoisonError};
use crate::ticket::Place;
use std::io;

pub(super) struct Worker {
    pub(super) shared: Arc<Shared>,
    pub(super) device: Arc<dyn BlockDevice>,
    pub(super) geometry: Geometry,
    pub(super) namespace: [u8; 32],
}

impl Worker {
    pub(super) fn run(self) {
        while let Some(job) = self.next_job() {
            self.carry_out(job);
        }
        let Self { shared, device, .. } = self;
        drop(device);
        shared.lock().threads -= 1;
        shared.done.notify_all();
    }

    /// Waits for work; `None` when the store is closing.
    fn next_job(&self) -> Option<Job> {
        let mut state = self.shared.lock();
        loop {
            if state.queue.is_closing() {
                return None;
            }
            let job = state.queue.next_job();
            self.wake_callers(&mut state);
            if job.is_some() {
                return job;
            }
            state = self.shared.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn carry_out(&self, job: Job) {
        match job {
            Job::Write(run) => self.write(run),
            Job::Read(run) => self.read(run),
            Job::Wipe(place) => {
                let page = Buffer::new(PAGE);
                let result = write_whole(&*self.device, page.as_slice(), self.geometry.offset(place.slot));
                self.finish(|queue| {
                    let result = outcome(queue, "deletion from", place.slot, result);
                    queue.finish_wipe(place, result);
                });
            }
        }
    }

    fn write(&self, mut run: Vec<(Place, Buffer)>) {
        for (place, buffer) in &mut run {
            let header = self.expected(*place).header(buffer.payload(self.geometry.payload_bytes));
            header.encode(buffer.as_mut_slice());
        }
        let results = self.each(&mut run, |blocks, offset| {
            write_blocks(&*self.device, blocks.iter().map(|(_, buffer)| buffer), offset)
        });
        self.finish(|queue| {
            for ((place, buffer), result) in run.into_iter().zip(results) {
                let result = outcome(queue, "write of", place.slot, result);
                queue.finish_write(place, buffer, result);
            }
        });
    }

    fn read(&self, mut run: Vec<(Place, Buffer)>) {
        let results = self.each(&mut run, |blocks, offset| {
            read_blocks(&*self.device, blocks.iter_mut().map(|(_, buffer)| buffer), offset)
        });
        let check = |(result, (place, buffer)): (io::Result<()>, &(Place, Buffer))| {
            let payload = buffer.payload(self.geometry.payload_bytes);
            result.map(|()| self.expected(*place).check(buffer.as_slice(), payload))
        };
        let checked: Vec<_> = results.into_iter().zip(&run).map(check).collect();
        self.finish(|queue| {
            for ((place, buffer), result) in run.into_iter().zip(checked) {
                let result = outcome(queue, "read of", place.slot, result).and_then(|checked| checked);
                queue.finish_read(place, buffer, result);
            }
        });
    }

    /// Moves neighbouring blocks together; if that fails, each alone, so that one bad block is no miss of the others.
    fn each(
        &self,
        run: &mut [(Place, Buffer)],
        mut call: impl FnMut(&mut [(Place, Buffer)], u64) -> io::Result<()>,
    ) -> Vec<io::Result<()>> {
        let offset = |(place, _): &(Place, Buffer)| self.geometry.offset(place.slot);
        let first = run.first().map_or(0, offset);
        match call(run, first) {
            Ok(()) => run.iter().map(|_| Ok(())).collect(),
            Err(error) if run.len() == 1 => vec![Err(error)],
            Err(_) => run.chunks_mut(1).map(|block| call(block, block.first().map_or(0, offset))).collect(),
        }
    }

    /// Hands results to the queue and wakes whoever waits for them.
    fn finish(&self, note: impl FnOnce(&mut Queue)) {
        let mut state = self.shared.lock();
        note(&mut state.queue);
        state.queue.answered();
        self.wake_callers(&mut state);
    }

    fn wake_callers(&self, state: &mut MutexGuard<'_, State>) {
        if state.queue.tickets.take_ended() {
            self.shared.wake_callers(state);
        }
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

/// Turns a system error into a miss and keeps its message.
fn outcome<T>(queue: &mut Queue, what: &str, slot: u32, result: io::Result<T>) -> Result<T, Miss> {
    let truncated = |error: &io::Error| error.kind() == io::ErrorKind::UnexpectedEof;
    let error = result.as_ref().err().filter(|error| !truncated(error));
    queue.note_answer(error.map(|error| format!("{what} slot {slot}: {error}")));
    result.map_err(|error| if truncated(&error) { Miss::Truncated } else { Miss::Io })
}
