//! `AllocatorPair`: the core's pair of a device and a host allocator behind one lock.

use crate::allocator::{
    Blocks, Ids, PyBlockAllocator, PyNaiveAllocator, PyPrefixCachingAllocator, eviction, ids, reuse,
};
use crate::args;
use crate::decision::PyPairs;
use crate::tiers::tier_of;
use crate::errors::{invalid, to_py};
use blockyard_core as core;
use blockyard_core::allocator::{NaiveAllocator, PrefixCachingAllocator};
use blockyard_core::{AllocatorPair, BlockAllocator, BlockId, Pairs, Tier};
use blockyard_locks::{Guard, InnerLock};
use pyo3::prelude::*;

/// Both allocators, of either kind.
pub(crate) enum Pair {
    Naive(Box<AllocatorPair<NaiveAllocator>>),
    PrefixCaching(Box<AllocatorPair<PrefixCachingAllocator>>),
}

impl Pair {
    pub(crate) fn side(&self, tier: Tier) -> &(dyn BlockAllocator + 'static) {
        match (self, tier == Tier::Device) {
            (Self::Naive(pair), true) => &pair.device,
            (Self::Naive(pair), false) => &pair.host,
            (Self::PrefixCaching(pair), true) => &pair.device,
            (Self::PrefixCaching(pair), false) => &pair.host,
        }
    }

    pub(crate) fn side_mut(&mut self, tier: Tier) -> &mut (dyn BlockAllocator + 'static) {
        match (self, tier == Tier::Device) {
            (Self::Naive(pair), true) => &mut pair.device,
            (Self::Naive(pair), false) => &mut pair.host,
            (Self::PrefixCaching(pair), true) => &mut pair.device,
            (Self::PrefixCaching(pair), false) => &mut pair.host,
        }
    }

    fn locate(&self, absolute: u32) -> core::Result<(Tier, BlockId)> {
        match self {
            Self::Naive(pair) => pair.locate(absolute),
            Self::PrefixCaching(pair) => pair.locate(absolute),
        }
    }

    fn absolute(&self, tier: Tier, block: BlockId) -> u64 {
        match self {
            Self::Naive(pair) => pair.absolute(tier, block),
            Self::PrefixCaching(pair) => pair.absolute(tier, block),
        }
    }

    fn swap(&mut self, src: Tier, blocks: &[BlockId], out: &mut Vec<BlockId>) -> core::Result<Vec<[BlockId; 2]>> {
        match (self, src == Tier::Device) {
            (Self::Naive(pair), true) => pair.swap_out(blocks, out),
            (Self::Naive(pair), false) => pair.swap_in(blocks, out),
            (Self::PrefixCaching(pair), true) => pair.swap_out(blocks, out),
            (Self::PrefixCaching(pair), false) => pair.swap_in(blocks, out),
        }
    }
}

/// The tier of that name, if a pair has it.
fn side(name: &str) -> PyResult<Tier> {
    match tier_of(name)? {
        Tier::External => Err(invalid(format!("tier is '{name}', must be 'device' or 'host'"))),
        tier => Ok(tier),
    }
}

/// A device and a host allocator behind one space of ids.
#[pyclass(frozen, name = "AllocatorPair", module = "blockyard._core")]
pub(crate) struct PyAllocatorPair {
    inner: InnerLock<Pair>,
    prefix_caching: bool,
}

impl PyAllocatorPair {
    pub(crate) fn lock(&self) -> Guard<'_, Pair> {
        self.inner.lock()
    }

    fn view(slf: &Bound<'_, Self>, tier: Tier) -> PyResult<Py<PyAny>> {
        let (py, base) = (slf.py(), PyClassInitializer::from(PyBlockAllocator::in_pair(slf.clone().unbind(), tier)));
        Ok(if slf.get().prefix_caching {
            Py::new(py, base.add_subclass(PyPrefixCachingAllocator))?.into_any()
        } else {
            Py::new(py, base.add_subclass(PyNaiveAllocator))?.into_any()
        })
    }

    fn swap<'py>(
        &self,
        py: Python<'py>,
        [src, dst]: [Tier; 2],
        blocks: &[BlockId],
    ) -> PyResult<(Ids<'py>, Py<PyPairs>)> {
        let mut out = Vec::with_capacity(blocks.len());
        let copies = self.lock().swap(src, blocks, &mut out).map_err(to_py)?;
        let pairs = Pairs { src, dst, ids: copies.into_iter().map(|pair| pair.map(|block| block.0)).collect() };
        Ok((ids(py, &out)?, PyPairs::from_core(py, &pairs)?))
    }
}

#[pymethods]
impl PyAllocatorPair {
    #[new]
    #[pyo3(signature = (device_blocks, host_blocks, *, prefix_caching = false, reuse = "lowest", eviction = "released"))]
    fn new(
        #[pyo3(from_py_with = args::device_blocks)] device_blocks: u32,
        #[pyo3(from_py_with = args::host_blocks)] host_blocks: u32,
        prefix_caching: bool,
        reuse: &str,
        eviction: &str,
    ) -> PyResult<Self> {
        let (reuse, eviction) = (self::reuse(reuse)?, self::eviction(eviction)?);
        let pair = if prefix_caching {
            let make = |tier, blocks: u32| PrefixCachingAllocator::new(tier, blocks as usize, reuse, eviction);
            let (device, host) = (make(Tier::Device, device_blocks), make(Tier::Host, host_blocks));
            Pair::PrefixCaching(Box::new(AllocatorPair { device: device.map_err(to_py)?, host: host.map_err(to_py)? }))
        } else {
            let make = |tier, blocks: u32| NaiveAllocator::new(tier, blocks as usize, reuse);
            let (device, host) = (make(Tier::Device, device_blocks), make(Tier::Host, host_blocks));
            Pair::Naive(Box::new(AllocatorPair { device: device.map_err(to_py)?, host: host.map_err(to_py)? }))
        };
        Ok(Self { inner: InnerLock::new(pair), prefix_caching })
    }

    #[getter]
    fn device(slf: &Bound<'_, Self>) -> PyResult<Py<PyAny>> {
        Self::view(slf, Tier::Device)
    }

    #[getter]
    fn host(slf: &Bound<'_, Self>) -> PyResult<Py<PyAny>> {
        Self::view(slf, Tier::Host)
    }

    fn locate(&self, #[pyo3(from_py_with = args::absolute)] absolute: u32) -> PyResult<(&'static str, u32)> {
        self.lock().locate(absolute).map(|(tier, block)| (tier.name(), block.0)).map_err(to_py)
    }

    fn absolute(&self, tier: &str, #[pyo3(from_py_with = args::block)] block: u32) -> PyResult<u64> {
        let (tier, pair) = (side(tier)?, self.lock());
        let total = pair.side(tier).pool().len();
        if block as usize >= total {
            return Err(invalid(format!("block is {block}, must be below {total}")));
        }
        Ok(pair.absolute(tier, BlockId(block)))
    }

    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python lists")]
    fn swap_out<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::blocks)] blocks: Blocks,
    ) -> PyResult<(Ids<'py>, Py<PyPairs>)> {
        self.swap(py, [Tier::Device, Tier::Host], &blocks.0)
    }

    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python lists")]
    fn swap_in<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::blocks)] blocks: Blocks,
    ) -> PyResult<(Ids<'py>, Py<PyPairs>)> {
        self.swap(py, [Tier::Host, Tier::Device], &blocks.0)
    }

    fn check(&self) -> PyResult<()> {
        let pair = self.lock();
        [Tier::Device, Tier::Host].into_iter().try_for_each(|tier| pair.side(tier).check()).map_err(to_py)
    }
}
