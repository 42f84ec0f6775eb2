//! Errors. A failed call changes nothing, and every error carries its numbers.

#[doc(hidden)]
pub mod fault;

use crate::id::{BlockId, JobId, LeaseId, PinId, SequenceId, TicketId, Tier};

/// Result of a call.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call failed; nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tier has fewer free blocks than the whole call needs.
    #[error("asked for {wanted} {tier} blocks{}, {free} of {total} are free{}", of_class(*page_class), if wanted > total { ": it can never fit" } else { "" })]
    OutOfBlocks {
        /// Tier that is short.
        tier: Tier,
        /// Blocks that the whole call needed.
        wanted: usize,
        /// Blocks that were free.
        free: usize,
        /// Blocks in the tier.
        total: usize,
        /// Page class of the blocks, if there are several.
        page_class: Option<usize>,
    },
    /// The manager never returned this handle.
    #[error("sequence {sequence} is unknown: this manager never returned that handle")]
    UnknownSequence {
        /// The handle.
        sequence: SequenceId,
    },
    /// The sequence has been freed.
    #[error("sequence {sequence} has been freed")]
    FreedSequence {
        /// The handle.
        sequence: SequenceId,
    },
    /// Another manager returned this handle.
    #[error("sequence {sequence} belongs to manager {manager}, this is manager {asked}")]
    ForeignSequence {
        /// The handle.
        sequence: SequenceId,
        /// Number of the manager that issued it.
        manager: u16,
        /// Number of this one.
        asked: u16,
    },
    /// A batch names a sequence twice.
    #[error("sequence {sequence} is named twice in one call")]
    RepeatedSequence {
        /// The handle.
        sequence: SequenceId,
    },
    /// The call needs the sequence in another tier.
    #[error("sequence {sequence} is in the {found} tier, the call needs it in {wanted}")]
    WrongTier {
        /// The handle.
        sequence: SequenceId,
        /// Tier that the call works on.
        wanted: Tier,
        /// Tier that the sequence is in.
        found: Tier,
    },
    /// A transfer of the sequence's blocks has not finished.
    #[error("sequence {sequence} is still moving (ticket {ticket}), {blocks} of its blocks have not arrived")]
    InFlight {
        /// The handle.
        sequence: SequenceId,
        /// Ticket to wait for.
        ticket: TicketId,
        /// Its blocks that are still being filled.
        blocks: usize,
    },
    /// The transfer of the sequence's blocks has finished, but an older ticket has not.
    #[error("sequence {sequence} waits for ticket {earlier}, which is older than its transfer's ticket {ticket}")]
    EarlierInFlight {
        /// The handle.
        sequence: SequenceId,
        /// Ticket of its last transfer.
        ticket: TicketId,
        /// Oldest ticket that has not ended.
        earlier: TicketId,
    },
    /// The sequence has tokens that the current step has not written yet, so its blocks cannot be read in this step.
    #[error("sequence {sequence} has tokens that this step is yet to write, take the step's decision first")]
    Unwritten {
        /// The handle.
        sequence: SequenceId,
    },
    /// A failed transfer took some of the sequence's bytes; it can only be freed.
    #[error("sequence {sequence} lost bytes in a failed transfer and can only be freed")]
    Lost {
        /// The handle.
        sequence: SequenceId,
    },
    /// The ticket was never issued or is closed.
    #[error("ticket {ticket} is not open")]
    UnknownTicket {
        /// The ticket.
        ticket: TicketId,
    },
    /// A pair reported as lost is not a transfer of the ticket.
    #[error("ticket {ticket} writes no block {block} in the {tier} tier")]
    NotInTicket {
        /// The ticket.
        ticket: TicketId,
        /// Destination tier.
        tier: Tier,
        /// Destination block.
        block: BlockId,
    },
    /// A block has the maximum number of leases.
    #[error("{tier} block {block} has {limit} leases, the maximum")]
    TooManyLeases {
        /// Tier of the block.
        tier: Tier,
        /// The block.
        block: BlockId,
        /// The maximum.
        limit: u32,
    },
    /// Pins would hold more blocks than their limit.
    #[error("asked to pin {wanted} more device blocks, {held} are pinned, pins may hold {limit}")]
    TooManyPinned {
        /// Blocks to pin that are not pinned yet.
        wanted: usize,
        /// Pinned blocks.
        held: usize,
        /// Maximum number of pinned blocks.
        limit: usize,
    },
    /// The pin never existed, or has ended.
    #[error("pin {pin} is not held")]
    UnknownPin {
        /// The pin.
        pin: PinId,
    },
    /// There is no goal of this name.
    #[error("goal is {name:?}, must be \"max_id\", \"free_tail\", \"dense\" or \"contiguous\"")]
    UnknownGoal {
        /// The name.
        name: String,
    },
    /// There is no such job of a prefix store, or it has ended.
    #[error("job {job} of the prefix store is unknown or has ended")]
    UnknownJob {
        /// The job.
        job: JobId,
    },
    /// There was never such a lease of a prompt.
    #[error("lease {lease} was never taken")]
    UnknownLease {
        /// The lease.
        lease: LeaseId,
    },
    /// A call releases more references to a block than it has.
    #[error("{tier} block {block} has {refs} references, the call names {wanted}")]
    NotReferenced {
        /// Tier of the block.
        tier: Tier,
        /// The block.
        block: BlockId,
        /// References that the call names.
        wanted: usize,
        /// References that the block has.
        refs: u32,
    },
    /// An argument is invalid.
    #[error("{what} is {found}, must be {must}")]
    InvalidArgument {
        /// Name of the argument.
        what: &'static str,
        /// Its value.
        found: i128,
        /// What it must be.
        must: String,
    },
    /// A fraction is out of range.
    #[error("{what} is {found}, must be 0 or more and below 1")]
    InvalidFraction {
        /// Name of the argument.
        what: &'static str,
        /// Its value.
        found: String,
    },
    /// A time is out of range.
    #[error("now is {found}, must be a finite number of seconds, 0 or more")]
    InvalidTime {
        /// Its value.
        found: String,
    },
    /// The system does not have the memory that the call needs.
    #[error("asked for {wanted} bytes of memory, which the system does not have")]
    OutOfMemory {
        /// Bytes requested at once.
        wanted: u64,
    },
    /// Block ids do not form a valid mapping.
    #[error("{what}")]
    BadMapping {
        /// Why.
        what: String,
    },
    /// A decision is invalid, or its bytes are corrupt.
    #[error("the decision is refused: {what}")]
    BadDecision {
        /// Why.
        what: String,
    },
    /// The manager contradicts itself: a bug in this crate.
    #[error("the manager contradicts itself: {what}")]
    Broken {
        /// What does not hold.
        what: String,
    },
}

/// The page class of blocks in a message.
fn of_class(class: Option<usize>) -> String {
    class.map_or_else(String::new, |class| format!(" of page class {class}"))
}

/// An argument is out of its range.
pub(crate) fn invalid(what: &'static str, found: impl Into<i128>, must: String) -> Error {
    Error::InvalidArgument { what, found: found.into(), must }
}

/// Tickets shown in a message.
pub(crate) const MAX_NAMED: usize = 8;

/// Names the first open tickets, if there are any.
pub(crate) fn named(open: &[TicketId]) -> String {
    let names: Vec<_> = open.iter().take(MAX_NAMED).map(|ticket| ticket.0.to_string()).collect();
    if names.is_empty() { String::new() } else { format!(" (open tickets, first to last: {})", names.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_names_only_the_first_open_tickets() {
        let open: Vec<_> = (1..20).map(TicketId).collect();
        assert_eq!(named(&open), " (open tickets, first to last: 1, 2, 3, 4, 5, 6, 7, 8)");
        assert_eq!(named(&[]), "");
    }
}
