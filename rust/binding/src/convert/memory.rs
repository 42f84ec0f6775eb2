//! All of the binding's `unsafe` code: the caller's arrays, new arrays, lists of ints, rows to copy.
//!
//! The safety comments below rest on these rules:
//! - *numpy's promise.* An array has memory for its dtype, shape and strides at its data pointer, as long as it lives.
//!   Some arrays break this: those from a wrong `as_strided`, `ctypes` or raw address, and those whose memory another
//!   thread replaces (`resize(refcheck=False)`, `data =`) while a call without the interpreter's lock uses it. In
//!   free-threaded Python no call has that lock, and there `shape =` and `strides =` count too. They are as unsafe here
//!   as in numpy.
//! - *Lent rows.* A store uses rows after the call that lends them. Private views keep the memory alive until the last
//!   thread, which may hang in the kernel, drops them. Rows that it writes are lent only once at a time.
//! - *Nothing is remembered.* Python code can change dtype, shape, strides and flags of any array in place. So each
//!   function reads them right before it touches the memory, and no Python code runs until after the last access.
//!   Slices are lent to `Send` closures, which cannot capture Python objects. [`RowViews`] are used repeatedly: they
//!   hold their own arrays over the same memory, which no Python code can reach.
//! - *The interpreter's lock.* While a thread is attached, no other runs Python code. A thread that waits for one of
//!   our locks is detached, so take locks before lending memory. In free-threaded Python, rust-numpy's borrow flags
//!   keep two calls from writing to one array.
//! - *Any bytes are valid.* [`Plain`] types have no invalid values, and no code trusts the values it reads. If a thread
//!   writes to an array while a call uses it without the lock, the result is mixed bytes, as during numpy's own copies.
//! - *One writer.* Slices that share a byte are all read-only. Addresses decide, since two arrays can share memory
//!   without a common owner.

use crate::convert::args::{describe, items};
use crate::convert::errors::{invalid, out_of_memory};
use crate::convert::lent::Extent;
use blockyard_copy::{Caches, CopyError, Mapping, Rows};
use blockyard_store::{LentRow, PAGE};
use numpy::ndarray::{Dimension, IntoDimension, Ix1, Ix2};
use numpy::npyffi::{self, _PyArray_GET_ITEM_DATA, NPY_ARRAY_WRITEABLE, NpyTypes, PY_ARRAY_API, npy_intp};
use numpy::{Element, PyArray, PyArrayDescrMethods, PyArrayMethods, PyUntypedArrayMethods, dtype};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::critical_section::with_critical_section;
use pyo3::types::PyList;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::Arc;

/// Types for which all-zero bytes are a valid value.
///
/// # Safety
/// All-zero bytes must be a valid value.
pub(crate) unsafe trait Zeroed: Element + Copy {}

/// Types for which any bytes are a valid value.
///
/// # Safety
/// Any bytes must be a valid value, and there must be no padding.
pub(crate) unsafe trait Plain: Zeroed {}

macro_rules! plain {
    ($($number:ty),*) => {$(
        // SAFETY: an integer.
        unsafe impl Zeroed for $number {}
        // SAFETY: as above.
        unsafe impl Plain for $number {}
    )*};
}

plain!(u8, i32, i64, u32, u64);

// SAFETY: zero is false.
unsafe impl Zeroed for bool {}

// ---- new memory ----

/// Returns an empty vector with room for `len` items.
pub(crate) fn reserved<T>(len: usize) -> PyResult<Vec<T>> {
    let mut items = Vec::new();
    items.try_reserve_exact(len).map_err(|_| out_of_memory(len.saturating_mul(size_of::<T>())))?;
    Ok(items)
}

/// Returns a new numpy array, C-contiguous and aligned. Without `zeroed`, its items are uninitialized.
fn new<'py, T: Zeroed, D: Dimension>(py: Python<'py>, shape: &D, zeroed: bool) -> PyResult<Bound<'py, PyArray<T, D>>> {
    let bytes = shape.slice().iter().fold(size_of::<T>(), |bytes, &len| bytes.saturating_mul(len));
    // numpy's maximum number of dimensions.
    let mut dims: [npy_intp; 64] = [0; 64];
    let (Ok(ndim), true) = (i32::try_from(shape.ndim()), shape.ndim() <= dims.len()) else {
        return Err(out_of_memory(bytes));
    };
    for (to, &len) in dims.iter_mut().zip(shape.slice()) {
        *to = npy_intp::try_from(len).map_err(|_| out_of_memory(bytes))?;
    }
    let (dims, kind) = (dims.as_mut_ptr(), dtype::<T>(py).into_dtype_ptr());
    // SAFETY: attached; `dims` has `ndim` lengths; the call consumes the reference to the dtype. It returns a new
    // array, or null and an error.
    let array = unsafe {
        let array = if zeroed {
            PY_ARRAY_API.PyArray_Zeros(py, ndim, dims, kind, 0)
        } else {
            PY_ARRAY_API.PyArray_Empty(py, ndim, dims, kind, 0)
        };
        Bound::from_owned_ptr_or_err(py, array)
    };
    // numpy fails for such a size: not enough memory, or too many bytes.
    let array = array.map_err(|_| out_of_memory(bytes))?;
    Ok(array.cast_into::<PyArray<T, D>>()?)
}

/// Returns a new zeroed array.
pub(crate) fn zeros<T: Zeroed, D: Dimension>(
    py: Python<'_>,
    shape: impl IntoDimension<Dim = D>,
) -> PyResult<Bound<'_, PyArray<T, D>>> {
    new(py, &shape.into_dimension(), true)
}

/// Returns a new zeroed array whose items `fill` writes, in C order, and the result of `fill`.
pub(crate) fn made<T: Zeroed, D: Dimension, R>(
    py: Python<'_>,
    shape: impl IntoDimension<Dim = D>,
    fill: impl FnOnce(&mut [T]) -> R,
) -> PyResult<(Bound<'_, PyArray<T, D>>, R)> {
    let array = zeros(py, shape)?;
    // SAFETY: the array is C-contiguous, aligned and zeroed, and nothing else refers to it.
    let filled = fill(unsafe { area(&array) }.items);
    Ok((array, filled))
}

/// Returns a new array with `of` applied to each item, in C order. If there are too few items, the rest is zero.
pub(crate) fn filled<'py, S, T: Zeroed, D: Dimension>(
    py: Python<'py>,
    shape: impl IntoDimension<Dim = D>,
    items: &[S],
    of: impl Fn(&S) -> T,
) -> PyResult<Bound<'py, PyArray<T, D>>> {
    let array = new::<T, D>(py, &shape.into_dimension(), false)?;
    let len = array.len().min(items.len());
    // SAFETY: the array has this many contiguous, aligned places, and nothing else refers to it.
    let places = unsafe { std::slice::from_raw_parts_mut(array.data().cast::<MaybeUninit<T>>(), array.len()) };
    for (place, item) in places[..len].iter_mut().zip(&items[..len]) {
        place.write(of(item));
    }
    places[len..].fill(MaybeUninit::zeroed());
    Ok(array)
}

/// Returns a new array with `of` applied to each item.
pub(crate) fn array<'py, S, T: Zeroed>(
    py: Python<'py>,
    items: &[S],
    of: impl Fn(&S) -> T,
) -> PyResult<Bound<'py, PyArray<T, Ix1>>> {
    filled(py, items.len(), items, of)
}

// ---- arrays that are read ----

/// Returns the items of an array of any layout, in C order, and its shape; `None` for another type or dimension.
pub(crate) fn copied<T: Plain, D: Dimension>(value: &Bound<'_, PyAny>) -> PyResult<Option<(Vec<T>, D)>> {
    let Ok(array) = value.cast::<PyArray<T, D>>() else { return Ok(None) };
    let (data, len) = (array.data(), array.len());
    let mut items: Vec<T> = reserved(len)?;
    if array.is_c_contiguous() {
        // SAFETY: the array has `len` contiguous items at `data`, aligned or not; any bytes are valid items; and
        // `items` has room for them.
        unsafe {
            items.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(data.cast(), len * size_of::<T>());
            items.set_len(len);
        }
    } else {
        each(array, |at| {
            // SAFETY: `at` points to an item of the array, aligned or not.
            items.push(unsafe { at.read_unaligned() });
        });
    }
    Ok(Some((items, array.dims())))
}

/// Returns the items of a one-dimensional array.
pub(crate) fn listed<T: Plain>(value: &Bound<'_, PyAny>) -> PyResult<Option<Vec<T>>> {
    Ok(copied::<T, Ix1>(value)?.map(|(items, _)| items))
}

/// Visits the address of each item, in C order.
fn each<T: Plain, D: Dimension>(array: &Bound<'_, PyArray<T, D>>, mut visit: impl FnMut(*mut T)) {
    let (shape, strides) = (array.shape(), array.strides());
    if shape.contains(&0) {
        return;
    }
    let mut index = vec![0_isize; shape.len()];
    loop {
        let offset = index.iter().zip(strides).map(|(&index, &stride)| index.wrapping_mul(stride));
        visit(array.data().wrapping_byte_offset(offset.fold(0, isize::wrapping_add)));
        let mut axis = shape.len();
        loop {
            let Some(before) = axis.checked_sub(1) else { return };
            axis = before;
            index[axis] += 1;
            if index[axis].unsigned_abs() < shape[axis] {
                break;
            }
            index[axis] = 0;
        }
    }
}

/// Numbers that may stay in the caller's memory.
pub(crate) enum Numbers<'py, T> {
    /// An array that was C-contiguous and aligned when it was passed.
    Array(Bound<'py, PyAny>),
    /// A copy.
    List(Vec<T>),
}

impl<'py, T: Plain> Numbers<'py, T> {
    /// Reads a one-dimensional array, copying it unless it is one slice; `None` if `value` is not such an array.
    pub(crate) fn of_array(value: &Bound<'py, PyAny>) -> PyResult<Option<Self>> {
        match value.cast::<PyArray<T, Ix1>>() {
            Ok(array) if is_slice(array) => Ok(Some(Self::Array(value.clone()))),
            Ok(_) => Ok(listed(value)?.map(Self::List)),
            Err(_) => Ok(None),
        }
    }

    /// Returns a copy of the numbers.
    pub(crate) fn into_vec(self) -> PyResult<Vec<T>> {
        match self {
            Self::List(numbers) => Ok(numbers),
            Self::Array(array) => listed(&array)?.ok_or_else(changed),
        }
    }

    /// Returns the current numbers.
    fn get(&self) -> PyResult<&[T]> {
        let array = match self {
            Self::List(numbers) => return Ok(numbers),
            Self::Array(array) => array.cast::<PyArray<T, Ix1>>().ok().filter(|array| is_slice(array)),
        };
        let array = array.ok_or_else(changed)?;
        if array.is_empty() {
            return Ok(&[]);
        }
        // SAFETY: the array has `len` contiguous, aligned items. `lend` ends the slice before Python code can run, and
        // nobody writes until then.
        Ok(unsafe { std::slice::from_raw_parts(array.data(), array.len()) })
    }
}

fn changed() -> PyErr {
    invalid("an array of token ids changed while the call read its arguments".to_owned())
}

/// Lends the caller's numbers to `call`, which must not write to any array.
pub(crate) fn lend<'a, 'py: 'a, T: Plain + 'a, R>(
    numbers: impl IntoIterator<Item = &'a Numbers<'py, T>>,
    call: impl FnOnce(&[&[T]]) -> R + Send,
) -> PyResult<R> {
    let numbers = numbers.into_iter();
    let mut slices = reserved(numbers.size_hint().1.unwrap_or_default())?;
    for numbers in numbers {
        slices.push(numbers.get()?);
    }
    Ok(call(&slices))
}

/// Lends the bytes of an array `[n, width]` of this shape, in C order, to `call`, without the interpreter's lock;
/// `None` if `value` is not such an array.
pub(crate) fn lend_rows<R: Send>(
    value: &Bound<'_, PyAny>,
    shape: [usize; 2],
    call: impl FnOnce(&[u8]) -> R + Send,
) -> PyResult<Option<R>> {
    let (py, array) = (value.py(), value.cast::<PyArray<u8, Ix2>>().ok());
    let Some(array) = array.filter(|array| array.shape() == shape) else { return Ok(None) };
    if !is_slice(array) {
        return Ok(copied::<u8, Ix2>(value)?.map(|(bytes, _)| py.detach(|| call(&bytes))));
    }
    // SAFETY: the array has `len` contiguous bytes, and lives until this returns. Other threads may write to them, as
    // above: `call` copies the bytes without interpreting them.
    let bytes = if array.is_empty() { &[] } else { unsafe { std::slice::from_raw_parts(array.data(), array.len()) } };
    Ok(Some(py.detach(|| call(bytes))))
}

pub(crate) type LentRows = Vec<Box<dyn LentRow>>;

/// A row of an array that a store uses after the end of the call that lent it.
struct Row {
    data: *mut u8,
    len: usize,
    is_written: bool,
    /// Dropped in this order: the addresses, then the memory.
    _lent: Arc<(Extent, Py<PyAny>)>,
}

// SAFETY: the bytes can be used on any thread, as `LentRow` requires. The reference to the array is only dropped on
// other threads, and the drop waits for the interpreter.
unsafe impl Send for Row {}

impl LentRow for Row {
    fn bytes(&self) -> &[u8] {
        // SAFETY: `_lent` keeps the memory alive, and within this crate only the store that has this row writes to it.
        unsafe { std::slice::from_raw_parts(self.data, self.len) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let len = if self.is_written { self.len } else { 0 };
        // SAFETY: as above; `Extent` ensures that rows being written have no other slice.
        unsafe { std::slice::from_raw_parts_mut(self.data, len) }
    }
}

/// Lends the rows of an array `[n, width]` of this shape to a store until it drops them; `None` if they are not
/// contiguous whole pages.
pub(crate) fn lent_rows(
    value: &Bound<'_, PyAny>,
    [count, width]: [usize; 2],
    is_written: bool,
) -> PyResult<Option<LentRows>> {
    let array = value.cast::<PyArray<u8, Ix2>>().ok().filter(|array| array.shape() == [count, width]);
    let wanted = || invalid(format!("rows is {}, must be uint8 [{count}, {width}]", describe(value)));
    let array = array.ok_or_else(wanted)?;
    if is_written {
        Target::<u8, Ix2>::new(array, "rows", "uint8 [n, bytes_per_block]").checked(true)?;
    }
    let start = array.data().addr();
    if !is_slice(array) || array.is_empty() || start % PAGE != 0 || width % PAGE != 0 {
        return Ok(None);
    }
    let extent = Extent::lend(start..start + array.len(), is_written);
    let extent = extent.ok_or_else(|| invalid("rows are still in use by a store".into()))?;
    let view = view(array)?;
    let data = view.data();
    let lent = Arc::new((extent, view.into_any().unbind()));
    let row = |at: usize| -> Box<dyn LentRow> {
        Box::new(Row { data: data.wrapping_add(at * width), len: width, is_written, _lent: Arc::clone(&lent) })
    };
    Ok(Some((0..count).map(row).collect()))
}

fn is_slice<T: Plain, D: Dimension>(array: &Bound<'_, PyArray<T, D>>) -> bool {
    array.is_c_contiguous() && array.data().is_aligned()
}

// ---- arrays that are written ----

/// An array that a call will write to.
pub(crate) struct Target<'a, 'py, T, D> {
    array: &'a Bound<'py, PyAny>,
    name: &'static str,
    must: &'static str,
    kind: PhantomData<(T, D)>,
}

impl<T, D> Clone for Target<'_, '_, T, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, D> Copy for Target<'_, '_, T, D> {}

/// The memory of a [`Target`].
pub(crate) struct Area<'a, T> {
    pub(crate) items: &'a mut [T],
    pub(crate) shape: &'a [usize],
}

impl<'a, 'py, T: Plain, D: Dimension> Target<'a, 'py, T, D> {
    /// Describes an argument by its name, and by its dtype and shape in words.
    pub(crate) fn new(array: &'a Bound<'py, PyAny>, name: &'static str, must: &'static str) -> Self {
        Self { array, name, must, kind: PhantomData }
    }

    /// Returns the array if it is writable and has the dtype and dimension; with `whole`, it must be one slice.
    fn checked(&self, whole: bool) -> PyResult<&'a Bound<'py, PyArray<T, D>>> {
        let Self { name, must, .. } = self;
        let found = self.array.cast::<PyArray<T, D>>().ok().filter(|array| !whole || is_slice(array));
        let form = if whole { "C-contiguous and aligned " } else { "" };
        let array =
            found.ok_or_else(|| invalid(format!("{name} is {}, must be {form}{must}", describe(self.array))))?;
        // SAFETY: attached, and it is an array.
        let flags = unsafe { (*_PyArray_GET_ITEM_DATA(array.as_array_ptr())).flags };
        if flags & NPY_ARRAY_WRITEABLE == 0 {
            return Err(invalid(format!("{name} cannot be written: it is read-only")));
        }
        Ok(array)
    }

    /// Keeps other calls of this module away from the array, in free-threaded Python.
    #[cfg(Py_GIL_DISABLED)]
    fn borrow(&self, array: &Bound<'py, PyArray<T, D>>) -> PyResult<numpy::PyReadwriteArray<'py, T, D>> {
        array.try_readwrite().map_err(|error| invalid(format!("{} cannot be written: {error}", self.name)))
    }
}

/// Returns the array as one slice.
///
/// # Safety
/// It is C-contiguous and aligned, its items are values of `T`, and until the area's last use nobody else uses them and
/// no Python code can reach the array.
unsafe fn area<'a, T, D: Dimension>(array: &'a Bound<'_, PyArray<T, D>>) -> Area<'a, T> {
    let (data, len) = (array.data(), array.len());
    // SAFETY: the caller's promise; if there are no items, the address does not matter.
    let items = if len == 0 { &mut [] } else { unsafe { std::slice::from_raw_parts_mut(data, len) } };
    Area { items, shape: array.shape() }
}

/// Lends an array to `call` to write to, with the result of `lock`. Other threads may run while `lock` waits, so it
/// is called before the memory is lent.
pub(crate) fn write<T: Plain, D: Dimension, G, R>(
    target: Target<'_, '_, T, D>,
    lock: impl FnOnce() -> G,
    call: impl FnOnce(Area<'_, T>, &mut G) -> R + Send,
) -> PyResult<R> {
    target.checked(true)?;
    let mut held = lock();
    let array = target.checked(true)?;
    #[cfg(Py_GIL_DISABLED)]
    let _borrowed = target.borrow(array)?;
    // SAFETY: just checked, and any bytes are valid items. `call` holds no Python object, so it reads only copies: no
    // caller of `write` passes numbers lent by `lend`.
    Ok(call(unsafe { area(array) }, &mut held))
}

/// Lends an array of bytes, which must have this shape, to `call` to write to, without the interpreter's lock.
/// Returns the array and the result of `call`.
pub(crate) fn fill_rows<'py, R: Send>(
    value: &Bound<'py, PyAny>,
    name: &'static str,
    shape: [usize; 2],
    call: impl FnOnce(&mut [u8]) -> R + Send,
) -> PyResult<(Bound<'py, PyArray<u8, Ix2>>, R)> {
    let target = Target::<u8, Ix2>::new(value, name, "uint8 [n, bytes_per_block]");
    let array = target.checked(true)?;
    if array.shape() != shape {
        return Err(invalid(format!("{name} has shape {:?}, must have {shape:?}", array.shape())));
    }
    #[cfg(Py_GIL_DISABLED)]
    let _borrowed = target.borrow(array)?;
    // SAFETY: just checked, any bytes are valid items, and the array lives until this returns. Other threads may use
    // the bytes, as above: `call` only writes them.
    let bytes = unsafe { area(array) }.items;
    let done = value.py().detach(|| call(bytes));
    Ok((array.clone(), done))
}

/// Lends two arrays to `call` to write to; see `write`.
pub(crate) fn write_both<T: Plain, D: Dimension, U: Plain, E: Dimension, G, R>(
    one: Target<'_, '_, T, D>,
    other: Target<'_, '_, U, E>,
    lock: impl FnOnce() -> G,
    call: impl FnOnce(Area<'_, T>, Area<'_, U>, &mut G) -> R + Send,
) -> PyResult<R> {
    one.checked(true)?;
    other.checked(true)?;
    let mut held = lock();
    let (first, second) = (one.checked(true)?, other.checked(true)?);
    let ([a, b], [c, d]) = (extent(first), extent(second));
    if a < d && c < b {
        return Err(invalid(format!("{} cannot be written: it shares memory with {}", one.name, other.name)));
    }
    #[cfg(Py_GIL_DISABLED)]
    let _borrowed = (one.borrow(first)?, other.borrow(second)?);
    // SAFETY: as in `write`, and the two do not overlap.
    Ok(call(unsafe { area(first) }, unsafe { area(second) }, &mut held))
}

/// Returns the first address of a C-contiguous array, and the first after its end.
fn extent<T, D: Dimension>(array: &Bound<'_, PyArray<T, D>>) -> [usize; 2] {
    let start = array.data().addr();
    [start, start + array.len() * size_of::<T>()]
}

/// Writes items, in C order, to an array of that shape and any layout.
pub(crate) fn store<T: Plain, D: Dimension>(
    target: Target<'_, '_, T, D>,
    shape: &[usize],
    items: &[T],
) -> PyResult<()> {
    let array = target.checked(false)?;
    if array.shape() != shape {
        return Err(invalid(format!("{} has shape {:?}, must have {shape:?}", target.name, array.shape())));
    }
    #[cfg(Py_GIL_DISABLED)]
    let _borrowed = target.borrow(array)?;
    let mut items = items.iter();
    each(array, |at| {
        if let Some(&item) = items.next() {
            // SAFETY: `at` points to a writable item of the array, aligned or not. `items` are not in the array's
            // memory, since only this module creates slices of arrays.
            unsafe { at.write_unaligned(item) };
        }
    });
    Ok(())
}

// ---- rows to copy ----

/// Caches over arrays, checked once. *Nothing is remembered* of the caller's arrays except their memory.
pub(crate) struct RowViews {
    caches: Caches,
    /// Private views of the caller's arrays: their shape cannot change, and they keep the memory.
    _arrays: Vec<Py<PyAny>>,
}

impl RowViews {
    /// Takes arrays to read and arrays to write, or one list to change in place; the inner error if they do not
    /// match.
    pub(crate) fn new(src: &Bound<'_, PyAny>, dst: Option<&Bound<'_, PyAny>>) -> PyResult<Result<Self, CopyError>> {
        let mut arrays = Vec::new();
        let sources = rows(src, "src", dst.is_none(), &mut arrays)?;
        let caches = match dst {
            Some(dst) => Caches::between(sources, rows(dst, "dst", true, &mut arrays)?),
            None => Caches::within(sources),
        };
        Ok(caches.map(|caches| Self { caches, _arrays: arrays }))
    }

    /// Runs a mapping, without the interpreter's lock.
    pub(crate) fn run(&self, py: Python<'_>, mapping: &Mapping, threads: usize) -> Result<(), CopyError> {
        py.detach(|| self.caches.run(mapping, threads))
    }
}

/// Returns the rows of each array of a list. They must be contiguous, must not overlap, and must be writable if
/// `written`. Adds views that keep the memory to `kept`.
fn rows(list: &Bound<'_, PyAny>, name: &'static str, written: bool, kept: &mut Vec<Py<PyAny>>) -> PyResult<Vec<Rows>> {
    items(list, &name, |value, at| {
        let refused = || {
            let found = describe(value);
            invalid(format!("{name}[{at}] is {found}, must be uint8 [rows, bytes], rows contiguous and distinct"))
        };
        let array = value.cast::<PyArray<u8, Ix2>>().map_err(|_| refused())?;
        let view = view(array)?;
        let (&[count, width], &[stride, column]) = (view.shape(), view.strides()) else { return Err(refused()) };
        // The stride of an axis with one item is arbitrary.
        let stride = if count > 1 { usize::try_from(stride).map_err(|_| refused())? } else { width };
        if stride < width || (count != 0 && width > 1 && column != 1) {
            return Err(refused());
        }
        let target = Target::<u8, Ix2>::new(&view, name, "uint8 [rows, bytes]");
        if written && target.checked(false).is_err() {
            return Err(invalid(format!("{name}[{at}] cannot be written: it is read-only")));
        }
        // SAFETY: the array has these rows, which do not overlap, and `kept` keeps it alive until their last use.
        let rows = unsafe { Rows::new(view.data(), count, width, stride) };
        kept.push(view.into_any().unbind());
        Ok(rows)
    })
}

/// Returns a new array over the memory of another, with the same shape and strides.
fn view<'py>(array: &Bound<'py, PyArray<u8, Ix2>>) -> PyResult<Bound<'py, PyArray<u8, Ix2>>> {
    let py = array.py();
    // SAFETY: attached; the same dtype, and the base array type, which runs no Python code. The call returns a new
    // array, or null and an error.
    let view = unsafe {
        let kind = npyffi::get_type_object(py, NpyTypes::PyArray_Type);
        let view = PY_ARRAY_API.PyArray_View(py, array.as_array_ptr(), std::ptr::null_mut(), kind);
        Bound::from_owned_ptr_or_err(py, view)?
    };
    Ok(view.cast_into::<PyArray<u8, Ix2>>()?)
}

// ---- lists and objects ----

/// How many items of a list are prefetched before the first of them is read.
const AHEAD: usize = 64;

/// Reads a list of ints, which is most of the cost of a prompt given as a list. Returns `None` if an item is
/// anything else or out of range; the slow path then converts it or reports the error.
pub(crate) fn ints<T: TryFrom<isize>>(list: &Bound<'_, PyList>) -> PyResult<Option<Vec<T>>> {
    with_critical_section(list, || {
        let len = list.len();
        let mut numbers = reserved(len)?;
        let mut items = [[std::ptr::null_mut(); AHEAD]; 2];
        fetch(list, 0..len.min(AHEAD), &mut items[0]);
        while numbers.len() < len {
            let (at, [now, next]) = (numbers.len(), &mut items);
            let end = len.min(at + AHEAD);
            fetch(list, end..len.min(end + AHEAD), next);
            for &item in &now[..end - at] {
                // SAFETY: the thread is attached. The list has held its items since `fetch` read them: neither that nor
                // this call runs Python code (items other than ints are errors, even with `__index__`), and the
                // critical section keeps other threads from changing the list.
                let number = unsafe { ffi::PyLong_AsSsize_t(item) };
                let failed = number == -1 && PyErr::take(list.py()).is_some();
                let Some(number) = T::try_from(number).ok().filter(|_| !failed) else { return Ok(None) };
                numbers.push(number);
            }
            items.swap(0, 1);
        }
        Ok(Some(numbers))
    })
}

/// Reads items of a list, valid as long as the list holds them, and prefetches their memory.
#[inline]
fn fetch(list: &Bound<'_, PyList>, range: Range<usize>, items: &mut [*mut ffi::PyObject; AHEAD]) {
    for (at, item) in range.zip(items) {
        // SAFETY: the thread is attached and the list alive; `at` is below its length.
        *item = unsafe { ffi::PyList_GetItem(list.as_ptr(), at.try_into().unwrap_or(isize::MAX)) };
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a prefetch is only a hint; any address is allowed.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(item.cast()) };
        }
    }
}
