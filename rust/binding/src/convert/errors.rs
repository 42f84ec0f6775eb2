//! Converts errors of the core to Python exceptions, which `blockyard.errors` defines. No other module does.

use blockyard_core::{Error, Tier};
use pyo3::PyErr;

mod classes {
    use pyo3::import_exception;

    import_exception!(blockyard.errors, InvalidArgumentError);
    import_exception!(blockyard.errors, InvariantError);
    import_exception!(blockyard.errors, MappingError);
    import_exception!(blockyard.errors, OutOfBlocksError);
    import_exception!(blockyard.errors, OutOfMemoryError);
    import_exception!(blockyard.errors, SequenceStateError);
    import_exception!(blockyard.errors, StepOrderError);
    import_exception!(blockyard.errors, UnknownSequenceError);
    import_exception!(blockyard.errors, UnknownTicketError);
}

/// Returns the exception for an error of the core.
#[expect(clippy::needless_pass_by_value, reason = "passed to `map_err` by name")]
pub(crate) fn to_py(error: Error) -> PyErr {
    let message = error.to_string();
    match error {
        Error::OutOfBlocks { tier, wanted, free, total, .. } => {
            classes::OutOfBlocksError::new_err((message, tier.name(), wanted, free, total))
        }
        Error::TooManyPinned { wanted, held, limit } => {
            let free = limit.saturating_sub(held);
            classes::OutOfBlocksError::new_err((message, Tier::Device.name(), wanted, free, limit))
        }
        Error::UnknownSequence { .. } | Error::FreedSequence { .. } | Error::ForeignSequence { .. } => {
            classes::UnknownSequenceError::new_err(message)
        }
        Error::WrongTier { .. }
        | Error::InFlight { .. }
        | Error::EarlierInFlight { .. }
        | Error::Unwritten { .. }
        | Error::Lost { .. } => classes::SequenceStateError::new_err(message),
        Error::UnknownTicket { .. }
        | Error::UnknownPin { .. }
        | Error::UnknownJob { .. }
        | Error::UnknownLease { .. } => classes::UnknownTicketError::new_err(message),
        Error::NotInTicket { .. } | Error::BadMapping { .. } | Error::BadDecision { .. } => {
            classes::MappingError::new_err(message)
        }
        Error::OutOfMemory { wanted } => classes::OutOfMemoryError::new_err((message, wanted)),
        Error::Broken { .. } => classes::InvariantError::new_err(message),
        _ => classes::InvalidArgumentError::new_err(message),
    }
}

/// An argument has the wrong value, shape or dtype.
pub(crate) fn invalid(message: String) -> PyErr {
    classes::InvalidArgumentError::new_err(message)
}

/// Block ids do not form a valid mapping.
pub(crate) fn bad_mapping(message: String) -> PyErr {
    classes::MappingError::new_err(message)
}

/// A ticket was never issued.
pub(crate) fn unknown_ticket(message: String) -> PyErr {
    classes::UnknownTicketError::new_err(message)
}

/// A call comes at the wrong point of a step, or from the wrong caller.
pub(crate) fn step_order(message: String) -> PyErr {
    classes::StepOrderError::new_err(message)
}

/// The system does not have enough memory.
pub(crate) fn out_of_memory(bytes: usize) -> PyErr {
    classes::OutOfMemoryError::new_err((format!("asked for {bytes} bytes, which the system does not have"), bytes))
}
