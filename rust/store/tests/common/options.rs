//! Options of a small store, the default of all tests.

use blockyard_store::{Geometry, StoreOptions};
use std::time::Duration;

/// Longer than any test waits.
pub(crate) const LONG: Duration = Duration::from_secs(60);
/// Not a multiple of a page.
pub(crate) const PAYLOAD: usize = 5000;
pub(crate) const SLOTS: u32 = 8;

pub(crate) fn options() -> StoreOptions {
    StoreOptions {
        geometry: Geometry { payload_bytes: PAYLOAD, slots: SLOTS },
        namespace: [7; 32],
        revision: [0; 32],
        threads: 2,
        memory_bytes: 1 << 20,
        timeout_base: Duration::from_secs(20),
        hidden: LONG,
    }
}
