//! Quotas: how many cached blocks a tenant may leave on the device.

use super::Manager;
use crate::error::Result;

impl Manager {
    /// Lets the tenant of a salt keep at most `blocks` cached device blocks that no sequence uses; none for as many as
    /// there is room for. Blocks published before the tenant had its first quota are nobody's.
    ///
    /// # Errors
    /// The prefix cache is off, the device has fewer blocks, or 65535 tenants have quotas.
    pub fn set_quota(&mut self, salt: [u8; 32], blocks: Option<usize>) -> Result<()> {
        self.tiers.set_quota(salt, blocks)
    }

    /// Cached device blocks of a tenant that no sequence uses, and its quota; none for a tenant that never had one.
    #[must_use]
    pub fn quota(&self, salt: [u8; 32]) -> Option<(usize, Option<usize>)> {
        self.tiers.quota(salt)
    }
}
