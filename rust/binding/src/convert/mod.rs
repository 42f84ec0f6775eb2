//! Converts arguments of Python calls to Rust values, and errors to exceptions.

pub(crate) mod args;
pub(crate) mod arrays;
pub(crate) mod errors;
mod lent;
#[expect(unsafe_code, reason = "the one module that has any, each with its proof")]
pub(crate) mod memory;
pub(crate) mod tiers;
pub(crate) mod values;
