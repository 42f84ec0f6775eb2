//! From pairs of ids to pieces of bytes: what a copy engine submits.
//!
//! A route is made once for two sets of views. Compiling a mapping then costs one addition a side and piece: ids that run
//! are merged first, offsets are computed once for all views of one shape.

use super::Run;
use crate::error::{Error, Result};

/// Where one view lies: block `id` begins at `base + id / per_row * row + id % per_row * sub` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Side {
    /// Address, or offset, of block 0.
    pub base: u64,
    /// Bytes from one row of blocks to the next.
    pub row: u64,
    /// Bytes from one block to the next within a row; of no meaning if rows hold one block.
    pub sub: u64,
}

/// One view of the source and the view of the destination that takes its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// What is read.
    pub src: Side,
    /// What is written.
    pub dst: Side,
    /// Bytes of one block in this view.
    pub bytes: u64,
    /// Which part of the plan the view belongs to, such as its layer: parts rise from 0 and are never merged.
    pub part: u32,
}

/// The ids of one end of a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// Ids are below this number.
    pub blocks: u32,
    /// Blocks side by side in one row: device blocks in one block of the host.
    pub per_row: u32,
}

/// The caller's arrays, one entry a piece.
#[derive(Debug)]
pub struct Pieces<'a> {
    /// Where each piece is read.
    pub src: &'a mut [u64],
    /// Where it is written.
    pub dst: &'a mut [u64],
    /// Its bytes.
    pub bytes: &'a mut [u64],
}

/// Views of two sets of memory, joined. Views that lie side by side on both ends are one.
#[derive(Clone, Debug)]
pub struct Route {
    regions: Vec<(u64, u64, usize, u32)>,
    shapes: Vec<Shape>,
    ends: [End; 2],
    parts: usize,
    in_place: bool,
}

/// What regions share whose pieces lie at the same offsets from their bases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    row: [u64; 2],
    sub: [u64; 2],
    bytes: u64,
}

/// When a block lies right after the one with the id before.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Dense {
    Never,
    WithinRow,
    Always,
}

/// Pieces of one shape, from its base.
struct Offsets {
    src: Vec<u64>,
    dst: Vec<u64>,
    bytes: Vec<u64>,
}

impl Route {
    /// Joins views, one region a pair of them.
    ///
    /// # Errors
    /// There are none, a row holds no block, blocks of a view overlap or reach beyond the address space, or parts do not
    /// rise one by one.
    pub fn new(regions: &[Region], src: End, dst: End, in_place: bool) -> Result<Self> {
        let invalid =
            |what, found: u64, must: &str| Error::InvalidArgument { what, found: found.into(), must: must.into() };
        if src.per_row == 0 || dst.per_row == 0 {
            return Err(invalid("blocks per row", 0, "at least 1"));
        }
        let mut route = Self { regions: Vec::new(), shapes: Vec::new(), ends: [src, dst], parts: 0, in_place };
        let mut fused: Vec<Region> = Vec::new();
        for region in regions {
            if region.bytes == 0 || !fits(region.src, region.bytes, src) || !fits(region.dst, region.bytes, dst) {
                return Err(invalid(
                    "bytes of a block",
                    region.bytes,
                    "at least 1, and within the strides of its view",
                ));
            }
            let before = fused.last().map_or(0, |last| last.part + 1);
            if region.part > before || region.part + 1 < before {
                return Err(invalid("part", region.part.into(), "the part of the region before, or the next"));
            }
            match fused.last_mut() {
                Some(last) if last.touches(region, src.per_row, dst.per_row) => last.bytes += region.bytes,
                _ => fused.push(*region),
            }
        }
        let Some(last) = fused.last() else { return Err(invalid("number of regions", 0, "at least 1")) };
        route.parts = last.part as usize + 1;
        for Region { src, dst, bytes, part } in fused {
            let shape = Shape { row: [src.row, dst.row], sub: [src.sub, dst.sub], bytes };
            let known = route.shapes.iter().position(|&other| other == shape);
            let index = known.unwrap_or(route.shapes.len());
            if known.is_none() {
                route.shapes.push(shape);
            }
            route.regions.push((src.base, dst.base, index, part));
        }
        Ok(route)
    }

    /// Parts of the plans.
    #[must_use]
    pub fn parts(&self) -> usize {
        self.parts
    }

    /// Regions, those that lie side by side counted once: most pieces that one pair becomes.
    #[must_use]
    pub fn regions(&self) -> usize {
        self.regions.len()
    }

    /// Writes the pieces of a mapping, part by part and in each in the order of the pairs; returns where the parts begin,
    /// and the number of pieces.
    ///
    /// # Errors
    /// An id is out of range, a destination repeats, a block is read and written in place, or the pieces are more than
    /// the arrays hold. Nothing was written.
    pub fn compile(&self, pairs: &[[u32; 2]], out: &mut Pieces<'_>) -> Result<Vec<usize>> {
        super::check(pairs, [self.ends[0].blocks, self.ends[1].blocks], self.in_place)?;
        let offsets: Vec<_> = self.shapes.iter().map(|shape| self.offsets(*shape, pairs)).collect();
        let count: usize = self.regions.iter().map(|&(_, _, shape, _)| offsets[shape].bytes.len()).sum();
        let space = out.src.len().min(out.dst.len()).min(out.bytes.len());
        if count > space {
            return Err(Error::BadMapping { what: format!("the plan has {count} pieces, the arrays hold {space}") });
        }
        let mut starts = vec![0; self.parts + 1];
        let mut first = 0;
        for &(src, dst, shape, part) in &self.regions {
            let pieces = &offsets[shape];
            let end = first + pieces.bytes.len();
            shift(&mut out.src[first..end], &pieces.src, src);
            shift(&mut out.dst[first..end], &pieces.dst, dst);
            out.bytes[first..end].copy_from_slice(&pieces.bytes);
            first = end;
            starts[part as usize + 1] = end;
        }
        Ok(starts)
    }

    fn offsets(&self, shape: Shape, pairs: &[[u32; 2]]) -> Offsets {
        let [src, dst] = [0, 1].map(|side| shape.dense(side, self.ends[side].per_row));
        let offset = |side: usize, id: u32| {
            let per_row = self.ends[side].per_row;
            // Sums and products fit: those of the largest id were checked when the route was made.
            let (row, sub) = if per_row == 1 { (id, 0) } else { (id / per_row, id % per_row) };
            let row = u64::from(row).wrapping_mul(shape.row[side]);
            row.wrapping_add(u64::from(sub).wrapping_mul(shape.sub[side]))
        };
        if src == Dense::Never || dst == Dense::Never {
            return Offsets {
                src: pairs.iter().map(|pair| offset(0, pair[0])).collect(),
                dst: pairs.iter().map(|pair| offset(1, pair[1])).collect(),
                bytes: vec![shape.bytes; pairs.len()],
            };
        }
        let breaks = |dense, side: usize| if dense == Dense::WithinRow { self.ends[side].per_row } else { u32::MAX };
        let runs = runs_within(pairs, breaks(src, 0), breaks(dst, 1));
        Offsets {
            src: runs.iter().map(|run| offset(0, run.src)).collect(),
            dst: runs.iter().map(|run| offset(1, run.dst)).collect(),
            bytes: runs.iter().map(|run| u64::from(run.len).wrapping_mul(shape.bytes)).collect(),
        }
    }
}

impl Region {
    /// Whether the other region's pieces lie right after this one's, on both sides and for every block.
    fn touches(&self, next: &Self, src_per_row: u32, dst_per_row: u32) -> bool {
        let after = |a: Side, b: Side, per_row: u32| {
            a.row == b.row && (per_row == 1 || a.sub == b.sub) && a.base.checked_add(self.bytes) == Some(b.base)
        };
        self.part == next.part && after(self.src, next.src, src_per_row) && after(self.dst, next.dst, dst_per_row)
            // Sub-blocks that fill their stride have no room for a neighbour.
            && (src_per_row == 1 || self.bytes.saturating_add(next.bytes) <= self.src.sub)
            && (dst_per_row == 1 || self.bytes.saturating_add(next.bytes) <= self.dst.sub)
    }
}

impl Shape {
    fn dense(&self, side: usize, per_row: u32) -> Dense {
        let (row, sub) = (self.row[side], self.sub[side]);
        match (per_row, self.bytes) {
            (1, bytes) if bytes == row => Dense::Always,
            (2.., bytes) if bytes == sub && sub.checked_mul(per_row.into()) == Some(row) => Dense::Always,
            (2.., bytes) if bytes == sub => Dense::WithinRow,
            _ => Dense::Never,
        }
    }
}

/// Whether all blocks of a view lie apart and within the address space.
fn fits(side: Side, bytes: u64, end: End) -> bool {
    let End { blocks, per_row } = end;
    let rows = blocks.div_ceil(per_row);
    let width = if per_row == 1 {
        Some(bytes)
    } else {
        side.sub.checked_mul(u64::from(per_row) - 1).and_then(|w| w.checked_add(bytes))
    };
    let apart = (per_row == 1 || side.sub >= bytes) && width.is_some_and(|width| rows <= 1 || side.row >= width);
    let last = u64::from(rows.saturating_sub(1)).checked_mul(side.row);
    let reach =
        last.zip(width).and_then(|(last, width)| last.checked_add(width)).and_then(|end| side.base.checked_add(end));
    apart && reach.is_some()
}

/// As [`super::merge_runs`]; a run ends, too, before an id that is a multiple of its side's number.
fn runs_within(pairs: &[[u32; 2]], src_row: u32, dst_row: u32) -> Vec<Run> {
    let goes_on = |a: u32, b: u32, row: u32| a.checked_add(1) == Some(b) && (row == u32::MAX || b % row != 0);
    let neighbours = pairs.chunk_by(|a, b| goes_on(a[0], b[0], src_row) && goes_on(a[1], b[1], dst_row));
    #[expect(clippy::cast_possible_truncation, reason = "ids rise along a run and are below 2^32")]
    neighbours.map(|run| Run { src: run[0][0], dst: run[0][1], len: run.len() as u32 }).collect()
}

fn shift(out: &mut [u64], offsets: &[u64], base: u64) {
    for (to, offset) in out.iter_mut().zip(offsets) {
        *to = base.wrapping_add(*offset);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn compile(route: &Route, pairs: &[[u32; 2]]) -> Result<(Vec<[u64; 3]>, Vec<usize>)> {
        let most = route.regions() * pairs.len();
        let (mut src, mut dst, mut bytes) = (vec![0; most], vec![0; most], vec![0; most]);
        let starts = route.compile(pairs, &mut Pieces { src: &mut src, dst: &mut dst, bytes: &mut bytes })?;
        let count = *starts.last().unwrap();
        Ok(((0..count).map(|i| [src[i], dst[i], bytes[i]]).collect(), starts))
    }

    fn flat(base: u64, row: u64) -> Side {
        Side { base, row, sub: 0 }
    }

    const ENDS: (End, End) = (End { blocks: 100, per_row: 1 }, End { blocks: 100, per_row: 1 });

    #[test]
    fn dense_views_give_a_piece_a_run_and_others_one_a_block() {
        let regions = [
            Region { src: flat(1000, 8), dst: flat(5000, 8), bytes: 8, part: 0 },
            Region { src: flat(2000, 8), dst: flat(7000, 32), bytes: 8, part: 1 },
        ];
        let route = Route::new(&regions, ENDS.0, ENDS.1, false).unwrap();
        let (pieces, starts) = compile(&route, &[[3, 10], [4, 11], [9, 12]]).unwrap();
        assert_eq!(starts, [0, 2, 5]);
        assert_eq!(pieces[..2], [[1024, 5080, 16], [1072, 5096, 8]]);
        assert_eq!(pieces[2..], [[2024, 7320, 8], [2032, 7352, 8], [2072, 7384, 8]]);
    }

    #[test]
    fn views_side_by_side_are_one_within_a_part() {
        let half = |i: u64, part| Region { src: flat(8 * i, 16), dst: flat(100 + 8 * i, 16), bytes: 8, part };
        let route = Route::new(&[half(0, 0), half(1, 0)], ENDS.0, ENDS.1, false).unwrap();
        assert_eq!(compile(&route, &[[1, 4], [2, 5]]).unwrap().0, [[16, 164, 32]]);
        let route = Route::new(&[half(0, 0), half(1, 1)], ENDS.0, ENDS.1, false).unwrap();
        assert_eq!((route.regions(), route.parts()), (2, 2));
    }

    #[test]
    fn runs_end_with_the_row_if_rows_are_padded() {
        let end = End { blocks: 12, per_row: 3 };
        let dst = Side { base: 0, row: 40, sub: 8 };
        let region = Region { src: flat(0, 8), dst, bytes: 8, part: 0 };
        let route = Route::new(&[region], ENDS.0, end, false).unwrap();
        let found = compile(&route, &[[5, 1], [6, 2], [7, 3], [8, 4]]).unwrap().0;
        assert_eq!(found, [[40, 8, 16], [56, 40, 16]]);
    }

    #[test]
    fn what_does_not_fit_is_refused_and_nothing_written() {
        let good = Region { src: flat(0, 8), dst: flat(0, 8), bytes: 8, part: 0 };
        let new = |region: Region| Route::new(&[region], ENDS.0, ENDS.1, false);
        assert!(new(Region { bytes: 0, ..good }).is_err());
        assert!(new(Region { bytes: 9, ..good }).is_err());
        assert!(new(Region { part: 1, ..good }).is_err());
        assert!(new(Region { dst: flat(u64::MAX - 800, 8), ..good }).is_ok());
        assert!(new(Region { dst: flat(u64::MAX - 799, 8), ..good }).is_err());
        assert!(new(Region { dst: flat(0, u64::MAX), ..good }).is_err());
        assert!(Route::new(&[], ENDS.0, ENDS.1, false).is_err());
        assert!(Route::new(&[good], End { per_row: 0, ..ENDS.0 }, ENDS.1, false).is_err());
        let route = new(good).unwrap();
        let mut short = [7; 1];
        let (mut src, mut dst) = ([7; 2], [7; 2]);
        let mut out = Pieces { src: &mut src, dst: &mut dst, bytes: &mut short };
        assert!(route.compile(&[[1, 2], [3, 5]], &mut out).unwrap_err().to_string().contains("2 pieces"));
        assert!(route.compile(&[[1, 100]], &mut out).is_err());
        assert_eq!((src, dst, short), ([7; 2], [7; 2], [7; 1]));
    }

    /// Views of `per_row` blocks a row: `(base, row, sub)` of three views of 1, 2 and 3 bytes side by side, or one after
    /// another, with padding.
    fn views(per_row: u32, interleaved: bool, pad: u64) -> [Side; 3] {
        let (k, mut base) = (u64::from(per_row), 0);
        [1, 2, 3].map(|bytes: u64| {
            let sub = if interleaved { 6 } else { bytes };
            let side = Side { base, row: 6 * k + pad, sub };
            base += if interleaved { bytes } else { k * bytes };
            side
        })
    }

    proptest! {
        #[test]
        fn the_pieces_are_the_bytes_of_the_pairs_in_order(
            pairs in prop::collection::vec((0u32..60, 0u32..60).prop_map(|(a, b)| [a, b]), 0..60),
            starts in prop::collection::vec(0u32..50, 0..4),
            rows in (1u32..6, 1u32..6),
            kinds in (any::<[bool; 2]>(), 0u64..3, 0u64..3, 0u32..2),
        ) {
            let (interleaved, src_pad, dst_pad, step) = kinds;
            let mut pairs = pairs;
            pairs.extend(starts.iter().flat_map(|&first| (0..10).map(move |i| [first + i, 59 - first + i])));
            let mut seen = [false; 100];
            pairs.retain(|pair| !std::mem::replace(&mut seen[pair[1] as usize], true));
            let ends = [End { blocks: 100, per_row: rows.0 }, End { blocks: 100, per_row: rows.1 }];
            let (from, to) = (views(rows.0, interleaved[0], src_pad), views(rows.1, interleaved[1], dst_pad));
            let regions: Vec<_> = (0..3u32)
                .map(|i| Region { src: from[i as usize], dst: to[i as usize], bytes: u64::from(i) + 1, part: i * step })
                .collect();
            let route = Route::new(&regions, ends[0], ends[1], false).unwrap();
            let (pieces, _) = compile(&route, &pairs).unwrap();
            let mut found: Vec<_> =
                pieces.iter().flat_map(|&[src, dst, bytes]| (0..bytes).map(move |i| (dst + i, src + i))).collect();
            let at = |side: Side, id: u32, k: u32| side.base + u64::from(id / k) * side.row + u64::from(id % k) * side.sub;
            let mut wanted: Vec<_> = regions
                .iter()
                .flat_map(|r| pairs.iter().map(move |p| (at(r.dst, p[1], rows.1), at(r.src, p[0], rows.0), r.bytes)))
                .flat_map(|(dst, src, bytes)| (0..bytes).map(move |i| (dst + i, src + i)))
                .collect();
            found.sort_unstable();
            wanted.sort_unstable();
            prop_assert_eq!(found, wanted);
        }
    }
}
