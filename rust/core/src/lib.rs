#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod allocator;
pub mod block;
pub mod decision;
pub mod defrag;
pub mod error;
pub mod event;
mod fit;
pub mod group;
pub mod hash;
mod host_cache;
pub mod id;
pub mod manager;
pub mod memory;
pub mod offload;
pub mod page;
mod pins;
mod placement;
pub mod pool;
pub mod prefix;
pub mod reuse;
mod ring;
mod sequence;
mod tiers;
pub mod transfer;

pub use allocator::{BlockAllocator, Keyed, NaiveAllocator, PrefixCachingAllocator};
pub use block::{Block, BlockState, LeaseKind, Leases};
pub use decision::{DECISION_VERSION, Kind, MAX_DECISION_BYTES, Pairs, StepDecision};
pub use defrag::{Cached, Fragmentation, MoveStats, Moves};
pub use error::{Error, Result};
pub use event::{Event, EventBatch, MAX_EVENTS, Reason};
pub use fit::{AllocStatus, Fit};
pub use group::{Group, NULL_BLOCK, PagedGroup};
pub use hash::{ExportedKey, Extra, Key, KeySpec};
pub use id::{BlockId, JobId, LeaseId, PinId, SequenceId, TicketId, Tier};
pub use manager::{Config, Manager, MissingBlocks, Resize, Stats, TierUse};
pub use page::{ClassUse, MAX_CLASSES, PerClass, Space, extent_bytes};
pub use pool::Policies;
pub use prefix::evict::{Departure, Eviction, Evictor, Hint, HintCount, MAX_PRIORITY};
pub use prefix::{Histogram, RESIDENCY_SECONDS, Residency};
pub use reuse::ReuseOrder;
pub use sequence::{
    Append, Counts, Demand, HashedPrompt, PrefixHit, PrefixStats, Prompt, PromptExtra, PromptOptions, StoreSearch,
    TableId, TableRows, export_keys,
};
pub use tiers::{StoreWrites, Unwritten};
pub use transfer::{LeaseShare, Run, Span, StoreJob, merge_runs};
