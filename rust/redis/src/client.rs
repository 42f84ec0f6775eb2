//! `Client`: a pool with one connection per concurrent call.
//!
//! A connection whose call failed is not reused, as a late answer would be mistaken for that of the next call. One lock
//! guards the idle connections; it is never held while waiting for a server.

use crate::connection::{Connection, Got, Put, Ran, Server, Split};
use crate::error::Result;
use crate::message::{Command, Group};
use crate::options::Options;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Connections to one server or cluster; any thread may use it.
pub struct Client {
    server: Server,
    options: Options,
    idle: Mutex<Vec<Connection>>,
}

impl Client {
    /// Creates a client, which connects on first use.
    ///
    /// # Errors
    /// A certificate file cannot be read, or is empty.
    pub fn new(options: Options) -> Result<Self> {
        Ok(Self { server: options.server()?, options, idle: Mutex::default() })
    }

    /// Stores values under names, permanently or for `ttl_ms`.
    ///
    /// With groups, which are consecutive and cover all values, the values of each group and the group's command are
    /// one transaction: the command runs last, and no client sees a part of it. In a cluster, all keys of a group must
    /// be in one slot.
    ///
    /// Returns the answers to the groups' commands, and whether the server took each value. If a cluster node does not
    /// answer while others do, its values are not stored; the reason is returned too.
    ///
    /// # Errors
    /// The server cannot be reached, or is silent for too long.
    pub fn put(&self, groups: &[Group], names: &[Vec<u8>], values: &[&[u8]], ttl_ms: Option<u64>) -> Result<Put> {
        if names.is_empty() {
            return Ok(Put::default());
        }
        self.with(|connection| connection.put(groups, names, values, ttl_ms))
    }

    /// Reads one value per name, each into a head and a row. A value of another length leaves both unchanged, unless it
    /// is shorter and `varies` is set: then its row is padded with zeros. `first` are commands that run before, in the
    /// same round trip.
    ///
    /// Returns the answers to these, and whether each value exists. If a cluster node does not answer while others do,
    /// its values count as absent; the reason is returned too.
    ///
    /// # Errors
    /// The server cannot be reached, is silent for too long, or refuses to read a value.
    pub fn get(&self, first: &[Command], names: &[Vec<u8>], rows: &mut [Split<'_>], varies: bool) -> Result<Got> {
        if names.is_empty() && first.is_empty() {
            return Ok(Got::default());
        }
        self.with(|connection| connection.get(first, names, rows, varies))
    }

    /// Runs commands. Returns the answers, and why some nodes of a cluster did not answer. In a cluster, the second
    /// word of each is its key, or the fourth of an `EVAL`, or the third of a `CLUSTER` command its slot. `WAIT` goes to the
    /// node of the command after it.
    ///
    /// # Errors
    /// The server cannot be reached, or is silent for too long. The answer to a refused command is
    /// [`Answer::Refused`](crate::Answer::Refused), not an error.
    pub fn run(&self, commands: &[Command]) -> Result<Ran> {
        if commands.is_empty() {
            return Ok(Ran::default());
        }
        self.with(|connection| connection.run(commands))
    }

    /// Closes idle connections; the client stays usable.
    pub fn close(&self) {
        let idle = std::mem::take(&mut *self.idle());
        drop(idle);
    }

    /// Runs a call with a connection, and retries it once if the server had closed an idle one.
    fn with<R>(&self, mut call: impl FnMut(&mut Connection) -> Result<R>) -> Result<R> {
        let idle = self.idle().pop();
        if let Some(connection) = idle {
            match self.try_with(connection, &mut call) {
                Err(error) if error.is_dropped() => {}
                done => return done,
            }
        }
        let connection = self.server.connect(self.options.connect_timeout, self.options.timeout)?;
        self.try_with(connection, &mut call)
    }

    fn try_with<R>(
        &self,
        mut connection: Connection,
        call: &mut impl FnMut(&mut Connection) -> Result<R>,
    ) -> Result<R> {
        let done = call(&mut connection)?;
        self.idle().push(connection);
        Ok(done)
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Connection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
