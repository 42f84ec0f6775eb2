"""Cost per page of a lookup by SGLang's linker on the scheduler's thread, over a store that answers immediately.

    python benches/bench_linker.py [--pages 1000000]

Looks up prompts of 1,000 pages up to `--pages`, growing tenfold: *read* with none of their pages in host
memory, *staged* with all. Prints microseconds per page, which do not grow with the prompt. SGLang is
not needed. With BENCH_JSON=FILE the figures are added to FILE.
"""

import argparse
import gc
import sys
import time
from pathlib import Path

from figures import keep

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
import sglang_stand_in

PAGE_BYTES = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=1_000_000, help="of the longest prompt")
    most = parser.parse_args().pages
    sys.modules.update(sglang_stand_in.modules())
    figures: dict[str, float] = {}
    count = 1000
    while count <= most:
        linker = sglang_stand_in.linker(PAGE_BYTES, most * PAGE_BYTES)
        keys = [f"{page:064x}" for page in range(count)]
        transfers = [sglang_stand_in.PoolTransfer(sglang_stand_in.PoolName.KV, keys=keys)]
        for what in ("read", "staged"):
            gc.collect()
            start = time.perf_counter()
            found = linker.lookup("one", transfers)
            figures[f"linker_{what}_{count}_us"] = (time.perf_counter() - start) * 1e6 / count
            assert len(found) == count
        linker.close()
        count *= 10
    for name, value in figures.items():
        print(f"{name:32} {value:8.3f}")
    keep(figures)


if __name__ == "__main__":
    main()
