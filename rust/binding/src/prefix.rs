//! The prefix cache's part of `BlockManager`: prompts with their tokens, publishing, keys that leave the process.

use crate::allocator::ids;
use crate::args;
use crate::arrays::{self, Handle, Tokens};
use crate::errors::{invalid, to_py};
use crate::manager::PyBlockManager;
use crate::memory;
use blockyard_core::hash::Chain;
use blockyard_core::{BlockExtra, Extra, KeySpec, PrefixStats, Prompt};
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

/// Handles of new sequences, and how many of each one's first tokens need not be computed.
type Allocated<'py> = (Bound<'py, PyArray1<u64>>, Bound<'py, PyArray1<u32>>);

/// (prompt, block, kind, bytes) of something besides tokens that decides a block's bytes.
type PyExtra = (usize, usize, u32, PyBackedBytes);

/// Counters of the prefix cache.
#[pyclass(frozen, get_all, eq, name = "PrefixStats", module = "blockyard._core")]
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct PyPrefixStats {
    prompts: u64,
    blocks: u64,
    hit_blocks: u64,
    tokens: u64,
    hit_tokens: u64,
    merged: u64,
    loaded: u64,
    evicted: u64,
    cached_blocks: usize,
}

#[pymethods]
impl PyPrefixStats {
    /// Full blocks found, of all that were looked up; 0 before the first.
    #[getter]
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people to read")]
    fn hit_rate(&self) -> f64 {
        if self.blocks == 0 { 0.0 } else { self.hit_blocks as f64 / self.blocks as f64 }
    }
}

#[pymethods]
impl PyBlockManager {
    #[pyo3(signature = (prompts, *, salt = None, lora_id = 0, extras = Vec::new(), chunk_tokens = None))]
    #[expect(clippy::needless_pass_by_value, reason = "extracted from Python lists")]
    fn allocate_prompts<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = args::prompts)] prompts: Vec<Bound<'py, PyAny>>,
        salt: Option<&[u8]>,
        #[pyo3(from_py_with = args::lora_id)] lora_id: u64,
        #[pyo3(from_py_with = args::extras)] extras: Vec<PyExtra>,
        #[pyo3(from_py_with = args::chunk_tokens)] chunk_tokens: Option<u32>,
    ) -> PyResult<Allocated<'py>> {
        let tokens = prompts.iter().map(|prompt| arrays::token_ids(prompt, "prompts")).collect::<PyResult<Vec<_>>>()?;
        let spec = KeySpec::new(salt, lora_id);
        if let Some((prompt, ..)) = extras.iter().find(|extra| extra.0 >= tokens.len()) {
            return Err(invalid(format!("an extra is of prompt {prompt}, there are {}", tokens.len())));
        }
        let of_prompt = |i: usize| extras.iter().filter(move |extra| extra.0 == i);
        let extras: Vec<Vec<BlockExtra<'_>>> = if extras.is_empty() {
            Vec::new()
        } else {
            (0..tokens.len()).map(|i| of_prompt(i).map(block_extra).collect()).collect()
        };
        let (mut out, chunk) = (memory::reserved(tokens.len())?, chunk_tokens.unwrap_or(u32::MAX));
        memory::lend(&tokens, |tokens| {
            let extras = |i: usize| extras.get(i).map_or(&[][..], Vec::as_slice);
            let prompts = tokens.iter().enumerate().map(|(i, tokens)| Prompt { tokens, spec, extras: extras(i) });
            let prompts: Vec<_> = prompts.collect();
            self.lock().allocate_chunks(&prompts, chunk, &mut out)
        })?
        .map_err(to_py)?;
        let cached = memory::array(py, &out, |(_, cached)| *cached)?;
        let sequences = memory::array(py, &out, |(sequence, _)| sequence.0)?;
        Ok((sequences, cached))
    }

    #[pyo3(signature = (prompt, *, salt = None, lora_id = 0))]
    fn cached_tokens(
        &self,
        prompt: &Bound<'_, PyAny>,
        salt: Option<&[u8]>,
        #[pyo3(from_py_with = args::lora_id)] lora_id: u64,
    ) -> PyResult<u32> {
        let spec = KeySpec::new(salt, lora_id);
        memory::lend(&[arrays::token_ids(prompt, "prompt")?], |tokens| {
            self.lock().cached_tokens(&Prompt { tokens: tokens[0], spec, extras: &[] }).map_err(to_py)
        })?
    }

    #[pyo3(signature = (prompt, *, salt = None, lora_id = 0))]
    fn blocks_to_allocate(
        &self,
        prompt: &Bound<'_, PyAny>,
        salt: Option<&[u8]>,
        #[pyo3(from_py_with = args::lora_id)] lora_id: u64,
    ) -> PyResult<usize> {
        let spec = KeySpec::new(salt, lora_id);
        memory::lend(&[arrays::token_ids(prompt, "prompt")?], |tokens| {
            self.lock().blocks_to_allocate(&Prompt { tokens: tokens[0], spec, extras: &[] }).map_err(to_py)
        })?
    }

    fn next_chunk(
        &self,
        #[pyo3(from_py_with = args::sequence)] sequence: Handle,
        #[pyo3(from_py_with = args::budget)] budget: u32,
    ) -> PyResult<u32> {
        self.lock().next_chunk(sequence.0, budget).map_err(to_py)
    }

    #[pyo3(signature = (sequences, num_computed = None))]
    fn mark_computed(&self, sequences: &Bound<'_, PyAny>, num_computed: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let sequences = arrays::sequences(sequences)?;
        let computed = num_computed.map(|computed| Tokens::new(computed, "num_computed")).transpose()?;
        let computed = computed.map(Tokens::into_vec);
        self.lock().mark_computed_to(&sequences, computed.as_deref()).map_err(to_py)
    }

    fn common_computed_blocks<'py>(&self, sequences: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let py = sequences.py();
        let sequences = arrays::sequences(sequences)?;
        let blocks = self.lock().common_computed_blocks(&sequences).map_err(to_py)?;
        ids(py, &blocks)
    }

    fn reset_prefix_cache(&self) -> bool {
        self.lock().reset_prefix_cache()
    }

    #[getter]
    fn prefix_stats(&self) -> PyPrefixStats {
        let manager = self.lock();
        let PrefixStats { prompts, blocks, hit_blocks, tokens, hit_tokens, merged, loaded } = manager.prefix_stats();
        let pool = manager.pool(blockyard_core::Tier::Device);
        let (evicted, cached_blocks) = (pool.evictions(), pool.published());
        PyPrefixStats { prompts, blocks, hit_blocks, tokens, hit_tokens, merged, loaded, evicted, cached_blocks }
    }
}

fn block_extra((_, block, kind, bytes): &PyExtra) -> BlockExtra<'_> {
    BlockExtra { block: *block, extra: Extra { kind: *kind, bytes } }
}

/// Keys of a prompt's full blocks for other processes: SHA-256 digests of the key stream.
#[pyfunction]
#[pyo3(signature = (tokens, *, block_size, salt = None, lora_id = 0, cache_group = 0))]
pub(crate) fn export_keys<'py>(
    tokens: &Bound<'py, PyAny>,
    #[pyo3(from_py_with = args::block_size)] block_size: u32,
    salt: Option<&[u8]>,
    #[pyo3(from_py_with = args::lora_id)] lora_id: u64,
    #[pyo3(from_py_with = args::cache_group)] cache_group: u32,
) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let py = tokens.py();
    if block_size == 0 {
        return Err(invalid("block_size is 0, must be at least 1".to_owned()));
    }
    let mut chain = Chain::new(&KeySpec::new(salt, lora_id), block_size, cache_group);
    let export = |block: &[u32]| -> PyResult<_> {
        chain.block(block, &[]).map_err(to_py)?;
        Ok(chain.export().0)
    };
    let keys = memory::lend(&[arrays::token_ids(tokens, "tokens")?], |tokens| {
        let blocks = tokens[0].chunks_exact(block_size as usize);
        let mut keys = memory::reserved(blocks.len())?;
        for key in blocks.map(export) {
            keys.push(key?);
        }
        PyResult::Ok(keys)
    })??;
    Ok(keys.iter().map(|key| PyBytes::new(py, key)).collect())
}
