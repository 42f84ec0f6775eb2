//! One connection, to a server or to all nodes of a cluster.

use crate::error::{Error, Result};
use redis::cluster::{ClusterClient, ClusterConnection};
use redis::{ConnectionLike, Value, cmd};
use std::time::Duration;

/// Values from here on are sent from where they lie; smaller ones are gathered first.
const LARGE: usize = 16 << 10;
/// What is gathered is sent from so many bytes on.
const GATHERED: usize = 64 << 10;

/// Where connections are made to.
pub(crate) enum Server {
    Single(redis::Client),
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
    /// Stores values under names; whether each was taken.
    pub(crate) fn put(&mut self, names: &[Vec<u8>], values: &[&[u8]], ttl_ms: Option<u64>) -> Result<Vec<bool>> {
        match self {
            Self::Single(connection) => {
                send_values(connection, names, values, ttl_ms)?;
                names.iter().map(|_| Ok(connection.recv_response()? == Value::Okay)).collect()
            }
            Self::Cluster(connection) => {
                let pairs = names.iter().zip(values);
                pairs.map(|(name, value)| put_in_cluster(connection, name, value, ttl_ms)).collect()
            }
        }
    }

    /// Reads values and hands each, with its index, to `take`; absent ones are left out.
    pub(crate) fn get(&mut self, names: &[Vec<u8>], mut take: impl FnMut(usize, &[u8])) -> Result<()> {
        let mut took = |index: usize, value: Value| match value {
            Value::BulkString(bytes) => {
                take(index, &bytes);
                Ok(())
            }
            other => other.extract_error().map(drop).map_err(Error::from),
        };
        match self {
            Self::Single(connection) => {
                let mut packed = Vec::new();
                for name in names {
                    cmd("GET").arg(name).write_packed_command(&mut packed);
                }
                connection.send_packed_command(&packed)?;
                (0..names.len()).try_for_each(|index| took(index, connection.recv_response()?))
            }
            Self::Cluster(connection) => names.iter().enumerate().try_for_each(|(index, name)| {
                let value = connection.req_command(cmd("GET").arg(name))?;
                took(index, value)
            }),
        }
    }

    /// Runs commands, which are at least a word each.
    pub(crate) fn run(&mut self, commands: &[Vec<Vec<u8>>]) -> Result<Vec<Answer>> {
        let mut packed = Vec::new();
        match self {
            Self::Single(connection) => {
                commands.iter().for_each(|words| command(words).write_packed_command(&mut packed));
                connection.send_packed_command(&packed)?;
                commands.iter().map(|_| Ok(answer(connection.recv_response()?))).collect()
            }
            Self::Cluster(connection) => commands
                .iter()
                .map(|words| match connection.req_command(&command(words)).map_err(Error::from) {
                    Ok(value) => Ok(answer(value)),
                    Err(Error::Answer(error)) => Ok(Answer::Refused(error.to_string())),
                    Err(error) => Err(error),
                })
                .collect(),
        }
    }
}

fn command(words: &[Vec<u8>]) -> redis::Cmd {
    let mut command = redis::Cmd::new();
    for word in words {
        command.arg(word);
    }
    command
}

/// Sends a `SET` for each value. Large values are not copied.
fn send_values(
    connection: &mut redis::Connection,
    names: &[Vec<u8>],
    values: &[&[u8]],
    ttl_ms: Option<u64>,
) -> Result<()> {
    let expiry = ttl_ms.map(|ttl| {
        let digits = ttl.to_string();
        format!("$2\r\nPX\r\n${}\r\n{digits}\r\n", digits.len())
    });
    let expiry = expiry.unwrap_or_default();
    let words = if ttl_ms.is_some() { 5 } else { 3 };
    let mut gathered = Vec::new();
    for (name, value) in names.iter().zip(values) {
        // What `redis::cmd` packs, in pieces.
        let head = format!("*{words}\r\n$3\r\nSET\r\n${}\r\n", name.len());
        gathered.extend_from_slice(head.as_bytes());
        gathered.extend_from_slice(name);
        gathered.extend_from_slice(format!("\r\n${}\r\n", value.len()).as_bytes());
        if value.len() < LARGE {
            gathered.extend_from_slice(value);
        } else {
            connection.send_packed_command(&gathered)?;
            connection.send_packed_command(value)?;
            gathered.clear();
        }
        gathered.extend_from_slice(b"\r\n");
        gathered.extend_from_slice(expiry.as_bytes());
        if gathered.len() >= GATHERED {
            connection.send_packed_command(&gathered)?;
            gathered.clear();
        }
    }
    if !gathered.is_empty() {
        connection.send_packed_command(&gathered)?;
    }
    Ok(())
}

fn put_in_cluster(connection: &mut ClusterConnection, name: &[u8], value: &[u8], ttl_ms: Option<u64>) -> Result<bool> {
    let mut set = cmd("SET");
    set.arg(name).arg(value);
    if let Some(ttl) = ttl_ms {
        set.arg("PX").arg(ttl);
    }
    match connection.req_command(&set).map_err(Error::from) {
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
