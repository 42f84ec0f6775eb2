//! Quotas of cached blocks by tenant.

use crate::args;
use crate::errors::{invalid, to_py};
use crate::manager::PyBlockManager;
use blockyard_core::KeySpec;
use pyo3::prelude::*;

fn digest(salt: Option<&[u8]>) -> [u8; 32] {
    KeySpec::new(salt, 0).salt
}

#[pymethods]
impl PyBlockManager {
    #[pyo3(signature = (blocks, *, salt = None))]
    fn set_quota(&self, #[pyo3(from_py_with = args::blocks)] blocks: Option<i64>, salt: Option<&[u8]>) -> PyResult<()> {
        let blocks = blocks.map(|blocks| usize::try_from(blocks).map_err(|_| blocks)).transpose();
        let blocks = blocks.map_err(|blocks| invalid(format!("quota is {blocks}, must be at least 0")))?;
        self.lock().set_quota(digest(salt), blocks).map_err(to_py)
    }

    #[pyo3(signature = (*, salt = None))]
    fn quota(&self, salt: Option<&[u8]>) -> Option<(usize, Option<usize>)> {
        self.lock().quota(digest(salt))
    }
}
