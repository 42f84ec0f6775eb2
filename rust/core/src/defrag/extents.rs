//! Empties extents for page classes that lack some: the blocks in use there move to other extents of their class.
//!
//! An extent with a block in use stays with its class, however few these are. Nothing moves unless all extents that are
//! lacking can be emptied, apart from the budget: the cheapest first. What is cached there stays until another class takes
//! the extent.
//!
//! Before that, blocks in use leave the extents beyond the end of an arena that has shrunk, as many as can.

use super::view::SequenceFacts;
use super::{Budget, Defrag, Facts, HoleUse, Moves};
use crate::error::Result;
use crate::id::{BlockId, Tier};
use crate::page::{MAX_CLASSES, PerClass};
use crate::placement::{Occupancy, Tracker};
use crate::pool::{BusyExtent, Pool};
use crate::sequence::Sequences;
use crate::transfer::{OpenStep, View};
use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

/// The blocks to move out of some extents.
#[derive(Default)]
struct Choice {
    /// By extent: its class, and its blocks.
    sources: Vec<(usize, Vec<BlockId>)>,
    /// Extents with blocks in use that they can move to.
    staying: HashSet<usize>,
    /// By class: blocks to move out of extents beyond the end.
    leaving: [Vec<BlockId>; MAX_CLASSES],
    /// Blocks that may not move now.
    held: usize,
    /// Whether all extents that are lacking will be empty.
    is_enough: bool,
}

impl Defrag {
    /// Decides moves; see [`Manager::empty_extents`](crate::Manager::empty_extents).
    pub(crate) fn empty_extents(
        (sequences, step): (&mut Sequences, &mut OpenStep<'_>),
        wanted: PerClass,
        kept: usize,
        budget: Budget,
    ) -> Result<Moves> {
        sequences.track_owners(step)?;
        let Choice { sources, staying, leaving, held, is_enough } = choose(sequences, step.view(), wanted, kept);
        let (mut left, mut bytes, mut chosen) = (budget.moves, budget.bytes, [const { Vec::new() }; MAX_CLASSES]);
        let mut within_budget = |step: &OpenStep<'_>, class: usize, sources: &[BlockId]| {
            let size = step.tiers.device().stride(class).unwrap_or(1);
            let count = usize::try_from(bytes / size).unwrap_or(usize::MAX).min(left).min(sources.len());
            (left, bytes) = (left - count, bytes - count as u64 * size);
            count
        };
        let (evicted, mut planned) = (step.tiers.device().evictions(), 0);
        for (class, sources) in leaving.iter().enumerate().filter(|(_, sources)| !sources.is_empty()) {
            let count = within_budget(step, class, sources);
            step.prepare(Tier::Device, PerClass::of(class, count), true);
            planned += move_to((sequences, step), class, &sources[..count], None);
        }
        let mut all: usize = leaving.iter().map(Vec::len).sum();
        let still = sources.iter().map(|(_, sources)| sources.len()).sum();
        let stuck = if is_enough { 0 } else { still };
        // A class gets only whole extents: to empty fewer than are lacking would cost copies and free nothing of use.
        if is_enough {
            all += still;
            for (class, sources) in sources {
                let count = within_budget(step, class, &sources);
                chosen[class].extend_from_slice(&sources[..count]);
            }
        }
        for (class, sources) in chosen.iter().enumerate().filter(|(_, sources)| !sources.is_empty()) {
            planned += move_to((sequences, step), class, sources, Some(&staying));
        }
        let dropped = usize::try_from(step.tiers.device().evictions() - evicted).unwrap_or(usize::MAX);
        Ok(Moves { planned, left: all - planned, stuck, held, dropped })
    }
}

/// Begins moves of blocks of a class to others, in some extents or anywhere, as far as there are any; returns their number.
fn move_to(
    (sequences, step): (&mut Sequences, &mut OpenStep<'_>),
    class: usize,
    sources: &[BlockId],
    extents: Option<&HashSet<usize>>,
) -> usize {
    let targets = take_in(step, class, sources.len(), extents);
    let planned = targets.len();
    for (&from, to) in sources.iter().zip(targets) {
        sequences.seal(from);
        step.tiers.begin_move_to_taken(from, to);
        step.transfers.step_mut().moves_mut().moves.push([from.0, to.0]);
    }
    planned
}

/// Chooses the extents to empty so that classes can take `wanted` blocks while `kept` extents stay empty.
fn choose(sequences: &mut Sequences, view: View<'_>, wanted: PerClass, kept: usize) -> Choice {
    let (null, device, mut choice) = (sequences.has_nulls(), view.tiers.device(), Choice::default());
    let Some((tracker, blocks)) = device.tracked() else { return choice };
    let (rows, groups, owners) = sequences.owners();
    let (open, first) = (view.transfers.open(), view.transfers.first());
    let facts = SequenceFacts { rows, owners, blocks, open, first, groups, null, hole_use: HoleUse::Never };
    let (moving, by_extent) = moving(tracker, device);
    // Moves of earlier steps that have yet to land empty some.
    let is_leaving = |place: &BusyExtent| by_extent.get(&place.extent) == Some(&place.held);
    let may_move = |&block: &BlockId| tracker.map().get(block) == Occupancy::Live && facts.may_leave(block);
    let (beyond, busy): (Vec<_>, Vec<_>) = device.busy_extents().into_iter().partition(|place| place.has_left);
    // What stays beyond the end for now takes the place of blocks that are in the arena.
    let mut wanted = wanted;
    for place in beyond {
        let still = device.held_in(place).filter(|&block| !tracker.is_moving(block));
        let (sources, others): (Vec<_>, Vec<_>) = still.partition(may_move);
        wanted += PerClass::of(place.class, sources.len() + others.len());
        choice.held += others.len();
        choice.leaving[place.class].extend(sources);
    }
    let (leaving, mut busy): (Vec<_>, Vec<_>) = busy.into_iter().partition(is_leaving);
    let leaving = leaving.iter().map(|place| PerClass::of(place.class, 1)).sum();
    let mut prospect = device.prospect(wanted, kept, moving, leaving);
    let mut room: PerClass = busy.iter().map(|place| PerClass::of(place.class, place.open)).sum();
    choice.staying = busy.iter().map(|place| place.extent).collect();
    let cost = |place: &BusyExtent| device.stride(place.class).unwrap_or(1).saturating_mul(place.held as u64);
    busy.sort_by_key(|place| (cost(place), Reverse(place.extent)));
    for place in busy {
        if device.lacking(&prospect) == 0 {
            break;
        }
        let elsewhere = room.get(place.class).saturating_sub(place.open);
        if place.held > elsewhere || !device.can_spare(&prospect, place.class) {
            continue;
        }
        let still = device.held_in(place).filter(|&block| !tracker.is_moving(block));
        let (sources, others): (Vec<_>, Vec<_>) = still.partition(may_move);
        if others.is_empty() {
            prospect.add_idle(place.class);
            *room.at(place.class) = elsewhere - sources.len();
            choice.staying.remove(&place.extent);
            choice.sources.push((place.class, sources));
        } else {
            choice.held += others.len();
        }
    }
    choice.is_enough = device.lacking(&prospect) == 0;
    choice
}

/// The blocks in use that are moving, by class and by extent; without those beyond the end, whose places go.
fn moving(tracker: &Tracker, device: &Pool) -> (PerClass, HashMap<usize, usize>) {
    let (mut by_class, mut by_extent) = (PerClass::default(), HashMap::new());
    let is_inside = |&from: &BlockId| device.block(from).is_used() && !device.is_beyond(from);
    for from in tracker.moving().map(|[from, _]| BlockId(from)).filter(is_inside) {
        by_class += PerClass::of(device.class_of(from), 1);
        *by_extent.entry(device.extent_at(from)).or_default() += 1;
    }
    (by_class, by_extent)
}

/// Takes blocks of a class, to be filled, that lie in some extents, or anywhere, and that nothing reads. Other blocks that are taken on
/// the way are free afterwards. If the host gets copies of what is evicted, these are read first: a later call finds them,
/// and evicting more now would gain nothing.
fn take_in(step: &mut OpenStep<'_>, class: usize, count: usize, extents: Option<&HashSet<usize>>) -> Vec<BlockId> {
    let (mut targets, mut others, mut taken) = (Vec::with_capacity(count), Vec::new(), Vec::new());
    while targets.len() < count {
        let most = step.tiers.device().own_available(class).min(count - targets.len());
        if most == 0 {
            break;
        }
        step.take((Tier::Device, class), most, true, &mut taken);
        for block in taken.drain(..) {
            let device = step.tiers.device();
            let is_there = extents.is_none_or(|extents| extents.contains(&device.extent_at(block)))
                && !device.block(block).is_read_ahead();
            if is_there { &mut targets } else { &mut others }.push(block);
        }
        let is_read = |block: &BlockId| step.tiers.device().block(*block).is_read_ahead();
        if step.tiers.keeps_host_copies() && others.iter().any(is_read) {
            break;
        }
    }
    for block in others {
        step.tiers.release((Tier::Device, block));
        step.tiers.give_back(block);
    }
    targets
}
