"""A first look on a device: every op by every strategy beside plain indexing, small, each case on its own.

python benches/gpu/survey/smoke.py [-v]
"""

import sys
import time
import traceback
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from blockyard.engine import ops
from blockyard.engine.host_pool import CudaLocker, HostPool
from blockyard.engine.ops.library import op_library
from blockyard.engine.ops.strategy import STRATEGIES, StrategyName, force_strategy

WIDTHS = (16, 24, 4096, 8208, 65536)
CHUNK, BLOCK = 1 << 20, 65536


class StopsLocking(CudaLocker):
    """Page-locks two chunks and refuses all others."""

    left = 2

    def lock(self, address: int, num_bytes: int) -> str:
        """Register a range, as long as there are chunks left."""
        self.left -= 1
        return super().lock(address, num_bytes) if self.left >= 0 else "refused for the test"


def main() -> int:
    if not torch.cuda.is_available() or not op_library().loaded:
        print("nothing to look at:", op_library().explain() if torch.cuda.is_available() else "no CUDA device")
        return 1
    print(op_library().explain())
    print(torch.cuda.get_device_name(0))
    failed = sum(not ends_well(name, work) for name, work in cases())
    print("current stream is the default one:", torch.cuda.current_stream() == torch.cuda.default_stream())
    print("failed:", failed)
    return min(failed, 1)


def cases() -> list[tuple[str, Callable[[], None]]]:
    own = torch.cuda.Stream()
    streams = {"default": torch.cuda.default_stream(), "own": own}
    found: list[tuple[str, Callable[[], None]]] = [
        (f"swap by {strategy}, {width} bytes, {name} stream", partial(swap, strategy, width, stream))
        for strategy in STRATEGIES
        for width in WIDTHS
        for name, stream in streams.items()
    ]
    found.append(("ring of 3000 and exchange", within))
    found += [(f"runs over two registrations by {strategy}", partial(over_chunks, strategy)) for strategy in STRATEGIES]
    found.append(("a run over page-locked and ordinary memory", half_locked))
    found.append(("torch's next kernel after a copy of ours that fails", after_a_failure))
    return found


def ends_well(name: str, work: Callable[[], None]) -> bool:
    start = time.perf_counter()
    end = "ok"
    try:
        work()
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - each case is reported, then the next one runs
        end = f"FAILED {type(error).__name__}: {str(error)[:200]}"
        if "-v" in sys.argv:
            traceback.print_exc()
    print(f"{name:60s} {end} {1e3 * (time.perf_counter() - start):.1f} ms", flush=True)
    return end == "ok"


def swap(strategy: StrategyName, width: int, stream: torch.cuda.Stream, count: int = 700) -> None:
    random = np.random.default_rng(width)
    host = torch.from_numpy(random.integers(0, 256, (count, width), np.uint8)).pin_memory()
    device = torch.zeros((count, width), dtype=torch.uint8, device="cuda")
    back = torch.zeros_like(host).pin_memory()
    pairs = torch.from_numpy(np.column_stack((random.permutation(count), random.permutation(count))))
    torch.cuda.synchronize()
    with force_strategy(0, strategy), torch.cuda.stream(stream):
        ops.swap_blocks([host], [device], pairs)
        ops.swap_blocks([device], [back], pairs.flip(1))
        torch.cuda.current_stream().synchronize()
    expect(back, host)
    expect(device.cpu()[pairs[:, 1]], host[pairs[:, 0]])


def within() -> None:
    cache = torch.randint(0, 256, (3000, 8192 + 16), dtype=torch.uint8).cuda()
    want = cache.cpu()
    ring = torch.stack((torch.arange(3000), torch.arange(3000).roll(-1)), 1)
    want[ring[:, 1]] = want[ring[:, 0]].clone()
    ops.move_blocks([cache], ring)
    expect(cache.cpu(), want)
    ops.exchange_blocks([cache], torch.tensor([[0, 2999], [-1, -1]]))
    want[[0, 2999]] = want[[2999, 0]]
    expect(cache.cpu(), want)


def over_chunks(strategy: StrategyName) -> None:
    with HostPool(64, BLOCK, locker=CudaLocker(torch.device("cuda:0")), chunk_bytes=CHUNK) as pool:
        pool.wait(64)
        pool.rows.copy_(torch.randint(0, 256, (64, BLOCK), dtype=torch.uint8))
        want = pool.rows.clone()
        device = torch.zeros((64, BLOCK), dtype=torch.uint8, device="cuda")
        # Chunks hold 16 blocks: each run crosses a bound, and a batch has two merged pieces.
        ids = np.r_[8:24, 40:56]
        with force_strategy(0, strategy):
            ops.swap_blocks([pool.rows], [device], torch.from_numpy(np.column_stack((ids, ids))))
        torch.cuda.synchronize()
        expect(device.cpu()[ids], want[ids])


def half_locked() -> None:
    locker = StopsLocking(torch.device("cuda:0"))
    with HostPool(64, BLOCK, locker=locker, chunk_bytes=CHUNK, on_failure="unpinned") as pool:
        pool.wait(64)
        pool.rows.fill_(7)
        device = torch.zeros((64, BLOCK), dtype=torch.uint8, device="cuda")
        ops.swap_blocks([pool.rows], [device], torch.arange(64).repeat(2, 1).T.contiguous())
        torch.cuda.synchronize()
        expect(device.cpu(), pool.rows)


def after_a_failure() -> None:
    locker = StopsLocking(torch.device("cuda:0"))
    with HostPool(64, BLOCK, locker=locker, chunk_bytes=CHUNK, on_failure="unpinned") as pool:
        pool.wait(64)
        device = torch.zeros((63, BLOCK), dtype=torch.uint8, device="cuda")
        # Half a block later, one row lies over the end of the page-locked chunks: no single copy takes it.
        rows = pool.rows.view(-1)[BLOCK // 2 :][: 63 * BLOCK].view(63, BLOCK)
        try:
            torch.ops.blockyard.bench_copy_loop([rows], [device], torch.arange(63).repeat(2, 1).T.contiguous())
        except RuntimeError as error:
            print("the copy fails:", str(error)[:100])
        else:
            raise AssertionError("the driver took a copy that is page-locked in part: nothing has failed")
        torch.cuda.synchronize()
        expect(torch.ones(8, device="cuda").add_(1).cpu(), torch.full((8,), 2.0))
        ops.copy_blocks([device], torch.tensor([[0, 1]]))


def expect(got: torch.Tensor, want: torch.Tensor) -> None:
    if not torch.equal(got, want):
        raise AssertionError("other bytes than plain indexing")


if __name__ == "__main__":
    sys.exit(main())
