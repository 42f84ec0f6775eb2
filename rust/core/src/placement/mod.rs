//! Placement of a pool's blocks: which can move, which can be moved into, and which must stay.

mod block_map;
mod tracker;

pub use block_map::BlockMap;
pub(crate) use tracker::{PlannerView, Tracker};

/// How a block may take part in moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Occupancy {
    /// Unreferenced: it can be moved into.
    Hole,
    /// In use, and can be moved.
    Live,
    /// Leased, pinned or the null block: it stays, and cannot be moved into.
    Fixed,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::BlockId;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_map_answers_as_a_plain_list(runs in prop::collection::vec((0usize..3, 1u32..20, any::<bool>()), 1..40)) {
            let total: u32 = runs.iter().map(|&(_, len, _)| len).sum();
            let (mut places, mut model) = (BlockMap::new(total as usize), Vec::new());
            for (place, len, at_once) in runs {
                let place = [Occupancy::Hole, Occupancy::Live, Occupancy::Fixed][place];
                let start = u32::try_from(model.len()).unwrap();
                model.resize(model.len() + len as usize, place);
                if at_once {
                    places.set_run(start..start + len, place);
                } else {
                    (start..start + len).for_each(|block| places.set(BlockId(block), place));
                }
            }
            let with = |wanted: fn(Occupancy) -> bool| {
                (0..).zip(&model).filter(move |&(_, &place)| wanted(place)).map(|(block, _)| block).collect::<Vec<u32>>()
            };
            let (live, not_fixed) = (with(|place| place == Occupancy::Live), with(|place| place != Occupancy::Fixed));
            let densest = live.len().checked_sub(1).map(|last| not_fixed[last]);
            prop_assert!((0..total).all(|block| places.get(BlockId(block)) == model[block as usize]));
            prop_assert_eq!(places.densest(), densest.map(BlockId));
            prop_assert_eq!(places.highest(), with(|place| place != Occupancy::Hole).last().copied().map(BlockId));
            prop_assert_eq!(places.gap(), live.last().map_or(0, |top| top - densest.unwrap().min(*top)));
        }
    }

    #[test]
    fn a_map_takes_little_more_than_three_bits_per_block() {
        assert!([64, 4096, 1 << 20].iter().all(|&blocks| (blocks * 3 / 8..blocks).contains(&BlockMap::bytes(blocks))));
    }

    #[test]
    fn the_densest_arrangement_goes_around_fixed_blocks() {
        let mut places = BlockMap::new(10);
        assert_eq!((places.densest(), places.gap()), (None, 0));
        for block in [0, 2] {
            places.set(BlockId(block), Occupancy::Fixed);
        }
        for block in [1, 8] {
            places.set(BlockId(block), Occupancy::Live);
        }
        assert_eq!(places.densest(), Some(BlockId(3)));
        assert_eq!(places.gap(), 5);
        places.set(BlockId(9), Occupancy::Fixed);
        assert_eq!((places.highest(), places.gap()), (Some(BlockId(9)), 5));
    }

    #[test]
    fn growing_adds_holes() {
        let mut places = BlockMap::new(3);
        places.set(BlockId(1), Occupancy::Live);
        places.grow(70);
        places.grow(5);
        assert_eq!((places.capacity(), places.holes().len()), (70, 69));
        assert_eq!((places.get(BlockId(1)), places.get(BlockId(69))), (Occupancy::Live, Occupancy::Hole));
    }
}
