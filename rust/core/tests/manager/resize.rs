//! Rules for a device that grows and shrinks; blocks beyond its extent are released, and hold garbage from then on.

use super::World;
use blockyard_core::{Error, Resize, Tier};

impl World {
    pub(crate) fn resize(&mut self, blocks: usize) {
        let (before, stats) = (self.manager.resize_progress(), self.manager.stats());
        let needed = self.null_blocks(Tier::Device) + stats.tiers[0].pinned + 1;
        match self.manager.resize_device(blocks) {
            Ok(progress) => {
                assert!(blocks >= needed && progress.blocks == blocks && progress.extent >= blocks);
                assert_eq!(self.manager.pool(Tier::Device).len(), blocks);
                self.memory.grow(blocks);
                self.resized = progress;
            }
            Err(error) => {
                assert!(blocks < needed && matches!(error, Error::InvalidArgument { .. }), "{error}");
                assert_eq!((self.manager.resize_progress(), self.manager.stats()), (before, stats));
            }
        }
    }

    /// Checks that the blocks beyond the end only become fewer, and releases the memory after the last of them.
    pub(crate) fn give_back(&mut self) {
        let Resize { blocks, live, held, extent } = self.manager.resize_progress();
        let before = std::mem::replace(&mut self.resized, self.manager.resize_progress());
        assert_eq!(blocks, before.blocks);
        assert!(live + held <= before.live + before.held && extent <= before.extent, "{before:?}");
        assert_eq!(self.resized.is_done(), live + held == 0);
        let pool = self.manager.pool(Tier::Device);
        assert!(pool.free() + live <= blocks || pool.free() == 0, "{} free, {live} beyond {blocks}", pool.free());
        if !self.has_pages() {
            self.memory.clear_behind(extent);
        }
    }
}
