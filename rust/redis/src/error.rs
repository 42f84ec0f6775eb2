//! Errors. Messages contain no user name or password, unless the server quotes it.

use redis::{ErrorKind, RedisError};
use std::path::PathBuf;

/// Result of a call.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file of certificates or a key cannot be read.
    #[error("cannot read {}: {error}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// The server cannot be reached, has gone, or does not answer in time.
    #[error("{}", if .0.is_timeout() { "the server does not answer in time".to_owned() } else { .0.to_string() })]
    Connection(RedisError),
    /// No node of the cluster answers.
    #[error("{0}")]
    Lost(String),
    /// The server refused the command.
    #[error("{0}")]
    Answer(RedisError),
}

impl Error {
    /// Whether the server closed the connection: another one may work.
    pub(crate) fn is_dropped(&self) -> bool {
        matches!(self, Self::Connection(error) if error.is_connection_dropped() && !error.is_timeout())
    }
}

impl From<RedisError> for Error {
    fn from(error: RedisError) -> Self {
        match error.kind() {
            ErrorKind::Server(_) | ErrorKind::Extension => Self::Answer(error),
            _ => Self::Connection(error),
        }
    }
}
