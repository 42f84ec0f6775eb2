//! One connection, to a server or to all nodes of a cluster.

use crate::error::{Error, Result};
use redis::cluster::{ClusterClient, ClusterConnection};
use redis::{Client, Cmd, ConnectionLike, RedisResult, Value, cmd};
use std::time::Duration;

/// Bytes of a command around its value, about.
const AROUND: usize = 256;

/// Where the first bytes of a value go, and where the others.
pub type Split<'a> = (&'a mut [u8], &'a mut [u8]);

/// The words of a command, at least one.
pub type Command = Vec<Vec<u8>>;

/// Where connections are made to.
pub(crate) enum Server {
    Single(Box<Client>),
    Cluster(Box<ClusterClient>),
}

/// A connection; only one call uses it at a time.
pub(crate) enum Connection {
    Single(Box<redis::Connection>),
    Cluster(Box<ClusterConnection>),
}

/// What a server answered to a command.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// Nothing is there.
    Nil,
    /// A number.
    Int(i64),
    /// Bytes, or a word such as `OK`.
    Bytes(Vec<u8>),
    /// Several.
    List(Vec<Answer>),
    /// The command was refused, and why.
    Refused(String),
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
            Self::Cluster(client) => Ok(Connection::Cluster(Box::new(client.get_connection()?))),
        }
    }
}

impl Connection {
    /// Runs commands, then stores values under names; the answers, and whether each value was taken.
    pub(crate) fn put(
        &mut self,
        first: &[Command],
        names: &[Vec<u8>],
        values: &[&[u8]],
        ttl_ms: Option<u64>,
    ) -> Result<(Vec<Answer>, Vec<bool>)> {
        match self {
            Self::Single(connection) => {
                let mut packed = Vec::with_capacity(values.iter().map(|value| value.len() + AROUND).sum());
                pack(first, &mut packed);
                for (name, value) in names.iter().zip(values) {
                    set(name, value, ttl_ms).write_packed_command(&mut packed);
                }
                connection.send_packed_command(&packed)?;
                let answers = receive(connection, first.len())?;
                let stored = names.iter().map(|_| Ok(connection.recv_response()? == Value::Okay));
                Ok((answers, stored.collect::<Result<_>>()?))
            }
            Self::Cluster(connection) => {
                let answers = run_in_cluster(connection, first)?;
                let pairs = names.iter().zip(values);
                let stored = pairs.map(|(name, value)| put_in_cluster(connection, name, value, ttl_ms));
                Ok((answers, stored.collect::<Result<_>>()?))
            }
        }
    }

    /// Runs commands, then reads values into heads and rows, as `Client::get` says; whether there was each.
    pub(crate) fn get(
        &mut self,
        first: &[Command],
        names: &[Vec<u8>],
        rows: &mut [Split<'_>],
        varies: bool,
    ) -> Result<Vec<bool>> {
        match self {
            Self::Single(connection) => {
                let mut packed = Vec::new();
                pack(first, &mut packed);
                for name in names {
                    cmd("GET").arg(name).write_packed_command(&mut packed);
                }
                connection.send_packed_command(&packed)?;
                receive(connection, first.len())?;
                rows.iter_mut().map(|row| Ok(place(connection.recv_response()?, row, varies)?)).collect()
            }
            Self::Cluster(connection) => {
                run_in_cluster(connection, first)?;
                let mut one = |name, row: &mut Split<'_>| {
                    let value = connection.req_command(cmd("GET").arg(name))?;
                    Ok(place(value, row, varies)?)
                };
                names.iter().zip(rows).map(|(name, row)| one(name, row)).collect()
            }
        }
    }

    /// Runs commands.
    pub(crate) fn run(&mut self, commands: &[Command]) -> Result<Vec<Answer>> {
        match self {
            Self::Single(connection) => {
                let mut packed = Vec::new();
                pack(commands, &mut packed);
                connection.send_packed_command(&packed)?;
                receive(connection, commands.len())
            }
            Self::Cluster(connection) => run_in_cluster(connection, commands),
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

fn run_in_cluster(connection: &mut ClusterConnection, commands: &[Command]) -> Result<Vec<Answer>> {
    let run = |words| match connection.req_command(&command(words)).map_err(Error::from) {
        Ok(value) => Ok(answer(value)),
        Err(Error::Answer(error)) => Ok(Answer::Refused(error.to_string())),
        Err(error) => Err(error),
    };
    commands.iter().map(run).collect()
}

/// Copies a value into a head and a row.
fn place(value: Value, (head, row): &mut Split<'_>, varies: bool) -> RedisResult<bool> {
    let Value::BulkString(bytes) = value else { return value.extract_error().map(|_| false) };
    if let Some((first, bytes)) = bytes.split_at_checked(head.len())
        && (bytes.len() == row.len() || (varies && bytes.len() < row.len()))
    {
        head.copy_from_slice(first);
        let (start, rest) = row.split_at_mut(bytes.len());
        start.copy_from_slice(bytes);
        rest.fill(0);
    }
    Ok(true)
}

fn command(words: &Command) -> Cmd {
    let mut command = Cmd::new();
    for word in words {
        command.arg(word);
    }
    command
}

fn set(name: &[u8], value: &[u8], ttl_ms: Option<u64>) -> Cmd {
    let mut set = cmd("SET");
    set.arg(name).arg(value);
    if let Some(ttl) = ttl_ms {
        set.arg("PX").arg(ttl);
    }
    set
}

fn put_in_cluster(connection: &mut ClusterConnection, name: &[u8], value: &[u8], ttl_ms: Option<u64>) -> Result<bool> {
    match connection.req_command(&set(name, value, ttl_ms)).map_err(Error::from) {
        Ok(value) => Ok(value == Value::Okay),
        Err(Error::Answer(_)) => Ok(false),
        Err(error) => Err(error),
    }
}

fn answer(value: Value) -> Answer {
    match value {
        Value::Nil => Answer::Nil,
        Value::Int(number) => Answer::Int(number),
        Value::BulkString(bytes) => Answer::Bytes(bytes),
        Value::Okay => Answer::Bytes(b"OK".to_vec()),
        Value::SimpleString(text) => Answer::Bytes(text.into_bytes()),
        Value::Array(values) => Answer::List(values.into_iter().map(answer).collect()),
        other => match other.extract_error() {
            Err(error) => Answer::Refused(error.to_string()),
            Ok(_) => Answer::Refused("an answer of RESP 3 to a command of RESP 2".to_owned()),
        },
    }
}
