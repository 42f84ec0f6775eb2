//! Wakes threads and callers: as many sleeping threads as there are ready operations, and the callers in the shards of
//! the tickets that have ended.
//!
//! Invariant: when the lock is released, every ready operation has a thread that was called and has not looked at the
//! queue yet, or no thread sleeps.

use super::{Shared, StoreState};
use crate::sync::{MutexGuard, PoisonError};

/// Threads that wait for work.
#[derive(Debug, Default)]
pub(super) struct Sleepers {
    /// Asleep and not called yet.
    asleep: usize,
    /// Called, but not awake yet.
    called: usize,
}

impl Sleepers {
    /// Counts the threads to call for ready operations as called; returns their number.
    fn call(&mut self, ready: usize) -> usize {
        let count = ready.saturating_sub(self.called).min(self.asleep);
        self.asleep -= count;
        self.called += count;
        count
    }

    /// Records that a thread is awake. It may not be the one that was called: a wait can also end without a call.
    fn woke(&mut self) {
        let from = if self.called > 0 { &mut self.called } else { &mut self.asleep };
        *from -= 1;
    }
}

impl Shared {
    /// Wakes threads for ready operations, and callers whose tickets have ended. Always called before the lock is
    /// released.
    pub(super) fn wake(&self, state: &mut StoreState) {
        let ended = state.queue.tickets.take_ended();
        if let Some(event) = state.event.as_ref().filter(|_| ended != 0) {
            // A full counter is readable too.
            let _ = rustix::io::write(event, &1u64.to_ne_bytes());
        }
        let ready = state.queue.num_ready();
        let count = state.sleepers.call(ready);
        (0..count).for_each(|_| self.work.notify_one());
        let shards = self.done.iter().enumerate();
        shards.filter(|(shard, _)| ended >> shard & 1 == 1).for_each(|(_, callers)| callers.notify_all());
    }

    /// Lets a thread sleep until it is called.
    pub(super) fn sleep<'a>(&self, mut state: MutexGuard<'a, StoreState>) -> MutexGuard<'a, StoreState> {
        state.sleepers.asleep += 1;
        state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        state.sleepers.woke();
        state
    }
}
