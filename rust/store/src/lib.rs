//! The I/O of the external tiers.
