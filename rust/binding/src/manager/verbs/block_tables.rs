//! Block tables and slot mappings, as attention kernels read them.

use crate::allocator::ids;
use crate::convert::args;
use crate::convert::arrays::{self, Handle};
use crate::convert::errors::to_py;
use crate::convert::memory::{self, Area};
use crate::locks::Guard;
use crate::manager::PyBlockManager;
use crate::manager::shared::{in_class, row_in, rows_in};
use blockyard_core::{BlockId, Manager};
use numpy::PyArray1;
use pyo3::prelude::*;

#[pymethods]
impl PyBlockManager {
    /// Return the blocks of a sequence in its current tier.
    ///
    /// Args:
    ///     sequence: handle.
    ///     group: cache group.
    /// Returns:
    ///     Block ids, int32 `[blocks]`; 0 for blocks outside a window.
    /// Raises:
    ///     UnknownSequenceError: there is no such sequence.
    ///     SequenceStateError: the blocks are being prefetched, see `take_decision`.
    ///     InvalidArgumentError: there is no such group.
    #[pyo3(signature = (sequence, group = 0))]
    fn block_table<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::sequence)] sequence: Handle,
        #[pyo3(from_py_with = args::group)] group: u32,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let mut manager = self.lock();
        let row = row_in(&manager, sequence.0, group)?;
        let table = manager.read_table(row).map(<[BlockId]>::to_vec).map_err(to_py)?;
        let tier = manager.tier(sequence.0).map_err(to_py)?;
        let table = in_class(&manager, tier, table);
        drop(manager);
        ids(py, &table)
    }

    /// Return the block tables of sequences on the device, padded with 0, as attention kernels read them.
    ///
    /// Args:
    ///     sequences: handles, uint64 `[n]`, a list, or one.
    ///     out: int32 array `[n, max_blocks or more]` to write to, C-contiguous.
    ///     group: cache group.
    /// Returns:
    ///     Block ids, int32 `[n, max_blocks]`, or `out`.
    /// Raises:
    ///     UnknownSequenceError: there is no such sequence.
    ///     SequenceStateError: a sequence is not on the device, is still loading, or has lost bytes.
    ///     InvalidArgumentError: `out` has the wrong number of rows or too few columns, or there is no such group.
    #[pyo3(signature = (sequences, out = None, *, group = 0))]
    fn block_tables<'py>(
        &self,
        sequences: &Bound<'py, PyAny>,
        out: Option<Bound<'py, PyAny>>,
        #[pyo3(from_py_with = args::group)] group: u32,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, sequences) = (sequences.py(), arrays::sequences(sequences)?);
        if let Some(out) = out {
            let rows = rows_in(&self.lock(), &sequences, group)?;
            let write = |table: Area<'_, i32>, manager: &mut Guard<'_, Manager>| {
                manager.block_tables(&rows, table.shape[1], table.items).map_err(to_py)
            };
            memory::write(arrays::table(&out, "out"), || self.lock(), write)??;
            return Ok(out);
        }
        // Take the lock once for both calls: another thread could append in between.
        let mut manager = self.lock();
        let rows = rows_in(&manager, &sequences, group)?;
        let width = manager.max_blocks(&rows).map_err(to_py)?;
        let write = |table: &mut [i32]| manager.block_tables(&rows, width, table);
        let (table, written) = memory::made(py, [rows.len(), width], write)?;
        written.map_err(to_py)?;
        Ok(table.into_any())
    }

    /// Return the slots of a range of tokens of sequences on the device, one sequence after the other.
    ///
    /// Args:
    ///     sequences: handles, uint64 `[n]`, a list, or one.
    ///     first: first token, for all or one per sequence.
    ///     last: end of the range, exclusive, for all or one per sequence.
    ///     out: int64 array `[sum of last - first]` to write to, C-contiguous.
    ///     group: cache group.
    /// Returns:
    ///     Slots, `block * block_size + offset`, int64 `[sum of last - first]`, or `out`.
    /// Raises:
    ///     UnknownSequenceError, SequenceStateError: as `block_tables`.
    ///     InvalidArgumentError: a sequence has fewer tokens, `out` has the wrong length, or there is no such group.
    #[pyo3(signature = (sequences, first, last, out = None, *, group = 0))]
    fn slot_mapping<'py>(
        &self,
        sequences: &Bound<'py, PyAny>,
        first: &Bound<'py, PyAny>,
        last: &Bound<'py, PyAny>,
        out: Option<Bound<'py, PyAny>>,
        #[pyo3(from_py_with = args::group)] group: u32,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, sequences) = (sequences.py(), arrays::sequences(sequences)?);
        let ranges = arrays::ranges(first, last, sequences.len())?;
        let rows = rows_in(&self.lock(), &sequences, group)?;
        let ranges: Vec<_> = rows.into_iter().zip(ranges).collect();
        if let Some(out) = out {
            let write = |slots: Area<'_, i64>, manager: &mut Guard<'_, Manager>| {
                manager.slot_mapping(&ranges, slots.items).map_err(to_py)
            };
            memory::write(arrays::slots_target(&out, "out"), || self.lock(), write)??;
            return Ok(out);
        }
        let mut manager = self.lock();
        let len = manager.num_slots(&ranges).map_err(to_py)?;
        let (slots, written) = memory::made(py, [len], |slots: &mut [i64]| manager.slot_mapping(&ranges, slots))?;
        written.map_err(to_py)?;
        Ok(slots.into_any())
    }
}
