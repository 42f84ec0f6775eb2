//! Warns about tickets that are never ended. Under `python -X dev`, it names the lines that took them.

use crate::locks::{InnerLock, lock};
use crate::manager::shared::Shared;
use blockyard_core::TicketId;
use pyo3::exceptions::PyRuntimeWarning;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// How many tickets the warning names.
const NAMED: usize = 8;

/// Watches for tickets that are never ended.
pub(crate) struct OpenTickets {
    most: u32,
    warned: AtomicBool,
    /// In development mode, where each ticket was taken; may include ended tickets.
    taken_at: InnerLock<BTreeMap<TicketId, String>>,
}

impl OpenTickets {
    pub(crate) fn new(most: u32) -> Self {
        Self { most, warned: AtomicBool::new(false), taken_at: InnerLock::new(BTreeMap::new()) }
    }

    /// Warns once if too many tickets are open. A warning may raise, so call this before changing anything.
    pub(crate) fn warn(&self, py: Python<'_>, manager: &Shared) -> PyResult<()> {
        let (first, count, steps) = {
            let manager = manager.lock();
            let count = manager.num_open_tickets();
            if count <= self.most as usize || self.warned.swap(true, Relaxed) {
                return Ok(());
            }
            (manager.open_tickets().take(NAMED).collect::<Vec<_>>(), count, manager.stats().steps + 1)
        };
        let taken_at = lock(&self.taken_at).clone();
        let named = first.iter().map(|ticket| {
            let line = taken_at.get(ticket).map(|line| format!(", {line}")).unwrap_or_default();
            format!("{} ({} steps ago{line})", ticket.0, steps - ticket.0)
        });
        let hint = if taken_at.is_empty() { "; python -X dev names the lines that took them" } else { "" };
        let text = format!(
            "{count} tickets are open, max_open_tickets is {}: complete or fail each ticket, its blocks stay leased until \
             then; the oldest are {}{hint}",
            self.most,
            named.collect::<Vec<_>>().join(", ")
        );
        PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &CString::new(text)?, 1)
    }

    /// In development mode, records where a ticket was taken.
    pub(crate) fn note(&self, py: Python<'_>, ticket: TicketId, manager: &Shared) {
        if !is_development_mode(py) {
            return;
        }
        let line = caller(py).unwrap_or_else(|_| "from an unknown line".to_owned());
        let is_full = {
            let mut taken_at = lock(&self.taken_at);
            taken_at.insert(ticket, line);
            taken_at.len() > 4 * (self.most as usize + NAMED)
        };
        if is_full {
            let open: Vec<TicketId> = manager.lock().open_tickets().collect();
            // Other threads may have taken later tickets since.
            lock(&self.taken_at).retain(|taken, _| *taken > ticket || open.binary_search(taken).is_ok());
        }
    }
}

fn is_development_mode(py: Python<'_>) -> bool {
    static IS_ON: PyOnceLock<bool> = PyOnceLock::new();
    let ask = || py.import("sys")?.getattr("flags")?.getattr("dev_mode")?.extract();
    *IS_ON.get_or_init(py, || ask().unwrap_or(false))
}

/// Returns file and line of the first caller outside this package.
fn caller(py: Python<'_>) -> PyResult<String> {
    let mut frame = py.import("sys")?.getattr("_getframe")?.call0()?;
    loop {
        let module: String = frame.getattr("f_globals")?.get_item("__name__")?.extract()?;
        let back = frame.getattr("f_back")?;
        if back.is_none() || !(module == "blockyard" || module.starts_with("blockyard.")) {
            let file: String = frame.getattr("f_code")?.getattr("co_filename")?.extract()?;
            return Ok(format!("{file}:{}", frame.getattr("f_lineno")?));
        }
        frame = back;
    }
}
