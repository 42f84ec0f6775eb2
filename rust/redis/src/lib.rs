//! Connections to Redis and Valkey servers and clusters, for the Redis store.
//!
//! ```text
//! options -> client (a pool) -> connection of the crate `redis`, or cluster: one to each node
//! ```
//!
//! Values come from the caller's rows, and answers go into the caller's rows. Values are opaque here: the caller
//! verifies them. The options limit how long a call blocks between two bytes of an answer.
#![forbid(unsafe_code)]

mod client;
mod cluster;
mod connection;
mod error;
mod message;
mod options;
mod transaction;

pub use client::Client;
pub use connection::{Got, Put, Ran, Split};
pub use error::{Error, Result};
pub use message::{Answer, Command, Group};
pub use options::{Address, Options, Tls};
