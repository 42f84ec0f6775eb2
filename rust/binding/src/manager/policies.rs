//! `PrefixCaching`: options of the prefix cache, and the names of policies.

use crate::convert::args::{self, Argument, shown};
use crate::convert::errors::{invalid, to_py};
use blockyard_core::{Eviction, Hint, MAX_EVENTS, Manager, Policies, ReuseOrder};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use std::fmt::Display;

/// Options of the prefix cache, for `BlockManager(prefix_caching=...)`.
///
/// Args:
///     eviction: which cached block is evicted first once no block is free. `"adaptive"`: uses the rule with the most
///         current hits, found by simulating each rule on a sample of the blocks. Its hit rate is rarely far below the
///         best fixed policy's, and it takes 10 % more time per request than `"lru"`. `"lru"`: the least recently used
///         block. `"priority"`: by `prefix.set_priority`. All evict a prompt's blocks from its end.
///     host: whether the host is a second level of the cache. What the device evicts goes there (`swap_out` of the step's
///         decision), and hits are loaded from there (`swap_in`). One eviction order spans both, as if they were one pool.
///         With several groups or a window, what they need to continue behind a block goes and comes together.
///     host_copies_per_step: with `host=True`, the maximum number of evicted blocks that one decision copies. Of a step
///         that evicts more, the ends of prompts are dropped. 0 copies only swapped blocks and those of
///         `prefix.offload`.
///     max_events: maximum number of events that wait for `prefix.take_events`; 0 records none.
///     max_pinned: fraction of the device blocks that pins may hold, 0 to below 1.
/// Raises:
///     InvalidArgumentError: an option is out of range, or its name is unknown.
///
/// Example:
///     >>> from blockyard import BlockManager, PrefixCaching
///     >>> options = PrefixCaching(eviction="lru", host=True, max_events=1000)
///     >>> manager = BlockManager(block_size=16, device_blocks=64, host_blocks=64, prefix_caching=options)
#[pyclass(frozen, eq, get_all, from_py_object, name = "PrefixCaching", module = "blockyard._core")]
#[derive(Clone, PartialEq)]
pub(crate) struct PyPrefixCaching {
    /// Name of the eviction policy.
    eviction: String,
    /// Whether the host is a second level of the cache.
    host: bool,
    /// Maximum number of evicted blocks that a decision copies to the host.
    host_copies_per_step: u32,
    /// Maximum number of waiting events.
    max_events: u32,
    /// Fraction of the device blocks that pins may hold.
    max_pinned: f64,
}

#[pymethods]
impl PyPrefixCaching {
    #[new]
    #[pyo3(signature = (*, eviction = "adaptive", host = false, host_copies_per_step = 65536, max_events = 0, max_pinned = 0.5))]
    fn new(
        eviction: &str,
        host: bool,
        #[pyo3(from_py_with = args::host_copies_per_step)] host_copies_per_step: u32,
        #[pyo3(from_py_with = args::max_events)] max_events: u32,
        #[pyo3(from_py_with = args::max_pinned)] max_pinned: f64,
    ) -> PyResult<Self> {
        if !(0.0..1.0).contains(&max_pinned) {
            return Err(invalid(format!("max_pinned is {max_pinned}, must be 0 or more and below 1")));
        }
        if max_events as usize > MAX_EVENTS {
            return Err(invalid(format!("max_events is {max_events}, must be 0 to {MAX_EVENTS}")));
        }
        Ok(Self { eviction: policy(eviction)?.name().to_owned(), host, host_copies_per_step, max_events, max_pinned })
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let (py, this) = (slf.py(), slf.get());
        let options = PyDict::new(py);
        options.set_item("eviction", &this.eviction)?;
        options.set_item("host", this.host)?;
        options.set_item("host_copies_per_step", this.host_copies_per_step)?;
        options.set_item("max_events", this.max_events)?;
        options.set_item("max_pinned", this.max_pinned)?;
        let make = py.import("functools")?.getattr("partial")?.call((slf.get_type(),), Some(&options))?;
        Ok((make, PyTuple::empty(py)))
    }

    fn __repr__(&self) -> String {
        let Self { eviction, host, host_copies_per_step, max_events, max_pinned } = self;
        let host = if *host { "True" } else { "False" };
        format!(
            "PrefixCaching(eviction='{eviction}', host={host}, host_copies_per_step={host_copies_per_step}, \
             max_events={max_events}, max_pinned={max_pinned})"
        )
    }
}

impl PyPrefixCaching {
    /// Applies these options to a new manager.
    pub(crate) fn apply(&self, manager: &mut Manager) -> PyResult<()> {
        manager.limit_pins(self.max_pinned).map_err(to_py)?;
        if self.host {
            manager.keep_host_copies(self.host_copies_per_step).map_err(to_py)?;
        }
        if self.max_events > 0 {
            manager.record_events(self.max_events as usize).map_err(to_py)?;
        }
        Ok(())
    }
}

/// The types that `prefix_caching=` accepts.
#[derive(Clone)]
pub(crate) enum CachingOptions {
    Off,
    On(PyPrefixCaching),
}

impl CachingOptions {
    pub(crate) const fn is_on(&self) -> bool {
        matches!(self, Self::On(_))
    }
}

impl<'py> Argument<'py> for CachingOptions {
    fn read(value: &Bound<'py, PyAny>, name: &dyn Display) -> PyResult<Self> {
        if let Ok(options) = value.extract::<PyPrefixCaching>() {
            return Ok(Self::On(options));
        }
        let is_on: bool = value
            .extract()
            .map_err(|_| invalid(format!("{name} is {}, must be a bool or a PrefixCaching", shown(value))))?;
        let default = PyPrefixCaching {
            eviction: Eviction::default().name().to_owned(),
            host: false,
            host_copies_per_step: 0,
            max_events: 0,
            max_pinned: 0.5,
        };
        Ok(if is_on { Self::On(default) } else { Self::Off })
    }
}

/// Returns the policies of those names.
pub(crate) fn of(reuse_order: &str, caching: &CachingOptions) -> PyResult<Policies> {
    let reuse = ReuseOrder::from_name(reuse_order)
        .filter(|order| *order != ReuseOrder::Lifo)
        .ok_or_else(|| unknown("reuse_order", reuse_order, &ReuseOrder::ALL.map(ReuseOrder::name)))?;
    let eviction = match caching {
        CachingOptions::Off => Eviction::default(),
        CachingOptions::On(options) => policy(&options.eviction)?,
    };
    Ok(Policies { reuse, eviction })
}

pub(crate) fn policy(name: &str) -> PyResult<Eviction> {
    Eviction::from_name(name).ok_or_else(|| unknown("eviction", name, &Eviction::NAMED.map(Eviction::name)))
}

/// The hint of that name.
pub(crate) fn hint(name: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Hint>> {
    let names = Hint::ALL.map(Hint::name).join(", ");
    let known = |name: &Bound<'_, PyAny>| {
        let hint = name.extract::<String>().ok().and_then(|name| Hint::from_name(&name));
        hint.ok_or_else(|| invalid(format!("hint is {}, must be one of {names}", shown(name))))
    };
    name.map(known).transpose()
}

fn unknown(what: &str, found: &str, names: &[&str]) -> PyErr {
    invalid(format!("{what} is \"{found}\", must be one of {}", names.join(", ")))
}
