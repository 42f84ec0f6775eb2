//! The envelope of a snapshot of the books: magic, version, length, payload, SHA-256 of all before.
//!
//! The payload is in `postcard`'s wire format; see `docs/decisions/0005-snapshot.md`. Whatever the bytes, reading them
//! takes memory in proportion to their number and gives books that pass `Manager::check`, or an error.

use crate::error::{Error, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};

/// Version of the payload: any change of what the books hold needs another.
pub const SNAPSHOT_VERSION: u32 = 4;

/// Counters that a snapshot may hold at most, so that counting on cannot overflow.
pub(crate) const MAX_COUNT: u64 = 1 << 62;

/// What a snapshot's contents came to, or why they cannot be.
pub(crate) type Contents<T> = std::result::Result<T, String>;

const MAGIC: &[u8; 8] = b"BLKYSNAP";
/// Magic, version, length of the payload.
const HEADER: usize = 20;
const DIGEST: usize = 32;

/// Writes contents into an envelope.
pub(crate) fn seal(contents: &impl Serialize) -> Result<Vec<u8>> {
    let mut head = MAGIC.to_vec();
    head.extend(SNAPSHOT_VERSION.to_le_bytes());
    head.extend([0; 8]);
    let broken = |error: postcard::Error| Error::Broken { what: format!("the snapshot could not be written: {error}") };
    let mut bytes = postcard::to_extend(contents, head).map_err(broken)?;
    let length = (bytes.len() - HEADER) as u64;
    bytes[12..HEADER].copy_from_slice(&length.to_le_bytes());
    let digest = Sha256::digest(&bytes);
    bytes.extend(digest);
    Ok(bytes)
}

/// Reads the contents of an envelope.
pub(crate) fn unseal<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    let payload = payload(bytes).map_err(|what| Error::BadSnapshot { what })?;
    let bad = |error: postcard::Error| Error::BadSnapshot { what: format!("its payload cannot be read: {error}") };
    let (contents, rest) = postcard::take_from_bytes(payload).map_err(bad)?;
    if rest.is_empty() {
        return Ok(contents);
    }
    Err(Error::BadSnapshot { what: format!("{} bytes follow its payload", rest.len()) })
}

fn payload(bytes: &[u8]) -> Contents<&[u8]> {
    let (Some((magic, rest)), Some(sealed)) = (bytes.split_first_chunk(), bytes.len().checked_sub(DIGEST)) else {
        return Err(format!("{} bytes are too few for one", bytes.len()));
    };
    if magic != MAGIC {
        return Err("it does not begin with BLKYSNAP".to_owned());
    }
    let Some((version, rest)) = rest.split_first_chunk() else { return Err("it ends in its header".to_owned()) };
    let version = u32::from_le_bytes(*version);
    if version != SNAPSHOT_VERSION {
        return Err(format!("its version is {version}, this is {SNAPSHOT_VERSION}"));
    }
    let Some((length, _)) = rest.split_first_chunk() else { return Err("it ends in its header".to_owned()) };
    let (wanted, found) = (u64::from_le_bytes(*length), sealed.saturating_sub(HEADER) as u64);
    if sealed < HEADER || wanted != found {
        return Err(format!("its payload is {found} bytes, its header says {wanted}"));
    }
    let (sealed, digest) = bytes.split_at(sealed);
    if Sha256::digest(sealed).as_slice() != digest {
        return Err("its checksum does not match".to_owned());
    }
    Ok(&sealed[HEADER..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sealed_is_read_back_and_every_other_length_refused() {
        let bytes = seal(&(7u32, "seven")).unwrap();
        assert_eq!(unseal::<(u32, String)>(&bytes), Ok((7, "seven".to_owned())));
        assert!(unseal::<u32>(&bytes).unwrap_err().to_string().contains("6 bytes follow its payload"));
        for len in 0..bytes.len() {
            assert!(unseal::<(u32, String)>(&bytes[..len]).is_err());
        }
        let longer = [&bytes[..], &[0]].concat();
        assert!(unseal::<(u32, String)>(&longer).is_err());
    }

    #[test]
    fn a_length_that_is_not_there_takes_no_memory() {
        let bytes = seal(&u64::MAX).unwrap();
        assert!(unseal::<Vec<u64>>(&bytes).is_err());
    }
}
