//! `manager.defrag`: defragments and resizes the device pool.

use crate::convert::args::{self, Argument};
use crate::convert::arrays;
use crate::convert::errors::{invalid, to_py};
use crate::convert::values::made;
use crate::manager::shared::Shared;
use crate::observer::Goals;
use blockyard_core::defrag::{Budget, Goal, Wanted};
use blockyard_core::{self as core, Cached, Fragmentation, Moves, Resize, Tier};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyString;

/// The goal that page classes of an arena have.
const EXTENTS: &str = "extents";

/// Returns what one call has decided.
fn report(py: Python<'_>, moves: core::Result<Moves>) -> PyResult<Bound<'_, PyAny>> {
    static NOTHING: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let moves = moves.map_err(to_py)?;
    let made = |Moves { planned, left, stuck, held, dropped }| made!(py, "DefragReport" { planned, left, stuck, held, dropped });
    if moves != Moves::default() {
        return made(moves);
    }
    // Most steps move nothing, and making a report would take longer than finding that out.
    Ok(NOTHING.get_or_try_init(py, || made(moves).map(Bound::unbind))?.bind(py).clone())
}

/// Returns the progress of a resize of the device pool.
fn progress(py: Python<'_>, Resize { blocks, live, held, extent }: Resize) -> PyResult<Bound<'_, PyAny>> {
    made!(py, "ResizeProgress" { blocks, live, held, extent })
}

/// Defragments and resizes a manager's device pool; available as `manager.defrag`.
///
/// Example:
///     >>> from blockyard import BlockManager
///     >>> manager = BlockManager(block_size=4, device_blocks=8)
///     >>> first, second = manager.allocate(8, 8)
///     >>> _ = manager.complete(manager.take_decision().ticket)
///     >>> manager.free([first])
///     >>> report = manager.defrag.run("dense", 0)
///     >>> [pairs.ids.tolist() for pairs in manager.take_decision().move]
///     [[[2, 0], [3, 1]]]
#[pyclass(frozen, name = "Defrag", module = "blockyard._core")]
pub(crate) struct PyDefrag(Shared);

impl PyDefrag {
    pub(crate) const fn new(shared: Shared) -> Self {
        Self(shared)
    }
}

#[pymethods]
impl PyDefrag {
    /// Decide moves of device blocks into holes, as `move` pairs of this step's decision.
    ///
    /// Until the ticket completes, block tables, slots and cached blocks name the old blocks, which are still read and
    /// written. Then each target replaces its source everywhere, unless the source was written, freed or leased in the
    /// meantime. Targets are no longer free after this call. A cancelled or failed move frees its target and loses no
    /// data. Blocks written in this step or the previous one move last.
    ///
    /// Args:
    ///     goal: `"max_id"`: no block above `number`. `"free_tail"`: no block among the last `number`. `"dense"`: as
    ///         low as possible, within `number` ids. `"contiguous"`: no block table in more than `number` runs of
    ///         adjacent blocks, as far as holes allow. Or a list of `(goal, number)`, most important first: a later
    ///         goal never undoes an earlier one. With `(goal, number, slack)`, nothing moves until the goal is missed
    ///         by more than `slack` ids or runs. With several page classes, only `"extents"`: they can then take the
    ///         blocks `wanted`, and `number` more extents have no block in use. Nothing moves if that is out of reach.
    ///     number: see above, in blocks, runs or extents. None with a list of goals; with `"free_tail"`, None means all free
    ///         blocks, with `"extents"` none.
    ///     sequences: handles for `"contiguous"`, most important first, with their tables in all cache groups; None for
    ///         all on the device.
    ///     max_moves: maximum number of blocks to move in this step; an exchange counts as two.
    ///     max_bytes: maximum bytes to write in this step; None for no limit.
    ///     block_bytes: bytes of a block in all layers; required with `max_bytes`, except with `"extents"`: a class's
    ///         blocks count their own bytes.
    ///     cached: how to treat cached blocks that no sequence uses. `"move"`: they move like others and keep their
    ///         place in the order of eviction. `"drop"`: they count as holes; those in the way are evicted.
    ///         `"exchange"`: as `"drop"`, but their contents move to a free block if one is out of the way; they are
    ///         found again once the ticket completes, and count as just used. With `"extents"`, moves evict the first in
    ///         the order of eviction if their class has no free block left.
    ///     wanted: for `"extents"`: number of blocks of each page class, as in `Fit.wanted` of a request that has to wait.
    /// Returns:
    ///     `DefragReport`.
    /// Raises:
    ///     InvalidArgumentError: the name of a goal or `cached` is unknown, a number is missing or out of range, or
    ///         `max_bytes` is given without `block_bytes`.
    ///     UnknownSequenceError: there is no such sequence.
    ///     SequenceStateError: a sequence is not on the device.
    #[pyo3(signature = (goal, number = None, *, sequences = None, max_moves = 512, max_bytes = None,
        block_bytes = None, cached = "move", wanted = None))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn run<'py>(
        &self,
        py: Python<'py>,
        goal: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = args::number)] number: Option<u32>,
        sequences: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = args::max_moves)] max_moves: u32,
        #[pyo3(from_py_with = args::max_bytes)] max_bytes: Option<u64>,
        #[pyo3(from_py_with = args::block_bytes)] block_bytes: Option<u64>,
        cached: &str,
        #[pyo3(from_py_with = args::wanted)] wanted: Option<Vec<usize>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if goal.cast::<PyString>().is_ok_and(|goal| goal == EXTENTS) {
            if sequences.is_some() || block_bytes.is_some() || cached != Cached::default().name() {
                return Err(invalid(
                    "the goal is \"extents\", must be without sequences, block_bytes and cached".to_owned(),
                ));
            }
            let budget = Budget { moves: max_moves as usize, bytes: max_bytes.unwrap_or(u64::MAX), block_bytes: 0 };
            let (wanted, kept) = (wanted.unwrap_or_default(), number.unwrap_or(0) as usize);
            return report(py, self.0.lock().empty_extents(&wanted, kept, budget));
        }
        if wanted.is_some() {
            return Err(invalid("wanted is given, must be with the goal \"extents\" only".to_owned()));
        }
        let goals = goals(goal, number, || self.0.lock().pool(Tier::Device).free())?;
        let what = Cached::from_name(cached);
        let what =
            what.ok_or_else(|| invalid(format!("cached is {cached:?}, must be \"move\", \"drop\" or \"exchange\"")))?;
        let block_bytes = match (max_bytes, block_bytes.unwrap_or(0)) {
            (Some(bytes), 0) => {
                return Err(invalid(format!("block_bytes is 0, must be at least 1 for max_bytes of {bytes}")));
            }
            (Some(_), block_bytes) => block_bytes,
            (None, _) => 0,
        };
        let budget = Budget { moves: max_moves as usize, bytes: max_bytes.unwrap_or(u64::MAX), block_bytes };
        let sequences = sequences.map(arrays::sequences).transpose()?;
        report(py, self.0.lock().defragment(&goals, sequences.as_deref(), budget, what))
    }

    /// Resize the device pool while sequences run.
    ///
    /// Growing takes effect at once. Shrinking takes effect at once for admission, watermark and `max_pinned`. Blocks
    /// beyond the new end are no longer allocated, and cached blocks there are dropped. Blocks in use there remain
    /// until they are freed or moved and their leases end. A later call replaces an unfinished one.
    ///
    /// Args:
    ///     blocks: the new number of device blocks; with `Arena.split`, those of each page class, a list.
    ///     device_bytes: over an `Arena`, the new bytes of device memory, in whole extents, instead of `blocks`. Extents
    ///         beyond the end with blocks in use remain until these have left.
    /// Returns:
    ///     `ResizeProgress`, the current state.
    /// Raises:
    ///     InvalidArgumentError: too many blocks; or too few for the null block, pinned blocks, the watermark and one
    ///         free block; or the page classes need the other argument.
    #[pyo3(signature = (blocks = None, *, device_bytes = None))]
    fn resize<'py>(
        &self,
        py: Python<'py>,
        blocks: Option<&Bound<'py, PyAny>>,
        #[pyo3(from_py_with = args::device_bytes)] device_bytes: Option<u64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let resize = match (blocks, device_bytes) {
            (Some(blocks), None) if blocks.hasattr("__len__")? => {
                let blocks: Vec<usize> = args::blocks(blocks)?;
                self.0.lock().resize_split(&blocks)
            }
            (Some(blocks), None) => {
                let blocks: u32 = args::blocks(blocks)?;
                self.0.lock().resize_device(blocks as usize)
            }
            (None, Some(bytes)) => {
                let mut manager = self.0.lock();
                let extent = manager.pool(Tier::Device).extent_bytes().unwrap_or(1).max(1);
                manager.resize_extents(usize::try_from(bytes / extent).unwrap_or(usize::MAX))
            }
            (None, None) | (Some(_), Some(_)) => {
                return Err(invalid("give either blocks or device_bytes".to_owned()));
            }
        };
        progress(py, resize.map_err(to_py)?)
    }

    /// Return how much is still in use beyond the end of the device pool: `ResizeProgress`.
    fn progress<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let resize = self.0.lock().resize_progress();
        progress(py, resize)
    }

    /// Measure how fragmented the device pool is. Takes time in proportion to the pool and the block tables.
    ///
    /// Returns:
    ///     `Fragmentation`.
    fn fragmentation<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let Fragmentation { max_id, gap, holes, tables, runs } = self.0.lock().fragmentation().map_err(to_py)?;
        made!(py, "Fragmentation" { max_id: max_id.map(|block| block.0), gap, holes, tables, runs })
    }
}

/// Reads one goal by its name and number, or several.
fn goals(goal: &Bound<'_, PyAny>, number: Option<u32>, free: impl Fn() -> usize) -> PyResult<Vec<Wanted>> {
    match (goal.cast::<PyString>(), number) {
        (Ok(name), _) => {
            let name = name.to_str()?;
            let all_free = (name == "free_tail").then(|| u32::try_from(free()).unwrap_or(u32::MAX));
            let number = number.or(all_free);
            let number =
                number.ok_or_else(|| invalid(format!("number is None, must be an int for the goal {name:?}")))?;
            Ok(vec![Goal::from_name(name, number).map_err(to_py)?.into()])
        }
        (Err(_), None) => Goals::read(goal, &"goal").map(|Goals(goals)| goals),
        (Err(_), Some(number)) => {
            let must = "must be None with a list of goals, which have their own numbers";
            Err(invalid(format!("number is {number}, {must}")))
        }
    }
}
