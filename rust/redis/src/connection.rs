//! A connection to a server or to all nodes of a cluster.

use crate::cluster::{Cluster, Nodes};
use crate::error::Result;
use crate::message::{Answer, Command, Group, Unit, answer, command, known, last_answer, set};
use crate::transaction::Transaction;
use redis::cluster_routing::Slot;
use redis::{Client, RedisResult, Value, cmd};
use std::sync::Arc;
use std::time::Duration;

/// Approximate bytes of a command besides its value.
const AROUND: usize = 256;

/// Destinations of a value's first bytes and of the rest.
pub type Split<'a> = (&'a mut [u8], &'a mut [u8]);

/// Answers to the groups' commands, whether each value was stored, and why some nodes of a cluster did not answer.
pub type Put = (Vec<Answer>, Vec<bool>, Option<String>);

/// Answers to commands, and why some nodes of a cluster did not answer.
pub type Ran = (Vec<Answer>, Option<String>);

/// Answers to commands, whether each value exists, and why some nodes of a cluster did not answer.
pub type Got = (Vec<Answer>, Vec<bool>, Option<String>);

/// The server or cluster to connect to.
pub(crate) enum Server {
    Single(Box<Client>),
    Cluster(Arc<Cluster>),
}

/// A connection; only one call uses it at a time.
pub(crate) enum Connection {
    Single(Box<redis::Connection>),
    Cluster(Nodes),
}

impl Server {
    pub(crate) fn connect(&self, connect_timeout: Duration, timeout: Duration) -> Result<Connection> {
        match self {
            Self::Single(client) => {
                let connection = client.get_connection_with_timeout(connect_timeout)?;
                connection.set_read_timeout(Some(timeout))?;
                connection.set_write_timeout(Some(timeout))?;
                Ok(Connection::Single(Box::new(connection)))
            }
            Self::Cluster(cluster) => Ok(Connection::Cluster(cluster.connect())),
        }
    }
}

impl Connection {
    /// Stores values under names; see `Client::put`.
    pub(crate) fn put(
        &mut self,
        groups: &[Group],
        names: &[Vec<u8>],
        values: &[&[u8]],
        ttl_ms: Option<u64>,
    ) -> Result<Put> {
        if groups.is_empty() {
            return self.put_each(names, values, ttl_ms);
        }
        let transactions = Transaction::of_groups(groups, names, values, ttl_ms);
        let (values, why) = match self {
            Self::Single(connection) => {
                let mut packed = Vec::with_capacity(values.iter().map(|value| value.len() + AROUND).sum());
                for command in transactions.iter().flat_map(Transaction::commands) {
                    command.write_packed_command(&mut packed);
                }
                connection.send_packed_command(&packed)?;
                let mut receive =
                    |one: &Transaction<'_>| last_answer(one.num_commands(), || connection.recv_response());
                let values = transactions.iter().map(|one| Ok(Some(receive(one)?)));
                (values.collect::<Result<Vec<_>>>()?, None)
            }
            Self::Cluster(nodes) => nodes.run(transactions.len(), |index| transactions[index].unit())?,
        };
        let (mut answers, mut stored) = (Vec::new(), Vec::new());
        for (transaction, value) in transactions.iter().zip(values) {
            answers.push(transaction.take(value, &mut stored));
        }
        Ok((answers, stored, why))
    }

    fn put_each(&mut self, names: &[Vec<u8>], values: &[&[u8]], ttl_ms: Option<u64>) -> Result<Put> {
        match self {
            Self::Single(connection) => {
                let mut packed = Vec::with_capacity(values.iter().map(|value| value.len() + AROUND).sum());
                for (name, value) in names.iter().zip(values) {
                    set(name, value, ttl_ms).write_packed_command(&mut packed);
                }
                connection.send_packed_command(&packed)?;
                let stored = names.iter().map(|_| Ok(connection.recv_response()? == Value::Okay));
                Ok((Vec::new(), stored.collect::<Result<_>>()?, None))
            }
            Self::Cluster(nodes) => {
                let make =
                    |index: usize| Unit::of(Slot::for_key(&names[index]), set(&names[index], values[index], ttl_ms));
                let (answers, why) = nodes.run(names.len(), make)?;
                Ok((Vec::new(), answers.into_iter().map(|value| value == Some(Value::Okay)).collect(), why))
            }
        }
    }

    /// Runs commands, then reads values into heads and rows; see `Client::get`.
    pub(crate) fn get(
        &mut self,
        first: &[Command],
        names: &[Vec<u8>],
        rows: &mut [Split<'_>],
        varies: bool,
    ) -> Result<Got> {
        match self {
            Self::Single(connection) => {
                let mut packed = Vec::new();
                pack(first, &mut packed);
                for name in names {
                    cmd("GET").arg(name).write_packed_command(&mut packed);
                }
                connection.send_packed_command(&packed)?;
                let answers = receive(connection, first.len())?;
                let found = rows.iter_mut().map(|row| Ok(place(connection.recv_response()?, row, varies)?));
                Ok((answers, found.collect::<Result<_>>()?, None))
            }
            Self::Cluster(nodes) => {
                let make = |index: usize| Unit::of(Slot::for_key(&names[index]), cmd("GET").arg(&names[index]).take());
                let (mut answers, why) = nodes.run(first.len() + names.len(), after(first, make))?;
                let pairs = answers.split_off(first.len()).into_iter().zip(rows);
                let found = pairs.map(|(value, row)| value.map_or(Ok(false), |value| place(value, row, varies)));
                Ok((answers.into_iter().map(known).collect(), found.collect::<RedisResult<_>>()?, why))
            }
        }
    }

    /// Runs commands.
    pub(crate) fn run(&mut self, commands: &[Command]) -> Result<Ran> {
        match self {
            Self::Single(connection) => {
                let mut packed = Vec::new();
                pack(commands, &mut packed);
                connection.send_packed_command(&packed)?;
                Ok((receive(connection, commands.len())?, None))
            }
            Self::Cluster(nodes) => {
                let (answers, why) = nodes.run(commands.len(), |index| keyed(&commands[index..]))?;
                Ok((answers.into_iter().map(known).collect(), why))
            }
        }
    }
}

fn pack(commands: &[Command], packed: &mut Vec<u8>) {
    for words in commands {
        command(words).write_packed_command(packed);
    }
}

fn receive(connection: &mut redis::Connection, count: usize) -> Result<Vec<Answer>> {
    (0..count).map(|_| Ok(answer(connection.recv_response()?))).collect()
}

/// The first of some commands, for the node of its slot. The slot is that of its key: the second word, or what follows a
/// script and its number of keys. `CLUSTER GETKEYSINSLOT` names the slot. `WAIT` goes with the command after it.
fn keyed(commands: &[Command]) -> Unit {
    let words = &commands[0];
    let word = |place: usize| words.get(place).map_or(&[][..], Vec::as_slice);
    let slot = match word(0) {
        b"EVAL" => Slot::for_key(word(3)),
        b"WAIT" if commands.len() > 1 => keyed(&commands[1..]).slot,
        b"CLUSTER" => std::str::from_utf8(word(2))
            .ok()
            .and_then(|text| text.parse().ok())
            .and_then(Slot::new)
            .unwrap_or_else(|| Slot::for_key([])),
        _ => Slot::for_key(word(1)),
    };
    Unit::of(slot, command(words))
}

/// Adds the commands that follow others.
fn after(first: &[Command], make: impl Fn(usize) -> Unit) -> impl Fn(usize) -> Unit {
    move |index| if index < first.len() { keyed(&first[index..]) } else { make(index - first.len()) }
}

/// Copies a value into a head and a row.
fn place(value: Value, (head, row): &mut Split<'_>, varies: bool) -> RedisResult<bool> {
    let Value::BulkString(bytes) = value else { return value.extract_error().map(|_| false) };
    let fits = |&(_, bytes): &(&[u8], &[u8])| bytes.len() == row.len() || (varies && bytes.len() < row.len());
    if let Some((first, bytes)) = bytes.split_at_checked(head.len()).filter(fits) {
        head.copy_from_slice(first);
        let (start, rest) = row.split_at_mut(bytes.len());
        start.copy_from_slice(bytes);
        rest.fill(0);
    }
    Ok(true)
}
