//! One connection, to a server or to all nodes of a cluster.

use crate::error::{Error, Result};
use crate::link::Link;
use crate::options::Options;
use redis::cluster::{ClusterClient, ClusterConnection};
use redis::{ConnectionLike, RedisResult, Value, cmd};
use std::time::Duration;

/// Values from here on are sent from where they lie; smaller ones are gathered first.
const LARGE: usize = 16 << 10;
/// What is gathered is sent from so many bytes on.
const GATHERED: usize = 64 << 10;

/// Where connections are made to.
pub(crate) enum Server {
    Plain(Box<Options>),
    Tls(redis::Client),
    Cluster(Box<ClusterClient>),
}

/// A connection; only one call uses it at a time.
pub(crate) enum Connection {
    Single(Box<dyn Wire + Send>),
    Cluster(Box<ClusterConnection>),
}

/// Commands and answers of one server.
pub(crate) trait Wire {
    fn send(&mut self, bytes: &[u8]) -> RedisResult<()>;
    fn receive(&mut self) -> RedisResult<Value>;
    /// Reads a value into a row, as `Client::get` says; whether there was one.
    fn receive_into(&mut self, row: &mut [u8], varies: bool) -> RedisResult<bool>;
}

impl Wire for Link {
    fn send(&mut self, bytes: &[u8]) -> RedisResult<()> {
        Self::send(self, bytes)
    }

    fn receive(&mut self) -> RedisResult<Value> {
        Self::receive(self)
    }

    fn receive_into(&mut self, row: &mut [u8], varies: bool) -> RedisResult<bool> {
        Self::receive_into(self, row, varies)
    }
}

impl Wire for redis::Connection {
    fn send(&mut self, bytes: &[u8]) -> RedisResult<()> {
        self.send_packed_command(bytes)
    }

    fn receive(&mut self) -> RedisResult<Value> {
        self.recv_response()
    }

    fn receive_into(&mut self, row: &mut [u8], varies: bool) -> RedisResult<bool> {
        place(self.recv_response()?, row, varies)
    }
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
            Self::Plain(options) => Ok(Connection::Single(Box::new(Link::open(options)?))),
            Self::Tls(client) => {
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
            Self::Single(wire) => {
                send_values(&mut **wire, names, values, ttl_ms)?;
                names.iter().map(|_| Ok(wire.receive()? == Value::Okay)).collect()
            }
            Self::Cluster(connection) => {
                let pairs = names.iter().zip(values);
                pairs.map(|(name, value)| put_in_cluster(connection, name, value, ttl_ms)).collect()
            }
        }
    }

    /// Reads values into rows, as `Client::get` says; whether there was each.
    pub(crate) fn get(&mut self, names: &[Vec<u8>], rows: &mut [&mut [u8]], varies: bool) -> Result<Vec<bool>> {
        match self {
            Self::Single(wire) => {
                let mut packed = Vec::new();
                for name in names {
                    cmd("GET").arg(name).write_packed_command(&mut packed);
                }
                wire.send(&packed)?;
                rows.iter_mut().map(|row| Ok(wire.receive_into(row, varies)?)).collect()
            }
            Self::Cluster(connection) => {
                let mut one = |name, row: &mut [u8]| {
                    let value = connection.req_command(cmd("GET").arg(name))?;
                    Ok(place(value, row, varies)?)
                };
                names.iter().zip(rows).map(|(name, row)| one(name, row)).collect()
            }
        }
    }

    /// Runs commands, which are at least a word each.
    pub(crate) fn run(&mut self, commands: &[Vec<Vec<u8>>]) -> Result<Vec<Answer>> {
        let mut packed = Vec::new();
        match self {
            Self::Single(wire) => {
                commands.iter().for_each(|words| command(words).write_packed_command(&mut packed));
                wire.send(&packed)?;
                commands.iter().map(|_| Ok(answer(wire.receive()?))).collect()
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

/// Copies a value into a row.
fn place(value: Value, row: &mut [u8], varies: bool) -> RedisResult<bool> {
    let Value::BulkString(bytes) = value else { return value.extract_error().map(|_| false) };
    if bytes.len() == row.len() || (varies && bytes.len() < row.len()) {
        let (start, rest) = row.split_at_mut(bytes.len());
        start.copy_from_slice(&bytes);
        rest.fill(0);
    }
    Ok(true)
}

fn command(words: &[Vec<u8>]) -> redis::Cmd {
    let mut command = redis::Cmd::new();
    for word in words {
        command.arg(word);
    }
    command
}

/// Sends a `SET` for each value. Large values are not copied.
fn send_values(wire: &mut dyn Wire, names: &[Vec<u8>], values: &[&[u8]], ttl_ms: Option<u64>) -> Result<()> {
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
            wire.send(&gathered)?;
            wire.send(value)?;
            gathered.clear();
        }
        gathered.extend_from_slice(b"\r\n");
        gathered.extend_from_slice(expiry.as_bytes());
        if gathered.len() >= GATHERED {
            wire.send(&gathered)?;
            gathered.clear();
        }
    }
    if !gathered.is_empty() {
        wire.send(&gathered)?;
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
