//! Extras of a sequence: inputs besides tokens that determine the bytes of a span of its tokens, such as an image.
//!
//! The key of each block that a span touches covers the whole extra. A sequence keeps its extras, so that this also
//! holds for its last, partial block and for blocks that `append` fills later.

use crate::error::{Result, invalid};
use crate::hash::{Extra, frames_of_extras};
use std::sync::Arc;

/// Kind of the frame of a span.
const SPAN: u32 = 1;

/// An input besides tokens that determines the bytes of a span of tokens, such as the hash of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PromptExtra<'a> {
    /// Position of its first token; it may lie beyond the prompt, in tokens to be appended.
    pub start: u32,
    /// Number of its tokens, at least 1.
    pub length: u32,
    /// What identifies the input.
    pub digest: &'a [u8],
}

#[derive(Debug)]
struct Span {
    start: u32,
    end: u32,
    /// Greatest `end` of the spans up to this one.
    reach: u32,
    frame: Box<[u8]>,
}

/// The extras of one sequence, in ascending order; forks share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Extras(Arc<[Span]>);

impl Extras {
    /// Encodes the extras of a prompt, which may come in any order.
    ///
    /// # Errors
    /// A span is empty or ends beyond the longest sequence, or a digest is too long.
    pub(crate) fn new(extras: &[PromptExtra<'_>]) -> Result<Self> {
        if extras.is_empty() {
            return Ok(Self::default());
        }
        let mut sorted = extras.to_vec();
        sorted.sort_unstable();
        let (mut spans, mut reach) = (Vec::with_capacity(sorted.len()), 0);
        for PromptExtra { start, length, digest } in sorted {
            let Some(end) = start.checked_add(length).filter(|_| length > 0) else {
                let must = format!("1 to {}, of an extra that starts at token {start}", u32::MAX - start);
                return Err(invalid("length of an extra", length, must));
            };
            reach = reach.max(end);
            let bytes = [&start.to_le_bytes()[..], &length.to_le_bytes(), digest].concat();
            let frame = frames_of_extras(&[Extra { kind: SPAN, bytes: &bytes }])?.into();
            spans.push(Span { start, end, reach, frame });
        }
        Ok(Self(spans.into()))
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The frames of the extras that touch a block; empty if none does.
    #[inline]
    pub(crate) fn frames(&self, index: usize, block_size: u32) -> Vec<u8> {
        if self.0.is_empty() {
            Vec::new()
        } else {
            self.frames_between(index as u64 * u64::from(block_size), block_size)
        }
    }

    #[inline(never)]
    fn frames_between(&self, begin: u64, block_size: u32) -> Vec<u8> {
        let end = begin + u64::from(block_size);
        let first = self.0.partition_point(|span| u64::from(span.reach) <= begin);
        let before_end = self.0[first..].iter().take_while(|span| u64::from(span.start) < end);
        before_end.filter(|span| u64::from(span.end) > begin).flat_map(|span| &*span.frame).copied().collect()
    }
}
