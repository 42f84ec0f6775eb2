//! Packs sequences into as few contiguous runs of blocks as possible.
//!
//! A sequence is split into *pieces*, its current contiguous runs. Starting with its first piece, as many pieces as
//! possible are laid side by side, around pieces that stay or into a run of holes, so that two or more pieces become
//! one run. Blocks shared by several sequences are arranged with the first of these sequences, except for pieces that
//! another sequence already continues in place: moving those would gain nothing.

use super::facts::{Facts, HoleUse, Remaining};
use super::rules::{Pairs, Rules};
use super::spans::Spans;
use crate::id::BlockId;
use crate::placement::BlockMap;
use crate::reuse::BlockSet;
use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::ops::Range;

/// Block tables, without null blocks; most important first.
pub type Sequences<'a> = [&'a [BlockId]];

/// Number of contiguous runs over all sequences, counting shared runs once, and the maximum for a single sequence.
#[must_use]
pub fn runs(sequences: &Sequences<'_>) -> (usize, usize) {
    let (mut seen, mut all, mut most) = (HashSet::new(), 0, 0);
    for sequence in sequences {
        let (mut own, mut end) = (0, None);
        for &block in *sequence {
            let is_start = end != Some(block.0);
            own += usize::from(is_start);
            all += usize::from(seen.insert(block) && is_start);
            end = Some(block.0 + 1);
        }
        most = most.max(own);
    }
    (all, most)
}

/// The first block of every adjacent pair that is consecutive in some sequence.
fn links(sequences: &Sequences<'_>, capacity: usize) -> BlockSet {
    let mut links = BlockSet::empty(capacity);
    let pairs = sequences.iter().flat_map(|sequence| sequence.windows(2));
    for pair in pairs.filter(|pair| pair[0].0 + 1 == pair[1].0 && pair[0].index() < capacity) {
        links.insert(pair[0]);
    }
    links
}

/// A contiguous run of one sequence.
#[derive(Clone, Debug)]
struct Piece {
    /// Where it lies, or will lie after the moves planned for earlier sequences.
    at: Range<u32>,
    /// Where it will start by the current plan.
    to: u32,
    can_move: bool,
    /// Blocks that their owner does not allow to move now.
    held: usize,
}

impl Piece {
    fn len(&self) -> u32 {
        self.at.end - self.at.start
    }

    fn moves(&self) -> bool {
        self.to != self.at.start
    }

    fn pairs(&self) -> impl Iterator<Item = [u32; 2]> + use<> {
        self.at.clone().zip(self.to..).map(|(from, to)| [from, to])
    }
}

/// Pieces to lay side by side: one run.
struct Run {
    pieces: Range<usize>,
    /// Where the first of them starts.
    start: u32,
    moves: u32,
}

/// Arranges sequences, one after the other.
pub(super) struct Arranger<'a, 'b, F> {
    pub(super) places: &'a mut BlockMap,
    pub(super) rules: &'a Rules<'b, F>,
    pub(super) budget_left: &'a mut Remaining,
    pub(super) out: &'a mut Pairs,
    /// All pairs; their blocks are suspended.
    pub(super) named: &'a mut Vec<[u32; 2]>,
}

impl<F: Facts> Arranger<'_, '_, F> {
    /// Moves blocks until each sequence has at most `wanted` runs; running sequences come last. Returns how many blocks
    /// of unfinished sequences may not move now.
    pub(super) fn arrange(&mut self, sequences: &Sequences<'_>, wanted: usize) -> usize {
        let is_hot = |sequence: &[BlockId]| sequence.last().is_some_and(|&block| self.rules.facts.is_hot(block));
        // Running sequences last: the next tokens of one may break what was joined, and cancel its moves.
        let (hot, cold): (Vec<_>, Vec<_>) = sequences.iter().partition(|sequence| is_hot(sequence));
        let (mut claimed, links) = (HashMap::new(), links(sequences, self.places.holes().capacity()));
        let (mut spans, mut held) = (None, 0);
        for sequence in cold.into_iter().chain(hot) {
            if self.budget_left.buys(HoleUse::Move) == 0 || self.places.holes().is_empty() {
                break;
            }
            let mut pieces = self.pieces(sequence, &claimed, &links);
            if pieces.len() > wanted {
                held += pieces.iter().map(|piece| piece.held).sum::<usize>();
                // Finding spans scans the holes: only if a sequence needs one, and then once for all.
                let spans = spans.get_or_insert_with(|| {
                    let longest = sequences.iter().map(|sequence| sequence.len()).max().unwrap_or(0);
                    Spans::find(self.places, self.rules, longest)
                });
                self.join(&mut pieces, wanted, spans);
                self.stay(&mut pieces);
                self.name(&pieces);
            }
            let at = pieces.iter().flat_map(|piece| piece.to..piece.to + piece.len());
            for (&block, at) in sequence.iter().zip(at) {
                claimed.entry(block).or_insert(at);
            }
        }
        held
    }

    /// Splits a sequence into pieces; blocks claimed by earlier sequences stay where those put them.
    fn pieces(&self, sequence: &[BlockId], claimed: &HashMap<BlockId, u32>, links: &BlockSet) -> Vec<Piece> {
        let mut pieces: Vec<Piece> = Vec::new();
        for &block in sequence {
            let at = claimed.get(&block).copied();
            let is_free = at.is_none() && self.places.live().contains(block) && !self.rules.kept.contains(&block.0);
            let can_move = is_free && self.rules.facts.may_leave(block);
            let (at, held) = (at.unwrap_or(block.0), usize::from(is_free && !can_move));
            match pieces.last_mut() {
                Some(last) if last.at.end == at => {
                    last.at.end += 1;
                    last.can_move &= can_move;
                    last.held += held;
                }
                _ => pieces.push(Piece { at: at..at + 1, to: at, can_move, held }),
            }
        }
        // The sequences diverge here, so the link belongs to the other one.
        for piece in &mut pieces {
            let before = piece.at.start.checked_sub(1);
            piece.can_move &= !links.contains(BlockId(piece.at.end - 1))
                && before.is_none_or(|block| !links.contains(BlockId(block)));
        }
        pieces
    }

    /// Joins pieces until there are no more than `wanted` runs, or no two can be joined.
    fn join(&mut self, pieces: &mut [Piece], wanted: usize, spans: &mut Spans) {
        let (mut first, mut runs) = (0, pieces.len());
        while first + 1 < pieces.len() && runs > wanted {
            let Some(run) = self.longest(pieces, first, spans) else {
                first += 1;
                continue;
            };
            let mut to = run.start;
            for piece in &mut pieces[run.pieces.clone()] {
                piece.to = to;
                to += piece.len();
                if piece.moves() {
                    self.reserve(piece);
                }
            }
            runs -= run.pieces.len() - 1;
            first = run.pieces.end;
        }
    }

    /// Keeps a piece whose move would not improve adjacency.
    fn stay(&mut self, pieces: &mut [Piece]) {
        // Taking one move back changes the neighbours of others, so look again until nothing changes. Each round takes
        // back at least one move, so this ends.
        let mut again = true;
        while again {
            again = false;
            for i in 0..pieces.len() {
                let piece = &pieces[i];
                let before = i.checked_sub(1).map(|i| pieces[i].to + pieces[i].len());
                let after = pieces.get(i + 1).map(|piece| piece.to);
                let neighbours =
                    |to: u32| usize::from(before == Some(to)) + usize::from(after == Some(to + piece.len()));
                if piece.moves() && neighbours(piece.at.start) >= neighbours(piece.to) {
                    self.unreserve(&pieces[i]);
                    pieces[i].to = pieces[i].at.start;
                    again = true;
                }
            }
        }
    }

    /// The longest run of two pieces or more from `first` on, with the fewest moves.
    fn longest(&self, pieces: &[Piece], first: usize, spans: &mut Spans) -> Option<Run> {
        let movable = pieces[first..].iter().take_while(|piece| piece.can_move);
        // Two ways to win: all pieces into one run of holes, or around a piece that stays where it is and costs nothing.
        let span = spans.fit(self.places, movable.map(Piece::len).sum(), self.rules.facts.content());
        let mut best = span.and_then(|span| self.lay(pieces, first, span.start));
        let most = u32::try_from(self.budget_left.buys(HoleUse::Move)).unwrap_or(u32::MAX);
        let mut before = 0;
        // Around each piece that stays; what lies in between must fit in front of it.
        for anchor in &pieces[first..] {
            let start = anchor.at.start.checked_sub(before);
            if let Some(found) = start.and_then(|start| self.lay(pieces, first, start)) {
                let key = |run: &Run| (run.pieces.end, Reverse(run.moves));
                if best.as_ref().is_none_or(|best| key(best) < key(&found)) {
                    best = Some(found);
                }
            }
            before += anchor.len();
            // A later anchor would need this piece in front of it, or more moves than are left.
            if !anchor.can_move || before > most {
                break;
            }
        }
        best
    }

    /// As many pieces from `first` on as fit side by side from `start` on.
    fn lay(&self, pieces: &[Piece], first: usize, start: u32) -> Option<Run> {
        let (mut end, mut to, mut costs) = (first, start, (0, 0));
        for piece in &pieces[first..] {
            let next = to.saturating_add(piece.len());
            if piece.at.start != to {
                let more = if piece.can_move { self.cost(to..next) } else { None };
                let Some(more) = more.filter(|more| self.affords(costs, *more)) else { break };
                costs = (costs.0 + more.0, costs.1 + more.1);
            }
            (to, end) = (next, end + 1);
        }
        (end > first + 1).then_some(Run { pieces: first..end, start, moves: costs.0 })
    }

    /// Moves needed to fill a range, and blocks written for them; `None` if part of the range cannot be entered.
    fn cost(&self, range: Range<u32>) -> Option<(u32, u32)> {
        let mut costs = (0, 0);
        for hole in range {
            let hole_use = self.hole_use(hole)?;
            costs = (costs.0 + 1, costs.1 + if hole_use == HoleUse::Exchange { 2 } else { 1 });
        }
        Some(costs)
    }

    fn hole_use(&self, hole: u32) -> Option<HoleUse> {
        let hole_use =
            if self.places.holes().contains(BlockId(hole)) { self.rules.hole_use(hole) } else { HoleUse::Never };
        (hole_use != HoleUse::Never).then_some(hole_use)
    }

    fn affords(&self, so_far: (u32, u32), more: (u32, u32)) -> bool {
        let (moves, writes) = (u64::from(so_far.0) + u64::from(more.0), u64::from(so_far.1) + u64::from(more.1));
        moves <= self.budget_left.moves as u64 && writes <= self.budget_left.writes as u64
    }

    /// Pays for a piece's moves and hides its blocks from later planning.
    fn reserve(&mut self, piece: &Piece) {
        for [from, to] in piece.pairs() {
            self.budget_left.pay(self.rules.facts.hole_use(BlockId(to)), 1);
            // Neither the hole nor the block left behind may be planned twice in one step: all moves run at once.
            self.places.suspend([from, to]);
        }
    }

    fn unreserve(&mut self, piece: &Piece) {
        for [from, to] in piece.pairs() {
            self.budget_left.refund(self.rules.facts.hole_use(BlockId(to)));
            self.places.resume([from, to]);
        }
    }

    /// Emits the pairs of all pieces that move.
    fn name(&mut self, pieces: &[Piece]) {
        for [from, to] in pieces.iter().filter(|piece| piece.moves()).flat_map(Piece::pairs) {
            self.out.of(self.rules.facts.hole_use(BlockId(to))).push([from, to]);
            self.named.push([from, to]);
        }
    }
}
