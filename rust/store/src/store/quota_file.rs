//! The quotas of a keyed store, kept beside its blocks for the next opener. Damaged or of another namespace, they are
//! ignored: no tenant has a quota then.

use super::keyed::failed;
use super::{Shared, StoreOptions};
use crate::device::BlockDevice;
use crate::error::Result;
use crate::header::checksum;
use std::io;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

const MAGIC: [u8; 8] = *b"BLKYQUOT";
const VERSION: u64 = 1;
/// Magic; version, number of quotas; namespace.
const HEAD: usize = 8 + 2 * 8 + 32;
/// Tenant, number of blocks.
const QUOTA: usize = 32 + 4;
const CHECKSUM: usize = 16;
/// Maximum bytes that an opener reads: more than a million quotas.
const LONGEST: u64 = 64 << 20;

/// A tenant and the number of blocks that it may have.
type Quota = ([u8; 32], u32);

/// Writes the quotas, one write at a time.
#[derive(Clone, Debug, Default)]
pub(super) struct QuotaFile {
    writing: Arc<Mutex<()>>,
}

impl QuotaFile {
    /// Writes the quotas that hold now, or newer ones. A thread does it, since the device may hang.
    pub(super) fn write(
        &self,
        options: &StoreOptions,
        shared: &Arc<Shared>,
        device: Arc<dyn BlockDevice>,
        patience: Duration,
    ) -> Result<()> {
        let (options, shared, writing) = (options.clone(), Arc::clone(shared), Arc::clone(&self.writing));
        let (sender, receiver) = mpsc::channel();
        let work = move || {
            let _alone = writing.lock().unwrap_or_else(PoisonError::into_inner);
            let quotas = shared.lock().queue.quotas();
            // Perhaps nobody waits for it now.
            let _ = sender.send(device.save_quotas(&options.quota_bytes(quotas)));
        };
        thread::Builder::new().name("blockyard-quotas".to_owned()).spawn(work).map_err(failed("start a thread for"))?;
        let late = |_| Err(io::Error::new(io::ErrorKind::TimedOut, "the disk does not answer"));
        receiver.recv_timeout(patience).unwrap_or_else(late).map_err(failed("write the quotas of"))
    }
}

impl StoreOptions {
    fn quota_bytes(&self, mut quotas: Vec<Quota>) -> Vec<u8> {
        quotas.sort_unstable();
        let mut bytes = self.quota_head(quotas.len() as u64);
        for (tenant, most) in quotas {
            bytes.extend(tenant);
            bytes.extend(most.to_le_bytes());
        }
        let sum = checksum(&bytes);
        bytes.extend(sum);
        bytes
    }

    fn quota_head(&self, count: u64) -> Vec<u8> {
        let numbers = [VERSION, count].into_iter().flat_map(u64::to_le_bytes);
        MAGIC.into_iter().chain(numbers).chain(self.namespace).collect()
    }

    /// Returns the quotas that an earlier store of this namespace kept.
    pub(super) fn kept_quotas(&self, device: &dyn BlockDevice) -> Vec<Quota> {
        device.kept_quotas(LONGEST).and_then(|bytes| self.read_quotas(&bytes)).unwrap_or_default()
    }

    fn read_quotas(&self, bytes: &[u8]) -> Option<Vec<Quota>> {
        let (bytes, sum) = bytes.split_last_chunk::<CHECKSUM>()?;
        let (head, quotas) = bytes.split_at_checked(HEAD)?;
        let count = quotas.len() / QUOTA;
        let is_whole =
            quotas.len() == count * QUOTA && head == self.quota_head(count as u64) && checksum(bytes) == *sum;
        let read = |quota: &[u8]| {
            let (tenant, most) = quota.split_first_chunk()?;
            Some((*tenant, u32::from_le_bytes(*most.first_chunk()?)))
        };
        is_whole.then(|| quotas.chunks_exact(QUOTA).filter_map(read).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::Geometry;
    use proptest::prelude::*;

    fn options(namespace: u8) -> StoreOptions {
        StoreOptions {
            geometry: Geometry { payload_bytes: 100, slots: 8 },
            namespace: [namespace; 32],
            revision: [0; 32],
            threads: 2,
            memory_bytes: 1 << 20,
            timeout_base: Duration::from_secs(1),
            hidden: Duration::ZERO,
        }
    }

    fn bytes() -> Vec<u8> {
        options(3).quota_bytes(vec![([7; 32], 5), ([2; 32], 0)])
    }

    #[test]
    fn quotas_come_back_to_their_namespace_alone() {
        assert_eq!(options(3).read_quotas(&bytes()), Some(vec![([2; 32], 0), ([7; 32], 5)]));
        assert_eq!(options(4).read_quotas(&bytes()), None);
        assert_eq!(options(3).read_quotas(&options(3).quota_bytes(Vec::new())), Some(Vec::new()));
    }

    proptest! {
        #[test]
        fn damaged_quotas_are_not_taken(at in any::<prop::sample::Index>(), mask in 1u8.., cut in any::<bool>()) {
            let mut bytes = bytes();
            let at = at.index(bytes.len());
            if cut { bytes.truncate(at) } else { bytes[at] ^= mask }
            prop_assert_eq!(options(3).read_quotas(&bytes), None);
        }
    }
}
