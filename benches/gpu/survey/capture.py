"""Does a graph survive that is captured while the host pool locks pages in its thread, and does the pool?

python benches/gpu/survey/capture.py global|thread_local|relaxed
"""

import faulthandler
import sys
import time

import torch

from blockyard.engine.host_pool import HostPool

BLOCKS = 8192


def main(mode: str) -> int:
    if not torch.cuda.is_available():
        print("nothing to capture: no CUDA device")
        return 1
    faulthandler.dump_traceback_later(40, exit=True)
    x = torch.ones(1 << 20, device="cuda")
    x.add_(1)
    torch.cuda.synchronize()
    pool = HostPool.for_device(BLOCKS, 1 << 20, torch.device("cuda", 0))
    graph = torch.cuda.CUDAGraph()
    nodes, captured, start = 0, "ok", time.perf_counter()
    try:
        with torch.cuda.graph(graph, capture_error_mode=mode):
            while time.perf_counter() - start < 1.5 and pool.ready_blocks < pool.num_blocks:
                x.add_(1)
                nodes += 1
                time.sleep(0.01)
    except RuntimeError as error:
        captured = f"{type(error).__name__}: {str(error)[:160]}"
    print(f"{mode}: {nodes} nodes captured, {pool.ready_blocks} of {pool.num_blocks} blocks ready: {captured}")
    try:
        pool.wait(pool.num_blocks)
    except RuntimeError as error:
        captured = f"the pool: {type(error).__name__}: {str(error)[:300]}"
        print(captured)
    else:
        print("pool:", pool.pinned_blocks, "blocks page-locked,", pool.problem or "no problem")
    pool.close()
    return 0 if captured == "ok" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
