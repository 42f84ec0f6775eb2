//! Results of calls that are only their fields: dataclasses of `blockyard.types`, and classes that copy and pickle.

use blockyard_core::Tier;
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyType};
use std::convert::Infallible;
use std::fmt;

/// Makes an object of a dataclass of `blockyard.types`, which has the fields' types and documentation.
macro_rules! made {
    ($py:expr, $class:literal { $($field:ident $(: $value:expr)?),+ $(,)? }) => {{
        static CLASS: ::pyo3::sync::PyOnceLock<::pyo3::Py<::pyo3::types::PyType>> = ::pyo3::sync::PyOnceLock::new();
        let fields = ::pyo3::types::PyDict::new($py);
        $(fields.set_item(::pyo3::intern!($py, stringify!($field)), $crate::convert::values::value!($field $(, $value)?))?;)+
        $crate::convert::values::with_fields(CLASS.import($py, "blockyard.types", $class)?, &fields)
    }};
}
pub(crate) use made;

/// Makes an object of a dataclass that has these fields. The `__init__` of a frozen dataclass sets them one by one with
/// calls in Python, which takes four times as long.
pub(crate) fn with_fields<'py>(class: &Bound<'py, PyType>, fields: &Bound<'py, PyDict>) -> PyResult<Bound<'py, PyAny>> {
    let py = class.py();
    debug_assert_eq!(class.getattr("__dataclass_fields__")?.len()?, fields.len(), "{class} has other fields");
    let made = class.call_method1(intern!(py, "__new__"), (class,))?;
    made.getattr(intern!(py, "__dict__"))?.cast::<PyDict>()?.update(fields.as_mapping())?;
    Ok(made)
}

/// A field's value: the one given, or the variable of its name.
macro_rules! value {
    ($field:ident) => {
        $field
    };
    ($field:ident, $value:expr) => {
        $value
    };
}
pub(crate) use value;

/// Makes a class copy and pickle by the names of its fields, each of which has a getter.
macro_rules! picklable {
    ($class:ident { $($field:ident),+ $(,)? } $(without $left_out:ident)?) => {
        #[pymethods]
        impl $class {
            fn __reduce__<'py>(
                slf: &Bound<'py, Self>,
            ) -> PyResult<(Bound<'py, PyAny>, (Bound<'py, ::pyo3::types::PyDict>,))> {
                let fields = ::pyo3::types::PyDict::new(slf.py());
                $(fields.set_item(stringify!($field), slf.getattr(stringify!($field))?)?;)+
                Ok((slf.get_type().getattr("_from_fields")?, (fields,)))
            }

            #[classmethod]
            fn _from_fields(_: &Bound<'_, ::pyo3::types::PyType>, fields: &Bound<'_, PyAny>) -> PyResult<Self> {
                Ok(Self { $($field: fields.get_item(stringify!($field))?.extract()?,)+ $($left_out: Default::default())? })
            }
        }
    };
}
pub(crate) use picklable;

/// The name of a tier, a str in Python.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TierName(&'static str);

impl From<Tier> for TierName {
    fn from(tier: Tier) -> Self {
        Self(tier.name())
    }
}

impl fmt::Display for TierName {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str(self.0)
    }
}

impl<'py> IntoPyObject<'py> for TierName {
    type Target = PyString;
    type Output = Bound<'py, PyString>;
    type Error = Infallible;

    fn into_pyobject(self, py: Python<'py>) -> Result<Self::Output, Self::Error> {
        self.0.into_pyobject(py)
    }
}

impl<'py> IntoPyObject<'py> for &TierName {
    type Target = PyString;
    type Output = Bound<'py, PyString>;
    type Error = Infallible;

    fn into_pyobject(self, py: Python<'py>) -> Result<Self::Output, Self::Error> {
        self.0.into_pyobject(py)
    }
}

impl FromPyObject<'_, '_> for TierName {
    type Error = PyErr;

    fn extract(name: Borrowed<'_, '_, PyAny>) -> PyResult<Self> {
        let name: String = name.extract()?;
        let found = Tier::from_name(&name).map(Self::from);
        found.ok_or_else(|| PyValueError::new_err(format!("{name:?} is no tier")))
    }
}
