"""vLLM's worker on a CUDA device: every part of a chunk comes back, behind the compute that was queued before."""

import itertools

import pytest
import torch
import vllm_modules

pytestmark = pytest.mark.gpu

PER_CHUNK, BLOCKS, PAGE = 4, 64, 4096


@pytest.mark.parametrize("expedited", [False, True])
def test_blocks_come_back_from_any_part_of_any_chunks(expedited: bool):
    with vllm_modules.loaded("stand-in 0.33") as vllm:
        base = vllm.base
        tensors = [torch.zeros(BLOCKS, PAGE, dtype=torch.int8, device="cuda") for _ in range(2)]
        caches = base.CanonicalKVCaches(
            tensors=[base.CanonicalKVCacheTensor(tensor=tensor, page_size_bytes=PAGE) for tensor in tensors],
            group_data_refs=[[base.CanonicalKVCacheRef(tensor_idx=t, page_size_bytes=PAGE) for t in range(2)]],
        )
        worker = vllm.ours.BlockyardWorker(caches, blocks_per_chunk=PER_CHUNK, num_chunks=6)
        chunks, ids = vllm.common.CPULoadStoreSpec, base.GPULoadStoreSpec
        # The store must wait for what is still being computed when it is submitted.
        torch.cuda._sleep(50_000_000)
        for tensor in tensors:
            tensor.copy_(torch.randint(-128, 128, tensor.shape, dtype=torch.int8, device="cuda"))
        worker.submit_store(0, ids(list(range(12)), [12], [0]), chunks([5, 1, 3]))
        worker.wait({0})
        before = [tensor.clone() for tensor in tensors]
        for job, (first, end) in enumerate(itertools.combinations(range(13), 2), 1):
            for tensor in tensors:
                tensor.zero_()
            used = [5, 1, 3][first // PER_CHUNK : (end - 1) // PER_CHUNK + 1]
            target = ids(list(range(30, 30 + end - first)), [end - first], [first])
            worker.submit_load(job, chunks(used), target, expedited=expedited)
            worker.wait({job})
            for tensor, source in zip(tensors, before, strict=True):
                wanted = torch.zeros_like(tensor)
                wanted[30 : 30 + end - first] = source[first:end]
                assert torch.equal(tensor, wanted)
        results = worker.get_finished()
        assert all(result.success and result.transfer_time > 0 for result in results)
        assert len(results) == 79
        worker.shutdown()
