//! What goes to a server and comes back: `Command`, `Group` and `Unit`; `Answer`.

use redis::cluster_routing::Slot;
use redis::{Cmd, Value, cmd};

/// The words of a command, at least one.
pub type Command = Vec<Vec<u8>>;

/// Number of values stored in one transaction, and the command that runs after them.
pub type Group = (usize, Command);

/// A server's answer to a command.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// There is no value; or its cluster node does not answer, while others do.
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

/// Commands sent together to the node of one slot: a single one, or a transaction, whose last answer counts.
pub(crate) struct Unit {
    pub(crate) slot: Slot,
    pub(crate) commands: Vec<Cmd>,
}

impl Unit {
    /// One command.
    pub(crate) fn of(slot: Slot, command: Cmd) -> Self {
        Self { slot, commands: vec![command] }
    }
}

/// A command of some words.
pub(crate) fn command(words: &Command) -> Cmd {
    let mut command = Cmd::new();
    for word in words {
        command.arg(word);
    }
    command
}

/// A command that stores a value.
pub(crate) fn set(name: &[u8], value: &[u8], ttl_ms: Option<u64>) -> Cmd {
    let mut set = cmd("SET");
    set.arg(name).arg(value);
    if let Some(ttl) = ttl_ms {
        set.arg("PX").arg(ttl);
    }
    set
}

/// The server's value as an answer.
pub(crate) fn answer(value: Value) -> Answer {
    match value {
        Value::Nil => Answer::Nil,
        Value::Int(number) => Answer::Int(number),
        Value::BulkString(bytes) => Answer::Bytes(bytes),
        Value::Okay => Answer::Bytes(b"OK".to_vec()),
        Value::SimpleString(text) => Answer::Bytes(text.into_bytes()),
        Value::Array(values) => Answer::List(values.into_iter().map(answer).collect()),
        other => match other.extract_error() {
            Err(error) => Answer::Refused(error.to_string()),
            Ok(_) => Answer::Refused("a RESP 3 answer to a RESP 2 command".to_owned()),
        },
    }
}

/// The answer to a command, `Nil` if its node does not answer.
pub(crate) fn known(value: Option<Value>) -> Answer {
    value.map_or(Answer::Nil, answer)
}

/// Receives the answers of a transaction, or of one command: the first error counts, else the last answer.
pub(crate) fn last_answer<E>(count: usize, mut receive: impl FnMut() -> Result<Value, E>) -> Result<Value, E> {
    let mut found = receive()?;
    for _ in 1..count {
        let next = receive()?;
        if !matches!(found, Value::ServerError(_)) {
            found = next;
        }
    }
    Ok(found)
}
