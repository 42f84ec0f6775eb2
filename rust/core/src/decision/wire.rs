//! A decision as bytes, so that one scheduler drives many workers; see `docs/decisions/0013-layouts-and-mappings.md`.

use super::envelope::{Contents, seal, unseal};
use super::{Kind, Pairs, StepDecision};
use crate::error::{Error, Result};
use crate::id::{TicketId, Tier};
use crate::page::MAX_CLASSES;
use serde::{Deserialize, Serialize};

/// Maximum size of a serialized decision, in bytes.
pub const MAX_DECISION_BYTES: usize = 1 << 28;

#[derive(Serialize, Deserialize)]
struct Image {
    ticket: TicketId,
    after: Vec<TicketId>,
    transfers: Vec<(Kind, Pairs)>,
    prefetch: bool,
}

impl StepDecision {
    /// Serializes the decision; the bytes are the same in every process.
    ///
    /// # Errors
    /// The decision cannot be carried out, see [`StepDecision::from_bytes`], or is too long.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let Self { ticket, after, transfers, prefetch } = self.clone();
        let image = Image { ticket, after, transfers, prefetch };
        let bytes = image.check().and_then(|()| seal(&image)).and_then(|bytes| within(bytes.len(), bytes));
        bytes.map_err(|what| Error::BadDecision { what })
    }

    /// Deserializes a decision. Takes memory proportional to the number of bytes.
    ///
    /// # Errors
    /// The bytes are incomplete, of another version, or describe a decision that cannot be carried out: kinds out of
    /// order or repeated between the same tiers, tiers that the kind does not connect, a block that is written twice
    /// or, within one tier, both read and written, or a wait for a later ticket.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let image: Contents<Image> = within(bytes.len(), bytes).and_then(unseal);
        let checked = image.and_then(|image| image.check().map(|()| image));
        let Image { ticket, after, transfers, prefetch } = checked.map_err(|what| Error::BadDecision { what })?;
        Ok(Self { ticket, after, transfers, prefetch })
    }
}

fn within<T>(len: usize, bytes: T) -> Contents<T> {
    if len <= MAX_DECISION_BYTES {
        return Ok(bytes);
    }
    Err(format!("it is {len} bytes long, must be at most {MAX_DECISION_BYTES}"))
}

impl Image {
    fn check(&self) -> Contents<()> {
        if let Some(late) = self.after.iter().find(|&&ticket| ticket > self.ticket) {
            return Err(format!("ticket {} waits for the later ticket {late}", self.ticket));
        }
        let place = |(kind, pairs): &(Kind, Pairs)| (*kind, pairs.src, pairs.dst, pairs.page_class);
        let early = self.transfers.windows(2).find(|pair| place(&pair[0]) >= place(&pair[1]));
        if let Some([_, (kind, Pairs { src, dst, .. }), ..]) = early {
            return Err(format!("{} from {src} to {dst} is out of order or repeated", kind.name()));
        }
        self.transfers.iter().try_for_each(|(kind, pairs)| check(*kind, pairs))
    }
}

fn check(kind: Kind, pairs: &Pairs) -> Contents<()> {
    let Pairs { src, dst, page_class, ids } = pairs;
    if usize::from(*page_class) >= MAX_CLASSES {
        return Err(format!("page class {page_class} of {} pairs, must be below {MAX_CLASSES}", kind.name()));
    }
    if ids.is_empty() || !kind.joins(*src, *dst) {
        return Err(format!("{} pairs of kind {} go from {src} to {dst}", ids.len(), kind.name()));
    }
    let mut written: Vec<u32> = ids.iter().map(|pair| pair[1]).collect();
    if kind == Kind::Exchange {
        written.extend(ids.iter().map(|pair| pair[0]));
    }
    written.sort_unstable();
    if let Some([twice, ..]) = written.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!("{dst} block {twice} is written twice by {}", kind.name()));
    }
    let both = ids.iter().find(|pair| kind == Kind::Copy && written.binary_search(&pair[0]).is_ok());
    both.map_or(Ok(()), |pair| Err(format!("{dst} block {} is both read and written by {}", pair[0], kind.name())))
}

impl Kind {
    /// Whether transfers of this kind go from one tier to the other.
    #[must_use]
    pub fn joins(self, src: Tier, dst: Tier) -> bool {
        match self {
            Self::SwapOut => src < dst,
            Self::SwapIn => src > dst,
            Self::Copy => matches!((src, dst), (Tier::Device, Tier::Device)),
            Self::Move | Self::Exchange => {
                matches!((src, dst), (Tier::Device, Tier::Device) | (Tier::Host, Tier::Host))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pairs(src: Tier, dst: Tier, ids: &[[u32; 2]]) -> Pairs {
        Pairs { src, dst, page_class: 0, ids: ids.to_vec() }
    }

    fn sample() -> StepDecision {
        let transfers = vec![
            (Kind::SwapOut, pairs(Tier::Device, Tier::External, &[[1, 2]])),
            (Kind::SwapOut, pairs(Tier::Host, Tier::External, &[[3, 4], [300, 6]])),
            (Kind::Copy, pairs(Tier::Device, Tier::Device, &[[u32::MAX, 0], [u32::MAX, 1]])),
        ];
        StepDecision { ticket: TicketId(70_000), after: vec![TicketId(3), TicketId(70_000)], transfers, prefetch: true }
    }

    /// The error for a decision that was sealed without checks, as a forger would do.
    fn refusal(transfers: Vec<(Kind, Pairs)>, after: Vec<TicketId>) -> String {
        let image = Image { ticket: TicketId(5), after, transfers, prefetch: false };
        let read = StepDecision::from_bytes(&seal(&image).unwrap()).unwrap_err();
        let Image { ticket, after, transfers, prefetch } = image;
        assert_eq!(StepDecision { ticket, after, transfers, prefetch }.to_bytes().unwrap_err(), read);
        read.to_string()
    }

    #[test]
    fn a_decision_is_read_back_and_any_changed_bit_is_refused() {
        let bytes = sample().to_bytes().unwrap();
        assert_eq!(StepDecision::from_bytes(&bytes), Ok(sample()));
        for at in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[at / 8] ^= 1 << (at % 8);
            assert!(StepDecision::from_bytes(&flipped).is_err(), "bit {at}");
        }
        for len in 0..bytes.len() {
            assert!(StepDecision::from_bytes(&bytes[..len]).is_err(), "{len} bytes");
        }
    }

    #[test]
    fn a_sealed_decision_that_cannot_be_carried_out_is_refused() {
        let [d, h, x] = Tier::ALL;
        let out = |ids: &[[u32; 2]]| (Kind::SwapOut, pairs(d, h, ids));
        let cases = [
            (vec![out(&[[1, 4], [2, 4]])], "host block 4 is written twice by swap_out"),
            (vec![out(&[])], "0 pairs of kind swap_out go from device to host"),
            (vec![(Kind::SwapOut, pairs(h, d, &[[1, 1]]))], "1 pairs of kind swap_out go from host to device"),
            (vec![(Kind::Copy, pairs(x, x, &[[1, 2]]))], "1 pairs of kind copy go from external to external"),
            (vec![(Kind::Copy, pairs(d, d, &[[1, 2], [2, 3]]))], "device block 2 is both read and written by copy"),
            (vec![(Kind::Exchange, pairs(d, d, &[[1, 2], [2, 3]]))], "device block 2 is written twice by exchange"),
            (vec![out(&[[1, 1]]), out(&[[2, 2]])], "swap_out from device to host is out of order or repeated"),
            (vec![(Kind::SwapOut, Pairs { page_class: 4, ..pairs(d, h, &[[1, 1]]) })], "page class 4 of swap_out"),
            (vec![(Kind::SwapIn, pairs(h, d, &[[1, 1]])), out(&[[1, 1]])], "is out of order"),
        ];
        for (transfers, message) in cases {
            let found = refusal(transfers, Vec::new());
            assert!(found.contains(message), "{found}");
        }
        assert!(refusal(Vec::new(), vec![TicketId(6)]).contains("ticket 5 waits for the later ticket 6"));
    }

    #[test]
    fn a_forged_number_of_pairs_takes_no_memory() {
        // Ticket 1, no tickets before, one transfer: swap_out from device to host of 2^62 pairs.
        let mut payload = vec![1u8, 0, 1, 0, 0, 1, 0];
        payload.extend([0x80; 8]);
        payload.push(0x40);
        let mut bytes = seal(&()).unwrap();
        bytes.truncate(20);
        bytes[12] = u8::try_from(payload.len()).unwrap();
        bytes.extend(payload);
        let digest = <sha2::Sha256 as sha2::Digest>::digest(&bytes);
        bytes.extend(digest);
        assert!(StepDecision::from_bytes(&bytes).unwrap_err().to_string().contains("cannot be read"));
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_decision_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(StepDecision::from_bytes(&bytes).is_err());
        }

        #[test]
        fn any_payload_that_is_read_is_written_the_same(
            ticket in any::<u64>(),
            prefetch in any::<bool>(),
            ids in prop::collection::vec(any::<[u32; 2]>(), 1..50),
        ) {
            let swap = (Kind::SwapIn, pairs(Tier::Host, Tier::Device, &ids));
            let transfers = vec![swap];
            let decision = StepDecision { ticket: TicketId(ticket), after: Vec::new(), transfers, prefetch };
            if let Ok(bytes) = decision.to_bytes() {
                prop_assert_eq!(StepDecision::from_bytes(&bytes), Ok(decision));
            }
        }
    }
}
