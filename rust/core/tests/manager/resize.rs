//! Rules for a device that grows and shrinks; blocks beyond its extent are released, and hold garbage from then on.

use super::World;
use super::bytes::MOST;
use blockyard_core::{Error, Resize, Tier};

impl World {
    pub(crate) fn resize(&mut self, blocks: usize) {
        if self.manager.num_classes() > 1 {
            return self.resize_classes(blocks);
        }
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

    /// Resizes an arena to a number of extents, or each class to another number of blocks.
    fn resize_classes(&mut self, blocks: usize) {
        let (before, stats) = (self.manager.resize_progress(), self.manager.stats());
        let (has_extents, classes) = (self.memory.has_extents(), self.manager.num_classes());
        let each: Vec<usize> = (0..classes).map(|class| blocks.saturating_sub(class * 3)).collect();
        let is_known = if has_extents { self.manager.resize_split(&each) } else { self.manager.resize_extents(blocks) };
        assert!(matches!(is_known, Err(Error::InvalidArgument { .. })), "{is_known:?}");
        let result = if has_extents { self.manager.resize_extents(blocks) } else { self.manager.resize_split(&each) };
        let needed = usize::from(self.null_blocks(Tier::Device) > 0) + 1;
        let fewest = if has_extents { blocks } else { each.iter().copied().min().unwrap() };
        match result {
            Ok(progress) => {
                let size = if has_extents { blocks } else { each.iter().sum() };
                assert!(fewest >= needed && progress.blocks == size && progress.extent >= size, "{progress:?}");
                self.resized = progress;
            }
            Err(error) => {
                let is_short = fewest < needed + stats.tiers[0].pinned;
                assert!((is_short || blocks > MOST) && matches!(error, Error::InvalidArgument { .. }), "{error}");
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
        if pool.num_classes() > 1 {
            if self.memory.has_extents() {
                self.memory.clear_behind(extent);
            }
            return;
        }
        assert!(pool.free() + live <= blocks || pool.free() == 0, "{} free, {live} beyond {blocks}", pool.free());
        self.memory.clear_behind(extent);
    }
}
