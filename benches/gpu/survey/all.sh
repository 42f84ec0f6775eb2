#!/bin/bash
# The whole benchmark. About 9 minutes.
. "$(dirname "$0")/common.sh"
timeout 540 python3 benches/gpu/bench_transfer.py --require --no-calibrate --repeat 5 --json "$OUT/bench-all.json" 2>&1 |
    tee "$OUT/bench-all.txt" | tail -n 24
