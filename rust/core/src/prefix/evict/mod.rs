//! Eviction policies: which cached block is evicted first. Choose one by name ([`Eviction`]) or implement your own
//! ([`Evictor`]).
//!
//! Chains of blocks are released from their ends, so that under every policy a block is evicted before the one that it
//! depends on.

mod adaptive;
mod ghosts;
mod host;
mod leveled;
mod miniature;
#[cfg(test)]
mod models;
mod policy;
mod quota;
mod rank;
mod segments;
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "means and classes are small, and clamped"
)]
mod turns;

use crate::hash::Key;
use crate::id::BlockId;
use adaptive::Adaptive;
pub(crate) use host::HostOrder;
use policy::{Lru, Priority};
pub(crate) use quota::Quotas;
pub(crate) use rank::{Guide, RANKS, Rank};
use std::fmt;
pub use turns::HintCount;

/// Highest priority that a block can have.
pub const MAX_PRIORITY: u8 = 15;

/// What an engine knows of a conversation when a turn ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Hint {
    /// It will not go on.
    Over,
    /// The answer calls a tool: the next turn comes when the tool has run.
    ToolCall,
    /// The answer ends the turn: the next one comes when a person writes.
    Turn,
}

impl Hint {
    /// All hints, in the order of their numbers.
    pub const ALL: [Self; 3] = [Self::Over, Self::ToolCall, Self::Turn];

    /// The hint's name in Python.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Over => "over",
            Self::ToolCall => "tool_call",
            Self::Turn => "turn",
        }
    }

    /// The hint of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|hint| hint.name() == name)
    }
}

/// Why a block can no longer be evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Departure {
    /// A sequence uses it again.
    Hit,
    /// It is no longer cached.
    Gone,
}

/// An eviction policy: holds the evictable blocks, and decides which is evicted first.
///
/// A block is published, becomes evictable when its last user is gone, is hit any number of times, and is finally
/// popped or removed. Every block that was inserted and not removed must be popped eventually, or the pool runs dry.
///
/// ```
/// use blockyard_core::{BlockId, Config, Departure, Eviction, Evictor, Manager, Policies};
/// use std::collections::BTreeSet;
///
/// /// The lowest id goes first.
/// #[derive(Clone, Debug, Default)]
/// struct Lowest(BTreeSet<BlockId>);
///
/// impl Evictor for Lowest {
///     fn len(&self) -> usize {
///         self.0.len()
///     }
///     fn contains(&self, block: BlockId) -> bool {
///         self.0.contains(&block)
///     }
///     fn insert(&mut self, block: BlockId) {
///         self.0.insert(block);
///     }
///     fn remove(&mut self, block: BlockId, _departure: Departure) -> bool {
///         self.0.remove(&block)
///     }
///     fn pop(&mut self) -> Option<BlockId> {
///         self.0.pop_first()
///     }
///     fn boxed_clone(&self) -> Box<dyn Evictor> {
///         Box::new(self.clone())
///     }
/// }
///
/// let policies = Policies { eviction: Eviction::Custom(|_blocks| Box::new(Lowest::default())), ..Policies::default() };
/// let config = Config { prefix_caching: true, policies, ..Config::new(16, [64, 0, 0]) };
/// assert!(Manager::new(config).is_ok());
/// ```
pub trait Evictor: fmt::Debug + Send + Sync {
    /// Blocks that can be evicted.
    fn len(&self) -> usize;

    /// Whether no block can be evicted.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether a block can be evicted.
    fn contains(&self, block: BlockId) -> bool;

    /// Adds a block to the evictable ones.
    fn insert(&mut self, block: BlockId);

    /// Removes a block, evictable or not, that is used again or gone; returns whether it was evictable.
    fn remove(&mut self, block: BlockId, departure: Departure) -> bool;

    /// Puts an evictable block where it would be if it became evictable now, without counting it as used. The default
    /// counts it.
    fn reorder(&mut self, block: BlockId) {
        if self.remove(block, Departure::Hit) {
            self.insert(block);
        }
    }

    /// Removes the block to evict first.
    fn pop(&mut self) -> Option<BlockId>;

    /// Removes up to `count` blocks to evict first and appends them to `out`.
    fn pop_into(&mut self, count: usize, out: &mut Vec<BlockId>) {
        out.extend(std::iter::from_fn(|| self.pop()).take(count));
    }

    /// Popped blocks are reallocated; `tags` are 32 bits of their former keys.
    fn evicted(&mut self, _tags: &[u32]) {}

    /// A block can be found from now on: how many blocks its prompt has before it, and 32 bits of its key.
    fn publish(&mut self, _block: BlockId, _depth: u32, _tag: u32) {}

    /// The blocks that are published next follow this one in their prompt; none if they are its first or it is unknown.
    fn continue_chain(&mut self, _parent: Option<BlockId>) {}

    /// The release of a sequence's blocks begins, last one first.
    fn begin_chain(&mut self) {}

    /// A block of the chain that is being released stays in use.
    fn hold(&mut self, _block: BlockId) {}

    /// A user of the block sets its retention priority, 0 to [`MAX_PRIORITY`].
    fn prioritise(&mut self, _block: BlockId, _priority: u8) {}

    /// The pool now has `blocks` blocks; blocks beyond are no longer evictable. Remaining blocks keep their state.
    fn resize(&mut self, _blocks: usize) {}

    /// The bytes of a block, evictable or not, have moved to another block without state, which replaces it. By default
    /// the new block counts as just having become evictable.
    fn relocate(&mut self, from: BlockId, to: BlockId) {
        if self.remove(from, Departure::Gone) {
            self.insert(to);
        }
    }

    /// A copy.
    fn boxed_clone(&self) -> Box<dyn Evictor>;
}

/// Eviction policies by name.
#[derive(Clone, Copy, Debug, Default)]
pub enum Eviction {
    /// Least recently used first.
    Lru,
    /// By the rule with the most current hits, measured by miniature caches.
    #[default]
    Adaptive,
    /// By priorities that decay: each level is worth one turnover of the pool.
    Priority,
    /// The caller's policy, created for a number of blocks.
    Custom(fn(usize) -> Box<dyn Evictor>),
}

impl Eviction {
    /// All named policies.
    pub const NAMED: [Self; 3] = [Self::Lru, Self::Adaptive, Self::Priority];

    /// The policy's name in messages and in Python.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Adaptive => "adaptive",
            Self::Priority => "priority",
            Self::Custom(_) => "custom",
        }
    }

    /// The policy of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMED.into_iter().find(|policy| policy.name() == name)
    }
}

impl Clone for Box<dyn Evictor> {
    fn clone(&self) -> Self {
        self.boxed_clone()
    }
}

/// The policy of one pool. The named ones are called without indirection.
#[expect(clippy::large_enum_variant, reason = "there are a few policies, and each block calls one")]
#[derive(Debug, Clone)]
pub(crate) enum Policy {
    Lru(Lru),
    Adaptive(Adaptive),
    Priority(Priority),
    Custom(Box<dyn Evictor>),
    /// Another policy under quotas.
    Quotas(Box<Quotas>),
    /// The host's, which continues the device's.
    Host(Box<HostOrder>),
}

/// Dispatches a method call to the policy.
macro_rules! dispatch {
    ($policy:expr, $inner:ident => $call:expr) => {
        match $policy {
            Policy::Lru($inner) => $call,
            Policy::Adaptive($inner) => $call,
            Policy::Priority($inner) => $call,
            Policy::Custom($inner) => $call,
            Policy::Quotas($inner) => $call,
            Policy::Host($inner) => $call,
        }
    };
}

impl Policy {
    pub(crate) fn new(eviction: Eviction, blocks: usize) -> Self {
        match eviction {
            Eviction::Lru => Self::Lru(Lru::new(blocks)),
            Eviction::Adaptive => Self::Adaptive(Adaptive::new(blocks)),
            Eviction::Priority => Self::Priority(Priority::new(blocks)),
            Eviction::Custom(make) => Self::Custom(make(blocks)),
        }
    }

    pub(crate) fn len(&self) -> usize {
        dispatch!(self, policy => policy.len())
    }

    pub(crate) fn contains(&self, block: BlockId) -> bool {
        dispatch!(self, policy => policy.contains(block))
    }

    pub(crate) fn reorder(&mut self, block: BlockId) {
        dispatch!(self, policy => policy.reorder(block));
    }

    /// Evictable blocks in eviction order.
    pub(crate) fn order(&self) -> Vec<BlockId> {
        let mut order = Vec::with_capacity(self.len());
        match self {
            Self::Lru(policy) => order.extend(policy.iter()),
            Self::Quotas(policy) => return policy.inner.order(),
            _ => self.clone().pop_into(self.len(), &mut order),
        }
        order
    }

    /// Takes out the block that goes first, with the rank that its host copy will have.
    pub(crate) fn pop_ranked(&mut self) -> Option<(BlockId, Rank)> {
        match self {
            Self::Lru(policy) => policy.pop_ranked(),
            Self::Adaptive(policy) => policy.segments().pop_ranked(),
            Self::Priority(policy) => policy.levels.pop_ranked(),
            Self::Quotas(policy) => policy.pop_ranked(),
            // It says nothing of their order: on the host the first to come goes first.
            Self::Custom(policy) => policy.pop().map(|block| (block, Rank { ring: 0, stamp: 0 })),
            Self::Host(policy) => policy.pop().map(|block| (block, Rank { ring: 0, stamp: 0 })),
        }
    }

    /// What the host's order takes over from this one; `None` for a policy that has no stamps.
    pub(crate) fn guide(&self) -> Option<Guide> {
        match self {
            Self::Lru(policy) => Some(policy.guide()),
            Self::Adaptive(policy) => Some(policy.guide()),
            Self::Priority(policy) => Some(policy.levels.guide()),
            Self::Quotas(policy) => policy.inner.guide(),
            Self::Custom(_) | Self::Host(_) => None,
        }
    }

    /// The rank of a block that becomes evictable only when it reaches the host.
    pub(crate) fn newest(&self) -> Rank {
        Rank { ring: self.guide().map_or(0, |guide| guide.rule.newcomers()), stamp: 0 }
    }

    /// Continues at a stamp of the host's order.
    pub(crate) fn set_clock(&mut self, clock: u32) {
        match self {
            Self::Lru(policy) => policy.set_clock(clock),
            Self::Adaptive(policy) => policy.segments().set_clock(clock),
            Self::Priority(policy) => policy.levels.set_clock(clock),
            Self::Quotas(policy) => policy.inner.set_clock(clock),
            Self::Custom(_) | Self::Host(_) => {}
        }
    }

    /// Follows a clock in seconds.
    pub(crate) fn set_now(&mut self, seconds: f64) {
        match self {
            Self::Adaptive(policy) => policy.set_now(seconds),
            Self::Quotas(policy) => policy.inner.set_now(seconds),
            Self::Lru(_) | Self::Priority(_) | Self::Custom(_) | Self::Host(_) => {}
        }
    }

    /// Notes that the chain released next is a turn that ends; `keys` are those of its blocks.
    pub(crate) fn end_turn(&mut self, keys: &[Key], hint: Option<Hint>) {
        match self {
            Self::Adaptive(policy) => policy.end_turn(keys, hint),
            Self::Quotas(policy) => policy.inner.end_turn(keys, hint),
            Self::Lru(_) | Self::Priority(_) | Self::Custom(_) | Self::Host(_) => {}
        }
    }

    /// Begins to put the blocks of a conversation, which something else than a turn's end tells of, where a hint belongs:
    /// [`Policy::reorder`] them from its end. Returns false, and does nothing, if the policy takes no hints.
    pub(crate) fn hint(&mut self, keys: &[Key], hint: Hint) -> bool {
        match self {
            Self::Adaptive(policy) => policy.hint(keys, hint),
            Self::Quotas(policy) => return policy.inner.hint(keys, hint),
            Self::Lru(_) | Self::Priority(_) | Self::Custom(_) | Self::Host(_) => return false,
        }
        true
    }

    /// Notes that the chain of a turn, or of a hint, is released.
    pub(crate) fn end_chain(&mut self) {
        match self {
            Self::Adaptive(policy) => policy.segments().end_chain(),
            Self::Quotas(policy) => policy.inner.end_chain(),
            Self::Lru(_) | Self::Priority(_) | Self::Custom(_) | Self::Host(_) => {}
        }
    }

    /// By hint: the turns that ended with it, and what came of them.
    pub(crate) fn hint_counts(&self) -> [HintCount; Hint::ALL.len()] {
        match self {
            Self::Adaptive(policy) => policy.hint_counts(),
            Self::Quotas(policy) => policy.inner.hint_counts(),
            Self::Lru(_) | Self::Priority(_) | Self::Custom(_) | Self::Host(_) => Default::default(),
        }
    }

    /// Counts the blocks of the tier that evicted blocks are copied to.
    pub(crate) fn extend(&mut self, below: usize) {
        match self {
            Self::Adaptive(policy) => policy.extend(below),
            Self::Priority(policy) => policy.levels.extend(below),
            Self::Quotas(policy) => policy.inner.extend(below),
            Self::Lru(_) | Self::Custom(_) | Self::Host(_) => {}
        }
    }

    /// Notes that a published block was loaded from the host, where it was in this segment or level.
    pub(crate) fn restore(&mut self, block: BlockId, ring: u8) {
        match self {
            Self::Adaptive(policy) => policy.segments().restore(block, ring),
            Self::Priority(policy) => policy.prioritise(block, ring),
            Self::Quotas(policy) => policy.inner.restore(block, ring),
            Self::Lru(_) | Self::Custom(_) | Self::Host(_) => {}
        }
    }

    /// The host's order, if this is it.
    #[inline]
    pub(crate) fn host_mut(&mut self) -> Option<&mut HostOrder> {
        match self {
            Self::Host(policy) => Some(policy),
            _ => None,
        }
    }

    /// Sets a tenant's quota, in a pool of `blocks` blocks, which each have a `weight`; tenants are numbered from 1.
    pub(crate) fn set_quota(&mut self, tenant: u16, quota: usize, blocks: usize, weight: usize) {
        if !matches!(self, Self::Quotas(_)) {
            let inner = std::mem::replace(self, Self::Lru(Lru::new(0)));
            *self = Self::Quotas(Box::new(Quotas::new(inner, blocks, weight)));
        }
        if let Self::Quotas(policy) = self {
            policy.set(tenant, quota);
        }
    }

    /// The quotas, if there are any.
    pub(crate) fn quotas(&self) -> Option<&Quotas> {
        match self {
            Self::Quotas(policy) => Some(policy),
            _ => None,
        }
    }

    /// The quotas, if there are any.
    pub(crate) fn quotas_mut(&mut self) -> Option<&mut Quotas> {
        match self {
            Self::Quotas(policy) => Some(policy),
            _ => None,
        }
    }

    #[inline]
    pub(crate) fn insert(&mut self, block: BlockId) {
        dispatch!(self, policy => policy.insert(block));
    }

    #[inline]
    pub(crate) fn remove(&mut self, block: BlockId, departure: Departure) -> bool {
        dispatch!(self, policy => policy.remove(block, departure))
    }

    pub(crate) fn pop_into(&mut self, count: usize, out: &mut Vec<BlockId>) {
        dispatch!(self, policy => policy.pop_into(count, out));
    }

    #[inline]
    pub(crate) fn publish(&mut self, block: BlockId, depth: u32, tag: u32) {
        dispatch!(self, policy => policy.publish(block, depth, tag));
    }

    pub(crate) fn evicted(&mut self, tags: &[u32]) {
        dispatch!(self, policy => policy.evicted(tags));
    }

    pub(crate) fn resize(&mut self, blocks: usize) {
        dispatch!(self, policy => policy.resize(blocks));
    }

    pub(crate) fn continue_chain(&mut self, parent: Option<BlockId>) {
        dispatch!(self, policy => policy.continue_chain(parent));
    }

    #[inline]
    pub(crate) fn begin_chain(&mut self) {
        dispatch!(self, policy => policy.begin_chain());
    }

    #[inline]
    pub(crate) fn hold(&mut self, block: BlockId) {
        dispatch!(self, policy => policy.hold(block));
    }

    pub(crate) fn prioritise(&mut self, block: BlockId, priority: u8) {
        dispatch!(self, policy => policy.prioritise(block, priority));
    }

    pub(crate) fn relocate(&mut self, from: BlockId, to: BlockId) {
        dispatch!(self, policy => policy.relocate(from, to));
    }
}
