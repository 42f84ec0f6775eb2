//! `Client`: as many connections as calls run at once.
//!
//! A connection whose call failed is not used again: a late answer would be taken for that of the next call. One lock, of
//! the idle connections; nobody waits for a server under it.

use crate::connection::{Command, Connection, Got, Group, Put, Ran, Server, Split};
use crate::error::Result;
use crate::options::Options;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Connections to one server or cluster; any thread may use it.
pub struct Client {
    server: Server,
    options: Options,
    idle: Mutex<Vec<Connection>>,
}

impl Client {
    /// Makes a client; it connects when it is first used.
    ///
    /// # Errors
    /// A file of certificates cannot be read, or has none.
    pub fn new(options: Options) -> Result<Self> {
        Ok(Self { server: options.server()?, options, idle: Mutex::default() })
    }

    /// Stores values under names, for good or for `ttl_ms`.
    ///
    /// With groups, which follow each other and cover all values, the values of each group and the group's command are one
    /// transaction: the command runs last, and nobody sees a part. In a cluster, all keys of a group must be in one slot.
    ///
    /// Returns the answers to the groups' commands, and whether the server took each value. Values of a node of a cluster
    /// that does not answer are not taken, while other nodes live; the reason is returned too.
    ///
    /// # Errors
    /// The server cannot be reached, or is silent for too long.
    pub fn put(&self, groups: &[Group], names: &[Vec<u8>], values: &[&[u8]], ttl_ms: Option<u64>) -> Result<Put> {
        if names.is_empty() {
            return Ok(Put::default());
        }
        self.with(|connection| connection.put(groups, names, values, ttl_ms))
    }

    /// Reads values, each into a head and a row, as many as names. A value of another length leaves both as they are,
    /// unless it is shorter and `varies` is set: then zeros follow it in its row. `first` are
    /// commands that run before, in the same round trip.
    ///
    /// Returns the answers to these, and whether there was each value. Those of a node of a cluster that does not answer are
    /// as if absent, while other nodes live; the reason is returned too.
    ///
    /// # Errors
    /// The server cannot be reached, is silent for too long, or refuses to read a value.
    pub fn get(&self, first: &[Command], names: &[Vec<u8>], rows: &mut [Split<'_>], varies: bool) -> Result<Got> {
        if names.is_empty() && first.is_empty() {
            return Ok(Got::default());
        }
        self.with(|connection| connection.get(first, names, rows, varies))
    }

    /// Runs commands. Returns what the server answers, and why some nodes of a cluster do not. In a cluster, the second word of each is its key,
    /// or the fourth of an `EVAL`, or the third of a `CLUSTER` command its slot.
    ///
    /// # Errors
    /// The server cannot be reached, or is silent for too long. The answer to a refused command is
    /// [`Answer::Refused`](crate::Answer::Refused), no error.
    pub fn run(&self, commands: &[Command]) -> Result<Ran> {
        if commands.is_empty() {
            return Ok(Ran::default());
        }
        self.with(|connection| connection.run(commands))
    }

    /// Closes the connections that no call uses; the client may be used again.
    pub fn close(&self) {
        let idle = std::mem::take(&mut *self.idle());
        drop(idle);
    }

    /// Lets a call use a connection. It is called once more if the server had closed an idle one.
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
