//! `BlockObserver`: the core's defragmentation for other allocators, behind one lock.
//!
//! The lock is held for one call and never while Python code runs.

use crate::convert::args::{self, Argument, describe, items, refused, shown};
use crate::convert::errors::{invalid, to_py};
use crate::convert::memory::{self, Plain, Target};
use crate::convert::values::made;
use crate::decision::array;
use crate::locks::{Guard, InnerLock, lock};
use blockyard_core::BlockId;
use blockyard_core::defrag::{Budget, Fresh, Goal, LeaseId, Observer, Plan, Planner, Wanted};
use numpy::ndarray::Dimension;
use numpy::{IxDyn, PyArray1, PyArray2};
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};
use std::fmt::Display;

type PairArray<'py> = Bound<'py, PyArray2<i64>>;

/// Block ids: an int64 or int32 array `[n]` or a list of ints.
pub(crate) struct Ids(Vec<u32>);

impl<'py> Argument<'py> for Ids {
    fn read(value: &Bound<'py, PyAny>, name: &dyn Display) -> PyResult<Self> {
        if let Some(ids) = memory::listed::<i64>(value)? {
            return blocks(ids.into_iter()).map(Self);
        }
        if let Some(ids) = memory::listed::<i32>(value)? {
            return blocks(ids.into_iter().map(i64::from)).map(Self);
        }
        let must = "an int64 or int32 array [n] or a list of ints";
        let id = |id: &Bound<'py, PyAny>, _| id.extract().map_err(|error| refused(error, value, name, must));
        items(value, name, |item, at| block(id(item, at)?)).map(Self)
    }
}

fn blocks(ids: impl ExactSizeIterator<Item = i64>) -> PyResult<Vec<u32>> {
    let mut blocks = memory::reserved(ids.len())?;
    for id in ids {
        blocks.push(block(id)?);
    }
    Ok(blocks)
}

fn block(id: i64) -> PyResult<u32> {
    u32::try_from(id).map_err(|_| invalid(format!("block is {id}, must be 0 to {}", u32::MAX)))
}

fn fresh(fresh: bool) -> Fresh {
    if fresh { Fresh::Yes } else { Fresh::No }
}

/// Planned moves towards goals. Nothing has moved yet, and no block appears twice.
///
/// Attributes:
///     pairs: all pairs of block ids `(from, to)`, int64 `[n, 2]`.
///     move: the pairs whose destination is empty.
///     exchange: the pairs whose destination holds bytes to keep: the two blocks change places.
///     left: number of further moves that the goals need, not counting `contiguous`.
///     stuck: number of live blocks in the way of the goals for which there is no hole.
#[pyclass(frozen, name = "MovePlan", module = "blockyard._core")]
pub(crate) struct PyMovePlan {
    plan: Plan,
}

#[pymethods]
impl PyMovePlan {
    /// Number of blocks in the way that the budget leaves for later.
    #[getter]
    fn left(&self) -> usize {
        self.plan.left
    }

    /// Number of blocks in the way that have nowhere to go.
    #[getter]
    fn stuck(&self) -> usize {
        self.plan.stuck
    }

    /// Moves and exchanges as one mapping, int64 `[n, 2]`.
    #[getter]
    fn pairs<'py>(&self, py: Python<'py>) -> PyResult<PairArray<'py>> {
        array(py, &self.plan.pairs)
    }

    /// Moves into holes, int64 `[n, 2]`, `(from, to)`.
    #[getter]
    fn r#move<'py>(&self, py: Python<'py>) -> PyResult<PairArray<'py>> {
        array(py, self.plan.moves())
    }

    /// Pairs of blocks that change places, int64 `[n, 2]`.
    #[getter]
    fn exchange<'py>(&self, py: Python<'py>) -> PyResult<PairArray<'py>> {
        array(py, self.plan.exchanges())
    }

    fn __len__(&self) -> usize {
        self.plan.pairs.len()
    }

    fn __repr__(&self) -> String {
        let Plan { left, stuck, .. } = self.plan;
        let (moves, exchanges) = (self.plan.moves().len(), self.plan.exchanges().len());
        format!("MovePlan(move={moves}, exchange={exchanges}, left={left}, stuck={stuck})")
    }
}

/// Goals by priority, each read from `(name, number)` or `(name, number, slack)`.
pub(crate) struct Goals(pub(crate) Vec<Wanted>);

impl<'py> Argument<'py> for Goals {
    fn read(value: &Bound<'py, PyAny>, name: &dyn Display) -> PyResult<Self> {
        let one = |item: &Bound<'py, PyAny>, _| {
            let is_pair = item.cast::<PyTuple>().is_ok_and(|item| item.len() == 2);
            // Check the length first: a failed extraction costs more than everything else here.
            let found: PyResult<(Bound<'_, PyString>, u32, u32)> =
                if is_pair { item.extract().map(|(name, number)| (name, number, 0)) } else { item.extract() };
            let (name, number, slack) = found.map_err(|_| {
                invalid(format!("a goal is {}, must be (name, number) or (name, number, slack)", shown(item)))
            })?;
            Ok(Wanted { goal: Goal::from_name(name.to_str()?, number).map_err(to_py)?, slack })
        };
        items(value, name, one).map(Self)
    }
}

fn taken(sequences: Vec<Ids>) -> Vec<Vec<u32>> {
    sequences.into_iter().map(|Ids(ids)| ids).collect()
}

struct Defragmenter {
    observer: Observer,
    planner: Planner,
}

impl Defragmenter {
    /// Plans a step. Hysteresis continues if the goals are the same as in the previous step.
    fn plan(&mut self, wanted: &[Wanted], sequences: &[Vec<u32>], hot: &[u32], budget: Budget) -> PyResult<PyMovePlan> {
        if !self.planner.wanted().eq(wanted.iter().copied()) {
            self.planner = Planner::new(wanted);
        }
        let plan = self.observer.plan(&mut self.planner, sequences, hot, budget).map_err(to_py)?;
        Ok(PyMovePlan { plan })
    }
}

/// Tracks where another allocator's blocks are, and plans moves to defragment them.
///
/// An *id* is the allocator's name for a block; a *block* is where the id's bytes are. Moves permute them. Block 0 is
/// the null block. Methods that take ids are fastest with an int64 array `[n]`.
///
/// Args:
///     num_blocks: number of blocks in the pool, 1 to 2147483647; None learns ids as they are used.
///
/// Raises:
///     InvalidArgumentError: the number of blocks is out of range.
///
/// Example:
///     >>> import numpy as np
///     >>> from blockyard.allocators import BlockObserver
///     >>> observer = BlockObserver(8)
///     >>> observer.use_ids([5, 6])
///     >>> plan = observer.plan("dense", 0)
///     >>> plan.pairs.tolist()
///     [[5, 1], [6, 2]]
///     >>> observer.commit(plan)  # once the bytes have moved
///     >>> observer.resolve(np.array([5, 6])).tolist()
///     [1, 2]
#[pyclass(frozen, name = "BlockObserver", module = "blockyard._core")]
pub(crate) struct PyBlockObserver {
    inner: InnerLock<Defragmenter>,
}

impl PyBlockObserver {
    fn lock(&self) -> Guard<'_, Defragmenter> {
        lock(&self.inner)
    }

    /// Resolves a table of ids of any shape and layout; `None` if it has another type.
    fn resolved<'py, T>(
        &self,
        ids: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
        must: &'static str,
        pass: bool,
    ) -> PyResult<Option<Bound<'py, PyAny>>>
    where
        T: Plain + Into<i64> + TryFrom<i64>,
    {
        let Some((mut values, shape)) = memory::copied::<T, IxDyn>(ids)? else { return Ok(None) };
        let state = self.lock();
        let (forward, limit) = (state.observer.forward(), i64::from(state.observer.limit()));
        for value in &mut values {
            let id: i64 = (*value).into();
            let known = usize::try_from(id).ok().and_then(|id| forward.get(id));
            match known {
                Some(&block) => *value = T::try_from(i64::from(block)).unwrap_or(*value),
                None if (pass && id < 0) || (0..limit).contains(&id) => {}
                None => return Err(unresolvable(id, limit)),
            }
        }
        drop(state);
        let Some(out) = out else {
            return Ok(Some(memory::filled(ids.py(), shape, &values, |&value| value)?.into_any()));
        };
        memory::store(Target::<T, IxDyn>::new(out, "out", must), shape.slice(), &values)?;
        Ok(Some(out.clone()))
    }
}

fn unresolvable(id: i64, limit: i64) -> PyErr {
    invalid(format!("block is {id}, must be 0 to {}", limit - 1))
}

#[pymethods]
impl PyBlockObserver {
    #[new]
    #[pyo3(signature = (num_blocks = None))]
    fn new(#[pyo3(from_py_with = args::num_blocks)] num_blocks: Option<u32>) -> PyResult<Self> {
        const MAX_BLOCKS: u32 = u32::MAX / 2;
        if num_blocks.is_some_and(|blocks| blocks == 0 || blocks > MAX_BLOCKS) {
            return Err(invalid(format!("num_blocks is {num_blocks:?}, must be 1 to {MAX_BLOCKS}")));
        }
        let observer = Observer::new(num_blocks.unwrap_or(1), num_blocks.unwrap_or(MAX_BLOCKS)).map_err(to_py)?;
        Ok(Self { inner: InnerLock::new(Defragmenter { observer, planner: Planner::default() }) })
    }

    /// Return the number of known ids.
    fn __len__(&self) -> usize {
        self.lock().observer.len() as usize
    }

    /// Upper bound of ids, exclusive.
    #[getter]
    fn limit(&self) -> u32 {
        self.lock().observer.limit()
    }

    /// Set the number of blocks.
    ///
    /// Raises:
    ///     InvalidArgumentError: higher ids are known already.
    fn set_limit(&self, #[pyo3(from_py_with = args::num_blocks)] num_blocks: u32) -> PyResult<()> {
        self.lock().observer.set_limit(num_blocks).map_err(to_py)
    }

    /// Add a reference to the blocks of ids.
    ///
    /// Args:
    ///     ids: ids, with repeats; if fresh, grouped by sequence, long sequences first.
    ///     fresh: whether the ids have no content; unused ones are then bound to the lowest empty blocks.
    ///
    /// Raises:
    ///     InvalidArgumentError: an id is out of range; nothing was changed.
    #[pyo3(signature = (ids, *, fresh = false))]
    fn use_ids(&self, #[pyo3(from_py_with = args::ids)] ids: Ids, fresh: bool) -> PyResult<()> {
        let Ids(ids) = ids;
        let observer = &mut self.lock().observer;
        if fresh { observer.use_fresh(&ids) } else { observer.use_ids(&ids) }.map_err(to_py)
    }

    /// Release a reference to the blocks of ids.
    ///
    /// Args:
    ///     ids: ids, with repeats.
    ///     fresh: whether blocks without references become empty.
    ///
    /// Raises:
    ///     InvalidArgumentError: a block has too few references; nothing was changed.
    #[pyo3(signature = (ids, *, fresh = false))]
    fn release_ids(&self, #[pyo3(from_py_with = args::ids)] ids: Ids, fresh: bool) -> PyResult<()> {
        let Ids(ids) = ids;
        self.lock().observer.release_ids(&ids, self::fresh(fresh)).map_err(to_py)
    }

    /// Mark ids that are not in use as empty.
    ///
    /// Raises:
    ///     InvalidArgumentError: an id is out of range; nothing was changed.
    fn forget_ids(&self, #[pyo3(from_py_with = args::ids)] ids: Ids) -> PyResult<()> {
        let Ids(ids) = ids;
        self.lock().observer.forget_ids(&ids).map_err(to_py)
    }

    /// Keep the blocks of ids and their bytes in place until `end_lease`.
    ///
    /// Raises:
    ///     InvalidArgumentError: an id is out of range; nothing was changed.
    fn lease(&self, #[pyo3(from_py_with = args::ids)] ids: Ids) -> PyResult<u64> {
        let Ids(ids) = ids;
        Ok(self.lock().observer.lease(&ids).map_err(to_py)?.0)
    }

    /// End a lease.
    ///
    /// Raises:
    ///     InvalidArgumentError: there is no such lease.
    fn end_lease(&self, #[pyo3(from_py_with = args::lease)] lease: u64) -> PyResult<()> {
        self.lock().observer.end_lease(LeaseId(lease)).map_err(to_py)
    }

    /// Return the blocks of ids.
    ///
    /// Args:
    ///     ids: array of any shape.
    ///     out: array of the same shape and dtype, any layout; may be `ids`.
    ///     pass_negative: whether to return negative ids unchanged.
    ///
    /// Returns:
    ///     `out`, or a new array of the shape and dtype of `ids`.
    ///
    /// Raises:
    ///     InvalidArgumentError: an id is out of range, or an array's shape or dtype is wrong; `out` was not written.
    #[pyo3(signature = (ids, *, out = None, pass_negative = false))]
    fn resolve<'py>(
        &self,
        ids: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
        pass_negative: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        if let Some(blocks) = self.resolved::<i64>(ids, out, "int64, as the ids", pass_negative)? {
            return Ok(blocks);
        }
        let blocks = self.resolved::<i32>(ids, out, "int32, as the ids", pass_negative)?;
        blocks.ok_or_else(|| invalid(format!("block ids are {}, must be an int64 or int32 array", describe(ids))))
    }

    /// Return the blocks of ids, for lists of ints.
    ///
    /// Raises:
    ///     InvalidArgumentError: an id is out of range.
    #[pyo3(signature = (rows, *, pass_negative = false))]
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python lists")]
    fn resolve_rows(
        &self,
        #[pyo3(from_py_with = args::rows)] rows: Vec<Vec<i64>>,
        pass_negative: bool,
    ) -> PyResult<Vec<Vec<i64>>> {
        let state = self.lock();
        let (forward, limit) = (state.observer.forward(), i64::from(state.observer.limit()));
        let one = |&id: &i64| match usize::try_from(id).ok().and_then(|id| forward.get(id)) {
            Some(&block) => Ok(i64::from(block)),
            None if (pass_negative && id < 0) || (0..limit).contains(&id) => Ok(id),
            None => Err(unresolvable(id, limit)),
        };
        rows.iter().map(|row| row.iter().map(one).collect()).collect()
    }

    /// Return the id of a block.
    ///
    /// Raises:
    ///     InvalidArgumentError: the block is out of range.
    fn unresolve(&self, #[pyo3(from_py_with = args::block)] block: u32) -> PyResult<u32> {
        let state = self.lock();
        if block >= state.observer.limit() {
            return Err(unresolvable(block.into(), state.observer.limit().into()));
        }
        Ok(state.observer.unresolve(block))
    }

    /// Return the referenced blocks in ascending order, each with its number of references, int64 `[n, 2]`.
    fn used<'py>(&self, py: Python<'py>) -> PyResult<PairArray<'py>> {
        let used: Vec<[u32; 2]> = self.lock().observer.used().map(|(block, refs)| [block.0, refs]).collect();
        array(py, &used)
    }

    /// Return the blocks without references or leases in ascending order, int64 `[n]`.
    fn holes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let holes: Vec<BlockId> = self.lock().observer.places().holes().iter().collect();
        memory::array(py, &holes, |hole| i64::from(hole.0))
    }

    /// By how many blocks the highest block in use could be lower.
    #[getter]
    fn gap(&self) -> u32 {
        self.lock().observer.places().gap()
    }

    /// Measure how fragmented the blocks in use are, including leased ones and the null block. Scans all blocks.
    ///
    /// Args:
    ///     sequences: ids of each sequence, in order, for `tables` and `runs`; shared blocks count once.
    /// Returns:
    ///     `Fragmentation`.
    /// Raises:
    ///     InvalidArgumentError: an id is out of range.
    #[pyo3(signature = (sequences = Vec::new()), text_signature = "($self, sequences=())")]
    fn fragmentation<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::sequences)] sequences: Vec<Ids>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let sequences = taken(sequences);
        let tables = sequences.iter().filter(|ids| !ids.is_empty()).count();
        let (max_id, gap, holes, runs) = {
            let mut state = self.lock();
            let (runs, _) = state.observer.runs(&sequences).map_err(to_py)?;
            let map = state.observer.places();
            (map.highest().map(|block| block.0), map.gap(), map.holes().len(), runs)
        };
        made!(py, "Fragmentation" { max_id, gap, holes, tables, runs })
    }

    /// Plan a step's moves; nothing changes until `commit`.
    ///
    /// Args:
    ///     goal: see `Defrag.run`.
    ///     number: see `Defrag.run`.
    ///     slack: the plan is empty while the goal is missed by at most this many ids or runs; once begun, moves
    ///         continue until the goal is met.
    ///     moves: maximum number of moves in this step.
    ///
    /// Raises:
    ///     InvalidArgumentError: the goal is unknown.
    #[pyo3(signature = (goal, number, *, slack = 0, moves = None))]
    fn plan(
        &self,
        goal: &str,
        #[pyo3(from_py_with = args::number)] number: u32,
        #[pyo3(from_py_with = args::slack)] slack: u32,
        #[pyo3(from_py_with = args::moves)] moves: Option<usize>,
    ) -> PyResult<PyMovePlan> {
        let wanted = Wanted { goal: Goal::from_name(goal, number).map_err(to_py)?, slack };
        self.lock().plan(&[wanted], &[], &[], Budget::of_moves(moves.unwrap_or(usize::MAX)))
    }

    /// Plan a step for several goals, most important first; nothing changes until `commit`.
    ///
    /// A later goal never undoes an earlier one: it moves no block to where an earlier goal wants none, and no block of
    /// the sequences of `"contiguous"`. If two goals contradict each other, the later one is missed.
    ///
    /// Args:
    ///     goals: `(name, number)` or `(name, number, slack)`, as in `plan`; also `"contiguous"`: no sequence has more
    ///         than `number` runs, with slack in runs. While the goals stay the same, each continues where the previous
    ///         step stopped.
    ///     sequences: the sequences for `"contiguous"`: ids of each, in order, most important first.
    ///     hot: ids of running sequences: their blocks move last, and a sequence whose last id is hot is made
    ///         contiguous last.
    ///     moves: maximum number of pairs in this step.
    ///     num_bytes: maximum bytes to write; an exchange writes both of its blocks.
    ///     bytes_per_block: bytes of a block in all layers; required with `num_bytes`.
    ///
    /// Raises:
    ///     InvalidArgumentError: a goal is unknown or invalid, or an id is out of range.
    #[pyo3(signature = (goals, *, sequences = None, hot = None, moves = None, num_bytes = None, bytes_per_block = 0))]
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python tuples")]
    fn plan_all(
        &self,
        #[pyo3(from_py_with = args::goals)] goals: Goals,
        #[pyo3(from_py_with = args::sequences)] sequences: Option<Vec<Ids>>,
        #[pyo3(from_py_with = args::hot)] hot: Option<Ids>,
        #[pyo3(from_py_with = args::moves)] moves: Option<usize>,
        #[pyo3(from_py_with = args::num_bytes)] num_bytes: Option<u64>,
        #[pyo3(from_py_with = args::bytes_per_block)] bytes_per_block: u64,
    ) -> PyResult<PyMovePlan> {
        if num_bytes.is_some() && bytes_per_block == 0 {
            return Err(invalid("bytes_per_block is 0, must be at least 1 with num_bytes".to_owned()));
        }
        let sequences = taken(sequences.unwrap_or_default());
        let hot = hot.map_or_else(Vec::new, |Ids(ids)| ids);
        let (moves, bytes) = (moves.unwrap_or(usize::MAX), num_bytes.unwrap_or(u64::MAX));
        let block_bytes = if num_bytes.is_some() { bytes_per_block } else { 0 };
        self.lock().plan(&goals.0, &sequences, &hot, Budget { moves, bytes, block_bytes })
    }

    /// Apply a plan whose bytes have moved: the ids of each pair change places.
    ///
    /// Raises:
    ///     InvalidArgumentError: the plan no longer fits the current state; nothing was changed.
    fn commit(&self, plan: &PyMovePlan) -> PyResult<()> {
        self.lock().observer.commit(&plan.plan.pairs).map_err(to_py)
    }

    /// Recount the whole state and compare.
    ///
    /// Raises:
    ///     InvariantError: the state contradicts itself, which is a bug in Blockyard.
    fn check(&self) -> PyResult<()> {
        self.lock().observer.check().map_err(to_py)
    }
}
