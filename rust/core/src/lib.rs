#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod check;
pub mod decision;
pub mod error;
pub mod id;
pub mod lease;
pub mod manager;
pub mod plan;
pub mod pool;
pub mod reuse;
mod table;

pub use decision::{Kind, Pairs, StepDecision};
pub use error::{Error, Result};
pub use id::{BlockId, SequenceId, TicketId, Tier};
pub use manager::{AllocStatus, Config, Counts, Manager};
pub use plan::{Run, merge_runs};
