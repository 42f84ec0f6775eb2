//! `Transaction`: values, and a command that runs after them, in one step at the server.
//!
//! The values are queued, without a copy, before the server runs anything. A client killed in between leaves nothing
//! behind.

use crate::message::{Answer, Command, Group, Unit, command, known, set};
use redis::cluster_routing::Slot;
use redis::{Cmd, Value, cmd};

/// A group of values being stored.
pub(crate) struct Transaction<'a> {
    names: &'a [Vec<u8>],
    values: &'a [&'a [u8]],
    ttl_ms: Option<u64>,
    last: &'a Command,
}

impl<'a> Transaction<'a> {
    /// The transactions of consecutive groups. All keys of a transaction are in the slot of its first name.
    pub(crate) fn of_groups(
        groups: &'a [Group],
        names: &'a [Vec<u8>],
        values: &'a [&'a [u8]],
        ttl_ms: Option<u64>,
    ) -> Vec<Self> {
        let mut start = 0;
        let mut next = |(count, last): &'a Group| {
            let part = start.min(names.len())..(start + count).min(names.len());
            start += count;
            Self { names: &names[part.clone()], values: &values[part], ttl_ms, last }
        };
        groups.iter().map(&mut next).collect()
    }

    /// Its commands, first to last.
    pub(crate) fn commands(&self) -> impl Iterator<Item = Cmd> {
        let sets = self.names.iter().zip(self.values).map(|(name, value)| set(name, value, self.ttl_ms));
        std::iter::once(cmd("MULTI")).chain(sets).chain([command(self.last), cmd("EXEC")])
    }

    /// Number of commands; each gets an answer.
    pub(crate) fn num_commands(&self) -> usize {
        self.names.len() + 3
    }

    /// The transaction as a unit for a cluster.
    pub(crate) fn unit(&self) -> Unit {
        let slot = self.names.first().map_or_else(|| Slot::for_key([]), Slot::for_key);
        Unit { slot, commands: self.commands().collect() }
    }

    /// Takes the answer to `EXEC`: adds whether each value was stored, and returns the answer to the last command.
    pub(crate) fn take(&self, value: Option<Value>, stored: &mut Vec<bool>) -> Answer {
        match value {
            Some(Value::Array(mut values)) if values.len() == self.names.len() + 1 => {
                let last = known(values.pop());
                stored.extend(values.into_iter().map(|value| value == Value::Okay));
                last
            }
            other => {
                stored.extend(self.names.iter().map(|_| false));
                known(other)
            }
        }
    }
}
