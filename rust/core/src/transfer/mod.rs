//! What a transfer is made of: runs of neighbouring blocks, and host blocks that each hold several device blocks.

mod fill;
mod runs;
mod span;

pub use fill::FillMap;
pub use runs::{Run, merge_runs};
pub use span::Span;
