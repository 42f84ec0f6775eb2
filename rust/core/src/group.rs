//! Cache groups: the kinds of attention in a hybrid model, each with its own block tables and prefix match rule.
//!
//! A sequence has one table in each group. Groups whose blocks have equal bytes share the blocks of one page class.
//! Entries dropped from a table become the null block, which is block 0 of every tier and never allocated.

use crate::error::{Error, Result, invalid};
use crate::hash::{GroupMark, RESERVED_TOKEN};
use crate::id::BlockId;
use crate::page::{MAX_CLASSES, PerClass};
use std::ops::Range;

/// Replaces block table entries that are no longer needed.
pub const NULL_BLOCK: BlockId = BlockId(0);

/// Maximum number of cache groups in a manager.
pub const MAX_GROUPS: usize = 16;

/// Maximum number of null entries that one call may append to a block table, one for each block that a recurrent group
/// passes over.
pub(crate) const MAX_PASSED: usize = 1 << 24;

/// Which earlier tokens the layers of a cache group need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Group {
    /// All of them.
    Full,
    /// All of them, and for the last of them also the token that follows: the layers of an EAGLE or MTP drafter, which
    /// compute an entry from a token's hidden state and the next token. A step that adds tokens writes the entry before
    /// them again.
    Drafter,
    /// As [`Drafter`](Self::Drafter), with layers that see a window only. The entry before a step's tokens sees as many
    /// entries as theirs, so a token needs one more than with a sliding window.
    WindowedDrafter {
        /// Tokens that one query sees, itself included.
        window: u32,
    },
    /// The token itself and the `window - 1` before it; earlier blocks are freed.
    SlidingWindow {
        /// Tokens that one query sees, itself included.
        window: u32,
    },
    /// Those since the last multiple of `chunk`, in Llama 4's chunked attention; earlier blocks are freed.
    Chunked {
        /// Tokens of a chunk.
        chunk: u32,
    },
    /// One state per block: the state after the block's last token. A step reads the state from the previous token's
    /// block, and writes only the state after its own last token, to that token's block, and those after its drafts, each
    /// to a separate block.
    Recurrent,
    /// The tokens of an encoder, which are set once and never grow.
    CrossAttention,
}

impl Group {
    /// Blocks at the start of a table that no query at position `computed` or later needs.
    #[inline]
    fn unneeded(self, computed: u32, block_size: u32) -> usize {
        let first = match self {
            Self::Full | Self::Drafter | Self::CrossAttention => 0,
            Self::SlidingWindow { window } => computed.saturating_add(1).saturating_sub(window),
            Self::WindowedDrafter { window } => computed.saturating_sub(window),
            Self::Chunked { chunk } => computed - computed % chunk,
            Self::Recurrent => computed.saturating_sub(1),
        };
        (first / block_size) as usize
    }

    /// The blocks that a token after the first `tokens` needs, and with them everything that a prompt which continues
    /// there, a fork or a truncated sequence has to have.
    #[inline]
    pub(crate) fn needs(self, tokens: u32, block_size: u32) -> Range<usize> {
        let end = tokens.div_ceil(block_size) as usize;
        self.unneeded(tokens, block_size).min(end)..end
    }

    /// Number of new table entries that stay empty when `count` tokens follow the first `len`, in a table of `held`
    /// blocks: those whose states a recurrent group passes over.
    #[inline]
    pub(crate) fn skipped(self, len: u32, count: u32, held: usize, block_size: u32) -> usize {
        if self != Self::Recurrent || count == 0 {
            return 0;
        }
        let last = (u64::from(len) + u64::from(count) - 1) / u64::from(block_size);
        usize::try_from(last).unwrap_or(usize::MAX).saturating_sub(held)
    }

    /// Entries of a table of `held` blocks that get no state when `count` tokens follow the first `len`: those between
    /// the block of the previous token and the block of the last new one. If this step has `begun` the previous token's
    /// block, that block gets no state either.
    #[inline]
    pub(crate) fn passed_over(self, len: u32, count: u32, held: usize, begun: bool, block_size: u32) -> Range<usize> {
        if self != Self::Recurrent || count == 0 {
            return 0..0;
        }
        let first = (len.div_ceil(block_size) as usize).saturating_sub(usize::from(begun));
        let last = (u64::from(len) + u64::from(count) - 1) / u64::from(block_size);
        first..usize::try_from(last).unwrap_or(usize::MAX).min(held).max(first)
    }

    /// Maximum number of blocks that a sequence of `tokens` and `lookahead` holds at once, if at most `chunk` tokens
    /// are added at a time. A recurrent group holds a state for each of `lookahead` draft tokens.
    #[must_use]
    pub fn peak_blocks(self, tokens: u32, lookahead: u32, chunk: u32, block_size: u32) -> usize {
        let blocks = |tokens: u64| usize::try_from(tokens.div_ceil(u64::from(block_size))).unwrap_or(usize::MAX);
        let whole = blocks(u64::from(tokens) + u64::from(lookahead));
        let step = u64::from(chunk.min(tokens)) + u64::from(lookahead);
        match self {
            Self::Full | Self::Drafter | Self::CrossAttention => whole,
            Self::SlidingWindow { window } | Self::Chunked { chunk: window } => {
                whole.min(blocks(u64::from(window) - 1 + step) + 1)
            }
            Self::WindowedDrafter { window } => whole.min(blocks(u64::from(window) + step) + 1),
            Self::Recurrent => {
                let states = if chunk >= tokens { 1 } else { 2 };
                blocks(u64::from(tokens)).min(states).saturating_add(lookahead as usize)
            }
        }
    }

    /// Blocks that a sequence holds while a step adds its tokens from `start` to `end`, and `lookahead` slots or draft
    /// tokens, each of which has a state in a recurrent group.
    pub(crate) fn held(self, start: u32, end: u32, lookahead: u32, block_size: u32) -> usize {
        let blocks = |tokens: u64| usize::try_from(tokens.div_ceil(u64::from(block_size))).unwrap_or(usize::MAX);
        let whole = blocks(u64::from(end) + u64::from(lookahead));
        let first = self.unneeded(start, block_size);
        match self {
            // The states between the first and the last block are passed over.
            Self::Recurrent if end > start => {
                let last = (end - 1) / block_size;
                lookahead as usize + 1 + usize::from(start > 0 && first < last as usize)
            }
            _ => whole.saturating_sub(first),
        }
    }

    /// The kind and its parameter, in exported keys.
    fn mark(self) -> [u32; 2] {
        match self {
            Self::Full => [0, 0],
            Self::Drafter => [1, 0],
            Self::SlidingWindow { window } => [2, window],
            Self::Chunked { chunk } => [3, chunk],
            Self::Recurrent => [4, 0],
            Self::CrossAttention => [5, 0],
            Self::WindowedDrafter { window } => [6, window],
        }
    }

    /// Whether table entries become the null block.
    pub(crate) fn leaves_nulls(self) -> bool {
        !matches!(self, Self::Full | Self::Drafter | Self::CrossAttention)
    }

    /// Whether an entry depends on the next token, too.
    pub(crate) fn is_drafter(self) -> bool {
        matches!(self, Self::Drafter | Self::WindowedDrafter { .. })
    }

    /// Blocks that a group which leaves blocks behind keeps for a resume point, at most.
    fn max_tail(self, block_size: u32) -> usize {
        match self {
            Self::SlidingWindow { window } | Self::Chunked { chunk: window } => {
                (window - 1).div_ceil(block_size) as usize
            }
            Self::WindowedDrafter { window } => window.div_ceil(block_size) as usize,
            _ => 1,
        }
    }
}

/// Largest block, in bytes.
const MAX_BLOCK_BYTES: u64 = 1 << 40;

/// A cache group and the size of its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PagedGroup {
    /// Which earlier tokens its layers need.
    pub group: Group,
    /// Token slots in one of its blocks, a divisor of the manager's block size.
    pub block_tokens: u32,
    /// Bytes of one of its blocks.
    pub block_bytes: u64,
}

/// The classes of some groups: the number of each one's class, and the bytes of a block of each class.
pub(crate) fn classes_of(groups: &[PagedGroup]) -> Result<(Vec<u8>, Vec<u64>)> {
    let mut bytes: Vec<u64> = Vec::new();
    let mut classes = Vec::with_capacity(groups.len());
    for group in groups {
        if !(1..=MAX_BLOCK_BYTES).contains(&group.block_bytes) {
            return Err(invalid("block_bytes", group.block_bytes, format!("1 to {MAX_BLOCK_BYTES}")));
        }
        let class = bytes.iter().position(|&known| known == group.block_bytes).unwrap_or_else(|| {
            bytes.push(group.block_bytes);
            bytes.len() - 1
        });
        classes.push(u8::try_from(class).unwrap_or(u8::MAX));
    }
    if bytes.len() > MAX_CLASSES {
        let must = format!("at most {MAX_CLASSES}");
        return Err(invalid("number of page classes", bytes.len() as i128, must));
    }
    Ok((classes, bytes))
}

/// The least common multiple; at most the largest number.
fn lcm(a: u32, b: u32) -> u32 {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    (a / x).saturating_mul(b)
}

/// The groups of a manager, growing ones first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Groups {
    all: Box<[Group]>,
    pages: Box<[Page]>,
    /// Bytes of a block of each page class.
    class_bytes: Box<[u64]>,
    /// Token slots in the smallest blocks of growing groups.
    least_tokens: u32,
    growing: usize,
    null: bool,
    /// The group whose blocks have the keys that prompts look for: the first that keeps every block, else the first.
    anchor: usize,
    /// The other groups that keep every block.
    companions: Box<[usize]>,
    /// The groups that leave blocks behind.
    leaving: Box<[usize]>,
    states: bool,
    /// Tokens after a block that its bytes depend on, in some group.
    ahead: u32,
    interval: usize,
}

/// The blocks of one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Page {
    /// Token slots in a block.
    tokens: u32,
    /// Blocks that hold as many tokens as a key stands for.
    per_key: u32,
    class: u8,
    /// Number of the class's first block on the device.
    first: u32,
    bytes: u64,
}

/// How far apart resume points lie at least: a tail takes at most one part in this many of the blocks between two.
const TAIL_SHARE: u64 = 5;

/// See [`Groups::interval`].
fn interval(growing: &[PagedGroup], block_size: u32) -> usize {
    let (mut tail, mut kept) = (0u64, 0u64);
    for &PagedGroup { group, block_tokens, block_bytes } in growing {
        if group.leaves_nulls() {
            tail = tail.saturating_add((group.max_tail(block_tokens) as u64).saturating_mul(block_bytes));
        } else {
            kept = kept.saturating_add(u64::from(block_size / block_tokens).saturating_mul(block_bytes));
        }
    }
    let keys = tail
        .saturating_mul(TAIL_SHARE)
        .checked_div(kept)
        .map_or(0, |keys| keys + u64::from(keys.saturating_mul(kept) < tail.saturating_mul(TAIL_SHARE)));
    usize::try_from(keys).unwrap_or(usize::MAX)
}

impl Groups {
    /// # Errors
    /// There are none or too many, none grows, a window is empty, or an encoder's group is before another; a block size
    /// does not divide `block_size`, the tokens that a key stands for.
    pub(crate) fn new(paged: &[PagedGroup], block_size: u32) -> Result<Self> {
        let groups: &[Group] = &paged.iter().map(|paged| paged.group).collect::<Vec<_>>();
        let growing = groups.iter().take_while(|&&group| group != Group::CrossAttention).count();
        let encoders = groups.len() - growing;
        if growing == 0 || groups.len() > MAX_GROUPS || encoders > 1 {
            return Err(Error::InvalidArgument {
                what: "number of cache groups",
                found: groups.len() as i128,
                must: format!("1 to {MAX_GROUPS}, at most one of them cross attention, after at least one other"),
            });
        }
        for group in groups {
            let what = match group {
                Group::SlidingWindow { window: 0 } | Group::WindowedDrafter { window: 0 } => Some("window"),
                Group::Chunked { chunk: 0 } => Some("chunk"),
                _ => None,
            };
            if let Some(what) = what {
                return Err(Error::InvalidArgument { what, found: 0, must: "at least 1".to_owned() });
            }
        }
        for PagedGroup { group, block_tokens, .. } in paged {
            if *block_tokens == 0 || block_size % block_tokens != 0 {
                return Err(invalid(
                    "block_tokens",
                    *block_tokens,
                    format!("a divisor of {block_size}, the block size"),
                ));
            }
            if *group == Group::Recurrent && *block_tokens != block_size {
                return Err(invalid("block_tokens of a recurrent group", *block_tokens, format!("{block_size}")));
            }
        }
        let (classes, class_bytes) = classes_of(paged)?;
        let page = |(paged, class): (&PagedGroup, u8)| Page {
            tokens: paged.block_tokens,
            per_key: block_size / paged.block_tokens,
            class,
            first: 0,
            bytes: paged.block_bytes,
        };
        let (all_pages, class_bytes) = (paged.iter().zip(classes).map(page).collect(), class_bytes.into());
        let least_tokens = paged[..growing].iter().map(|paged| paged.block_tokens).min().unwrap_or(block_size);
        let null = groups.iter().any(|group| group.leaves_nulls());
        let (leaving, keeping): (Vec<usize>, _) = (0..growing).partition(|&at| groups[at].leaves_nulls());
        // A drafter's last block is its sequence's own before another token follows, as one with a key must be.
        let drafter = groups.iter().position(|group| group.is_drafter());
        let anchor = keeping.first().copied().or(drafter).unwrap_or(0);
        let companions = keeping.into_iter().skip(1).collect();
        let states = groups.contains(&Group::Recurrent);
        let (leaving, ahead) = (leaving.into(), u32::from(drafter.is_some()));
        let interval = interval(&paged[..growing], block_size);
        Ok(Self {
            all: groups.into(),
            pages: all_pages,
            class_bytes,
            least_tokens,
            growing,
            null,
            anchor,
            companions,
            leaving,
            states,
            ahead,
            interval,
        })
    }

    /// The group whose blocks have the keys that prompts look for.
    #[inline]
    pub(crate) fn anchor(&self) -> usize {
        self.anchor
    }

    /// The other groups that keep every block.
    pub(crate) fn companions(&self) -> &[usize] {
        &self.companions
    }

    /// The groups that leave blocks behind.
    pub(crate) fn leaving(&self) -> &[usize] {
        &self.leaving
    }

    /// Whether a group keeps every block.
    pub(crate) fn keeps_all(&self) -> bool {
        self.leaving.len() < self.growing
    }

    /// The mark in exported keys of one of a group's blocks that a key stands for; none for the block with the key in a
    /// model with a group that keeps every block, and no drafter.
    pub(crate) fn mark(&self, (group, part): (u8, u32)) -> Option<GroupMark> {
        let number = usize::from(group);
        let [kind, parameter] = self.all[number].mark();
        let is_plain = number == self.anchor && part == 0 && self.keeps_all() && self.ahead == 0;
        let part = if part == 0 { RESERVED_TOKEN } else { part };
        (!is_plain).then_some([u32::from(group), kind, parameter, RESERVED_TOKEN, part])
    }

    /// Which block with a key a group's block is worth nothing without: the one before it, `before`, or for a block without
    /// a key the one at the same place, `here`. None where only points have blocks.
    pub(crate) fn hangs_on<T>(&self, (group, part): (u8, u32), here: T, before: Option<T>) -> Option<T> {
        let has_key = usize::from(group) == self.anchor && part == 0;
        if has_key { before } else { Some(here) }.filter(|_| self.keeps_all())
    }

    /// Indices of a group's blocks in the tail of a point behind `at` blocks.
    pub(crate) fn tail(&self, group: usize, at: usize, block_size: u32) -> Range<usize> {
        let tokens = u32::try_from(at).unwrap_or(u32::MAX).saturating_mul(block_size);
        let needed = self.all[group].needs(tokens, self.tokens(u8::try_from(group).unwrap_or(u8::MAX)));
        // Its last block is the anchor itself, if no group keeps every block.
        // A token behind it may need no block at all, not even that one.
        let end = needed.end.saturating_sub(usize::from(group == self.anchor));
        needed.start.min(end)..end
    }

    /// The blocks that a point behind `at` keys has besides those of groups that keep every block: their entries in the
    /// tables, and their groups.
    pub(crate) fn point(&self, at: usize, block_size: u32) -> impl Iterator<Item = (usize, usize)> + '_ {
        let anchor = at.checked_sub(1).filter(|_| !self.keeps_all()).map(|last| (self.anchor_entry(last), self.anchor));
        let tails =
            self.leaving.iter().flat_map(move |&group| self.tail(group, at, block_size).map(move |at| (at, group)));
        tails.chain(anchor)
    }

    /// Group and entry of its table of each block that hangs on the one with the key at an index.
    pub(crate) fn companion_places(&self, at: usize) -> impl Iterator<Item = (usize, usize)> + '_ {
        let anchor = self.anchor;
        let groups = std::iter::once(anchor).filter(|_| self.keeps_all()).chain(self.companions.iter().copied());
        groups.flat_map(move |group| {
            let per_key = self.per_key(group);
            (at * per_key..(at + 1) * per_key - usize::from(group == anchor)).map(move |entry| (group, entry))
        })
    }

    /// The blocks of groups that keep every block that the key at an index stands for, the one with the key first: their
    /// entries in the tables, and their groups.
    pub(crate) fn kept(&self, at: usize) -> impl Iterator<Item = (usize, usize)> + '_ {
        let first = self.keeps_all().then(|| (self.anchor_entry(at), self.anchor));
        first.into_iter().chain(self.companion_places(at).map(|(group, entry)| (entry, group)))
    }

    /// The entry of the first group with keys that has the block with the key at an index: the last of those that the key
    /// stands for.
    pub(crate) fn anchor_entry(&self, at: usize) -> usize {
        (at + 1) * self.per_key(self.anchor) - 1
    }

    /// Steps of equal length after which the numbers of held blocks repeat, or only grow.
    pub(crate) fn period(&self, chunk: u32, block_size: u32) -> u32 {
        let keeping = self.growing - self.leaving.len();
        if keeping == 0 || self.class_bytes.len() > 1 {
            return block_size + 2;
        }
        // Each leaving group's number changes by one block at most, while the others' only grow.
        let blocks = self.leaving.len().checked_div(keeping).map_or(1, |more| more + 3);
        let tokens = u32::try_from(blocks).unwrap_or(u32::MAX).saturating_mul(block_size);
        tokens / chunk + 2
    }

    /// Ends of the chunks of chunked attention within some tokens, as many of each group as can meet steps of `chunk` tokens
    /// and the beginnings of blocks in different ways.
    pub(crate) fn chunk_ends(&self, tokens: Range<u32>, chunk: u32) -> impl Iterator<Item = u32> {
        let Range { start, end } = tokens;
        let sizes = self.growing().iter().filter_map(|group| match *group {
            Group::Chunked { chunk } => Some(chunk),
            _ => None,
        });
        let blocks = self.pages.iter().map(|page| page.tokens);
        let all = sizes.clone().chain(blocks).fold(chunk, lcm);
        sizes.flat_map(move |size| {
            let last = end.saturating_sub(1) / size;
            (start / size + 1..=last).rev().take((all / size) as usize).map(move |at| at * size)
        })
    }

    /// Least number of keys between the resume points of a long prompt; 0 if no group keeps what lies between.
    #[inline]
    pub(crate) fn interval(&self) -> usize {
        self.interval
    }

    /// Token slots in a block of a group.
    #[inline]
    pub(crate) fn tokens(&self, group: u8) -> u32 {
        self.pages[usize::from(group)].tokens
    }

    /// Blocks of a group that hold as many tokens as a key stands for.
    #[inline]
    pub(crate) fn per_key(&self, group: usize) -> usize {
        self.pages[group].per_key as usize
    }

    /// The key of a block of a group by its entry in the table: its index, and which of the blocks it is that the key
    /// stands for. The one that prompts look for is 0.
    pub(crate) fn key_of(&self, group: usize, entry: usize) -> (usize, u32) {
        let per_key = self.per_key(group);
        if per_key == 1 {
            return (entry, 0);
        }
        let part = if group == self.anchor { (entry + 1) % per_key } else { entry % per_key };
        (entry / per_key, u32::try_from(part).unwrap_or(u32::MAX))
    }

    /// The page class of a group's blocks.
    #[inline]
    pub(crate) fn class(&self, group: u8) -> usize {
        usize::from(self.pages[usize::from(group)].class)
    }

    /// Number of the first device block of a group's class.
    #[inline]
    pub(crate) fn first_block(&self, group: u8) -> u32 {
        self.pages[usize::from(group)].first
    }

    /// Notes the numbers of the classes' first device blocks.
    pub(crate) fn set_first_blocks(&mut self, first: impl Fn(usize) -> u32) {
        for page in &mut self.pages {
            page.first = first(usize::from(page.class));
        }
    }

    /// `count` blocks of a group.
    #[inline]
    pub(crate) fn blocks(&self, group: u8, count: usize) -> PerClass {
        PerClass::of(self.class(group), count)
    }

    /// Bytes of a block of each page class.
    pub(crate) fn class_bytes(&self) -> &[u64] {
        &self.class_bytes
    }

    /// Token slots in the smallest blocks.
    #[inline]
    pub(crate) fn least_tokens(&self) -> u32 {
        self.least_tokens
    }

    /// Whether blocks of all groups hold as many tokens as a key stands for.
    pub(crate) fn is_even(&self) -> bool {
        self.pages.iter().all(|page| page.per_key == 1)
    }

    /// Number of blocks of all groups that keep every block, for each key; the block with the key is not counted.
    pub(crate) fn num_companions(&self) -> usize {
        let kept = (0..self.growing).filter(|&at| !self.all[at].leaves_nulls());
        kept.map(|at| self.per_key(at)).sum::<usize>().saturating_sub(1)
    }

    pub(crate) fn all(&self) -> &[Group] {
        &self.all
    }

    /// Groups whose tables grow with the sequence.
    pub(crate) fn growing(&self) -> &[Group] {
        &self.all[..self.growing]
    }

    /// Number of the groups whose tables grow.
    #[inline]
    pub(crate) fn num_growing(&self) -> u8 {
        u8::try_from(self.growing).unwrap_or(u8::MAX)
    }

    /// Whether each sequence has only one table, as in most models.
    #[inline]
    pub(crate) fn is_single(&self) -> bool {
        self.all.len() == 1
    }

    /// Whether tables have null blocks.
    #[inline]
    pub(crate) fn has_nulls(&self) -> bool {
        self.null
    }

    /// Whether a group is recurrent.
    #[inline]
    pub(crate) fn has_states(&self) -> bool {
        self.states
    }

    /// Tokens after a block that its bytes depend on: 1 with a drafter, else 0.
    #[inline]
    pub(crate) fn ahead(&self) -> u32 {
        self.ahead
    }

    /// Leading blocks of `tokens` tokens whose bytes no later token decides.
    #[inline]
    pub(crate) fn whole(&self, tokens: u32, block_size: u32) -> u32 {
        tokens.saturating_sub(self.ahead) / block_size
    }

    /// The first token whose entry in a group is written when tokens follow the first `len`.
    #[inline]
    pub(crate) fn first_written(&self, len: u32, group: u8) -> u32 {
        // With a drafter, blocks of groups that keep every block have a key of the same tokens, and share the fate of its
        // blocks.
        let of = self.get(group);
        if of.is_drafter() || !of.leaves_nulls() { len.saturating_sub(self.ahead) } else { len }
    }

    /// Group of an encoder's tokens.
    pub(crate) fn cross(&self) -> bool {
        self.growing < self.all.len()
    }

    #[inline]
    pub(crate) fn get(&self, group: u8) -> Group {
        self.all[usize::from(group)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Groups with blocks of 4 tokens and equal bytes.
    fn of(groups: &[Group]) -> Result<Groups> {
        let paged = |&group| PagedGroup { group, block_tokens: 4, block_bytes: 1 };
        Groups::new(&groups.iter().map(paged).collect::<Vec<_>>(), 4)
    }

    #[test]
    fn groups_of_equal_bytes_share_a_class_in_the_order_of_the_groups() {
        let of = |bytes: &[u64]| {
            let group = |&block_bytes| PagedGroup { group: Group::Full, block_tokens: 4, block_bytes };
            classes_of(&bytes.iter().map(group).collect::<Vec<_>>())
        };
        assert_eq!(of(&[9, 3, 9, 5]), Ok((vec![0, 1, 0, 2], vec![9, 3, 5])));
        assert!(of(&[1, 2, 3, 4, 5]).is_err() && of(&[0]).is_err());
    }

    #[test]
    fn block_sizes_that_keys_do_not_divide_are_refused_by_name() {
        let of = |group, block_tokens| {
            let full = PagedGroup { group: Group::Full, block_tokens: 12, block_bytes: 1 };
            Groups::new(&[full, PagedGroup { group, block_tokens, block_bytes: 2 }], 12)
        };
        let groups = of(Group::SlidingWindow { window: 9 }, 4).unwrap();
        assert_eq!((groups.tokens(1), groups.per_key(1), groups.class(1), groups.is_even()), (4, 3, 1, false));
        assert_eq!(of(Group::Full, 3).unwrap().num_companions(), 4);
        for (group, tokens) in [(Group::Full, 5), (Group::Full, 24), (Group::Full, 0), (Group::Recurrent, 4)] {
            assert!(matches!(of(group, tokens), Err(Error::InvalidArgument { .. })), "{group:?} {tokens}");
        }
    }

    #[test]
    fn points_lie_as_far_apart_as_their_bytes_are_worth() {
        let full = PagedGroup { group: Group::Full, block_tokens: 16, block_bytes: 100 };
        let state = PagedGroup { group: Group::Recurrent, block_tokens: 16, block_bytes: 3010 };
        assert_eq!(Groups::new(&[full, state], 16).unwrap().interval(), 151);
        assert_eq!(Groups::new(&[state], 16).unwrap().interval(), 0);
    }

    #[test]
    fn a_window_needs_the_blocks_of_its_tokens_and_no_others() {
        let group = Group::SlidingWindow { window: 5 };
        // The query at position 8 sees 4 to 8.
        assert_eq!((group.unneeded(7, 4), group.unneeded(8, 4), group.unneeded(12, 4)), (0, 1, 2));
        assert_eq!(Group::SlidingWindow { window: 1 }.unneeded(8, 4), 2);
        assert_eq!(Group::Full.unneeded(1000, 4), 0);
    }

    #[test]
    fn a_drafters_block_is_whole_once_the_token_after_it_is_there() {
        let groups = of(&[Group::Full, Group::Drafter, Group::Recurrent]).unwrap();
        assert_eq!([0, 4, 5, 8, 9].map(|tokens| groups.whole(tokens, 4)), [0, 0, 1, 1, 2]);
        // It goes on in the entry before, next to which the other blocks with that key are written, too.
        assert_eq!([0, 1, 2].map(|group| groups.first_written(8, group)), [7, 7, 8]);
        assert_eq!((groups.first_written(0, 1), Group::Drafter.needs(9, 4)), (0, 0..3));
        let without = of(&[Group::Full]).unwrap();
        assert_eq!((without.whole(8, 4), without.first_written(8, 0)), (2, 8));
    }

    #[test]
    fn a_windowed_drafter_needs_the_window_of_the_entry_before_a_token() {
        let group = Group::WindowedDrafter { window: 4 };
        // The query at position 8 sees 5 to 8, and the one before it 4 to 7.
        assert_eq!([4, 7, 8, 9, 12].map(|tokens| group.needs(tokens, 4)), [0..1, 0..2, 1..2, 1..3, 2..3]);
        assert_eq!(Group::WindowedDrafter { window: 1 }.needs(8, 4), 1..2, "its last block is written again");
        let groups = of(&[Group::Recurrent, group]).unwrap();
        assert_eq!((groups.anchor(), groups.whole(8, 4), groups.tail(1, 2, 4)), (1, 1, 1..1));
        assert_eq!([0, 1].map(|group| groups.first_written(8, group)), [8, 7]);
        assert_eq!(of(&[group, Group::Drafter]).unwrap().anchor(), 1);
    }

    #[test]
    fn a_chunk_needs_nothing_at_its_start() {
        let group = Group::Chunked { chunk: 8 };
        assert_eq!([7, 8, 9, 15, 16].map(|tokens| group.needs(tokens, 4)), [0..2, 2..2, 2..3, 2..4, 4..4]);
        assert_eq!((group.held(4, 12, 0, 4), group.held(9, 10, 0, 4)), (3, 1));
    }

    #[test]
    fn a_state_is_read_at_the_previous_token_and_written_after_the_last() {
        assert_eq!((Group::Recurrent.unneeded(8, 4), Group::Recurrent.unneeded(9, 4)), (1, 2));
        assert_eq!(Group::Recurrent.skipped(0, 9, 0, 4), 2);
        assert_eq!(Group::Recurrent.skipped(9, 3, 3, 4), 0);
        assert_eq!((Group::Recurrent.skipped(8, 0, 2, 4), Group::Full.skipped(0, 9, 0, 4)), (0, 0));
    }

    #[test]
    fn a_state_between_the_first_and_the_last_block_of_a_step_is_passed_over() {
        let passed = |len, count, held, begun| Group::Recurrent.passed_over(len, count, held, begun, 4);
        // The previous token's block keeps its state, unless this step has begun it.
        assert_eq!((passed(4, 5, 1, false), passed(4, 5, 1, true), passed(6, 3, 2, true)), (1..1, 0..1, 1..2));
        // Blocks of an earlier lookahead, and the block of the last token.
        assert_eq!((passed(3, 9, 4, false), passed(5, 2, 2, true), passed(0, 9, 1, false)), (1..2, 1..1, 0..1));
        assert_eq!((passed(4, 0, 3, true), Group::Full.passed_over(4, 9, 3, true, 4)), (0..0, 0..0));
    }

    #[test]
    fn a_decoding_window_stays_within_the_cap_of_its_peers() {
        for window in 1..40u32 {
            for block_size in [1, 4, 16] {
                let cap = (window / block_size + 2) as usize;
                let most = (0..200).map(|p| p / block_size + 1 - window_start(p, window, block_size)).max();
                assert!(most.unwrap() as usize <= cap, "window {window}, block size {block_size}");
                assert!(Group::SlidingWindow { window }.peak_blocks(1000, 0, 1, block_size) <= cap);
            }
        }
    }

    /// First block held when the token at `position` is appended, if blocks are freed when one begins.
    fn window_start(position: u32, window: u32, block_size: u32) -> u32 {
        let begun = position / block_size * block_size;
        u32::try_from(Group::SlidingWindow { window }.unneeded(begun, block_size)).unwrap()
    }

    #[test]
    fn invalid_groups_are_refused() {
        let cross = Group::CrossAttention;
        for groups in [&[][..], &[cross], &[cross, Group::Full], &[Group::Full, cross, cross], &[Group::Full; 17]] {
            assert!(of(groups).is_err(), "{groups:?}");
        }
        assert!(of(&[Group::SlidingWindow { window: 0 }]).is_err());
        assert!(of(&[Group::WindowedDrafter { window: 0 }]).is_err());
        assert!(of(&[Group::Full, Group::Chunked { chunk: 0 }]).is_err());
    }

    #[test]
    fn a_sequence_holds_at_most_its_peak_number_of_blocks() {
        let peak = |group: Group, tokens, lookahead, chunk| group.peak_blocks(tokens, lookahead, chunk, 4);
        for group in [Group::Full, Group::Drafter, Group::CrossAttention] {
            assert_eq!([peak(group, 8, 0, 8), peak(group, 8, 1, 8), peak(group, 9, 7, 2)], [2, 3, 4]);
        }
        let window = Group::SlidingWindow { window: 5 };
        // 4 tokens before a chunk, the chunk and the lookahead, starting anywhere in a block.
        assert_eq!([peak(window, 100, 0, 8), peak(window, 100, 4, 8), peak(window, 100, 9, 8)], [4, 5, 7]);
        assert_eq!([peak(window, 6, 0, 8), peak(window, 100, 0, 1)], [2, 3]);
        let drafter = Group::WindowedDrafter { window: 5 };
        assert_eq!([peak(drafter, 6, 0, 8), peak(drafter, 100, 0, 8), peak(drafter, 100, 0, 4)], [2, 5, 4]);
        assert_eq!([peak(Group::Recurrent, 4, 0, 8), peak(Group::Recurrent, 100, 0, 100)], [1, 1]);
        assert_eq!([peak(Group::Recurrent, 100, 5, 8), peak(Group::Recurrent, 100, 0, 99)], [7, 2]);
    }
}
