//! The envelope of a snapshot; see `docs/decisions/0005-snapshot.md`. Whatever the bytes, reading them
//! takes memory in proportion to their number and gives a manager that passes `Manager::check`, or an error.

pub(crate) mod envelope;

use crate::error::{Error, Result};
use envelope::Envelope;
use serde::Serialize;
use serde::de::DeserializeOwned;

pub(crate) use envelope::Contents;

/// Version of the payload: any change of the contents needs another.
pub const SNAPSHOT_VERSION: u32 = 10;

/// Counters that a snapshot may hold at most, so that counting on cannot overflow.
pub(crate) const MAX_COUNT: u64 = 1 << 62;

const ENVELOPE: Envelope = Envelope { magic: b"BLKYSNAP", version: SNAPSHOT_VERSION };

/// Writes contents into an envelope.
pub(crate) fn seal(contents: &impl Serialize) -> Result<Vec<u8>> {
    let broken = |error| Error::Broken { what: format!("the snapshot could not be written: {error}") };
    ENVELOPE.seal(contents).map_err(broken)
}

/// Reads the contents of an envelope.
pub(crate) fn unseal<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    ENVELOPE.unseal(bytes).map_err(|what| Error::BadSnapshot { what })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_are_read_back_and_other_bytes_refused_as_a_snapshot() {
        let bytes = seal(&7u32).unwrap();
        assert_eq!(unseal::<u32>(&bytes), Ok(7));
        assert!(unseal::<u32>(&bytes[1..]).unwrap_err().to_string().starts_with("the snapshot is refused"));
    }
}
