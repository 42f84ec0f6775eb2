//! The books of a paged KV cache.
#![forbid(unsafe_code)]
