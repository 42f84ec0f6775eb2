//! The envelope of a decision as bytes: magic, version, length, payload, SHA-256 of all before.
//!
//! The payload is in `postcard`'s wire format. Reading arbitrary bytes takes memory proportional to their number. The
//! checksum detects damage; it does not authenticate the writer.

use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};

/// The contents, or why they cannot be read.
pub(super) type Contents<T> = Result<T, String>;

/// Magic, version, length of the payload.
const HEADER: usize = 20;
const DIGEST: usize = 32;

const MAGIC: &[u8; 8] = b"BLKYSTEP";

/// Version of the payload; increment it whenever the contents of a decision change.
pub const DECISION_VERSION: u32 = 4;

/// Writes contents into an envelope.
pub(super) fn seal(contents: &impl Serialize) -> Contents<Vec<u8>> {
    let mut head = MAGIC.to_vec();
    head.extend(DECISION_VERSION.to_le_bytes());
    head.extend([0; 8]);
    let mut bytes = postcard::to_extend(contents, head).map_err(|error| error.to_string())?;
    let length = (bytes.len() - HEADER) as u64;
    bytes[12..HEADER].copy_from_slice(&length.to_le_bytes());
    let digest = Sha256::digest(&bytes);
    bytes.extend(digest);
    Ok(bytes)
}

/// Reads the contents of an envelope.
pub(super) fn unseal<T: DeserializeOwned>(bytes: &[u8]) -> Contents<T> {
    let read = postcard::take_from_bytes(payload(bytes)?);
    let (contents, rest) = read.map_err(|error| format!("its payload cannot be read: {error}"))?;
    if rest.is_empty() { Ok(contents) } else { Err(format!("{} bytes follow its payload", rest.len())) }
}

fn payload(bytes: &[u8]) -> Contents<&[u8]> {
    let (Some((magic, rest)), Some(sealed)) = (bytes.split_first_chunk(), bytes.len().checked_sub(DIGEST)) else {
        return Err(format!("{} bytes are too few for a decision", bytes.len()));
    };
    if magic != MAGIC {
        return Err(format!("it does not begin with {}", String::from_utf8_lossy(MAGIC)));
    }
    let Some((version, rest)) = rest.split_first_chunk() else { return Err("it ends in its header".to_owned()) };
    let version = u32::from_le_bytes(*version);
    if version != DECISION_VERSION {
        return Err(format!("its version is {version}, must be {DECISION_VERSION}"));
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
    fn sealed_contents_are_read_back_and_every_other_length_is_refused() {
        let bytes = seal(&(7u32, "seven")).unwrap();
        assert_eq!(unseal::<(u32, String)>(&bytes), Ok((7, "seven".to_owned())));
        assert!(unseal::<u32>(&bytes).unwrap_err().contains("6 bytes follow its payload"));
        for len in 0..bytes.len() {
            assert!(unseal::<(u32, String)>(&bytes[..len]).is_err());
        }
        let longer = [&bytes[..], &[0]].concat();
        assert!(unseal::<(u32, String)>(&longer).is_err());
    }

    #[test]
    fn another_kind_or_version_is_refused_by_name() {
        let bytes = seal(&7u32).unwrap();
        let changed = |at: usize, to: u8| [&bytes[..at], &[to], &bytes[at + 1..]].concat();
        assert_eq!(unseal::<u32>(&changed(0, b'X')), Err("it does not begin with BLKYSTEP".to_owned()));
        assert_eq!(unseal::<u32>(&changed(8, 9)), Err(format!("its version is 9, must be {DECISION_VERSION}")));
    }

    #[test]
    fn a_forged_length_takes_no_memory() {
        let bytes = seal(&u64::MAX).unwrap();
        assert!(unseal::<Vec<u64>>(&bytes).is_err());
    }
}
