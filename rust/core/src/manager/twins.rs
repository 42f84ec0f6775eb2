//! What one pool does to a block that has a twin in another: whatever ends the bytes of one, the other forgets it.

use crate::block::TierBlock;
use crate::id::{BlockId, Tier};
use crate::pool::Pool;

/// Takes blocks; the twins of those that were cached forget them. Returns whether any was draining.
pub(super) fn take(pools: &mut [Pool; 3], tier: Tier, count: usize, out: &mut Vec<BlockId>) -> bool {
    let overlapped = pools[tier.index()].take(count, false, out);
    part_orphans(pools, tier);
    overlapped
}

/// Drops one reference to each block, to the last one first; the twins of those that go free forget them.
pub(super) fn release_all(pools: &mut [Pool; 3], tier: Tier, blocks: &[BlockId]) {
    pools[tier.index()].release_all(blocks);
    part_orphans(pools, tier);
}

/// Lets the twins of blocks whose bytes are gone forget them.
pub(super) fn part_orphans(pools: &mut [Pool; 3], tier: Tier) {
    for (other, twin) in pools[tier.index()].take_orphans() {
        pools[other.index()].set_tier_copy(twin, None);
    }
}

/// Drops one reference; the twin of a block that goes free forgets it.
pub(super) fn release(pools: &mut [Pool; 3], tier: Tier, block: BlockId) {
    pools[tier.index()].release(block);
    part_orphans(pools, tier);
}

/// Makes two blocks that hold the same bytes each other's twin, and of no other.
pub(super) fn link(pools: &mut [Pool; 3], a: TierBlock, b: TierBlock) {
    for (one, other) in [(a, b), (b, a)] {
        if let Some((tier, former)) = pools[one.0.index()].set_tier_copy(one.1, Some(other)) {
            if (tier, former) != other {
                pools[tier.index()].set_tier_copy(former, None);
            }
        }
    }
}

pub(super) fn unlink(pools: &mut [Pool; 3], tier: Tier, block: BlockId) {
    if let Some((tier, twin)) = pools[tier.index()].set_tier_copy(block, None) {
        pools[tier.index()].set_tier_copy(twin, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_has_one_twin_and_none_once_that_is_released() {
        let mut pools = Tier::ALL.map(|tier| Pool::new(tier, 4, false).unwrap());
        let mut blocks = Vec::new();
        take(&mut pools, Tier::Device, 3, &mut blocks);
        take(&mut pools, Tier::Host, 1, &mut Vec::new());
        let host = (Tier::Host, BlockId(0));
        link(&mut pools, (Tier::Device, blocks[0]), host);
        link(&mut pools, (Tier::Device, blocks[1]), host);
        assert_eq!(
            (pools[0].block(blocks[0]).tier_copy(), pools[1].block(host.1).tier_copy()),
            (None, Some((Tier::Device, blocks[1])))
        );
        release_all(&mut pools, Tier::Device, &blocks);
        assert_eq!((pools[1].block(host.1).tier_copy(), pools[0].free()), (None, 4));
    }
}
