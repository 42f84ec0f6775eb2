#!/bin/bash
# Counters of the two kernels, and the whole benchmark. About 9 minutes.
. "$(dirname "$0")/common.sh"
if command -v ncu >/dev/null; then
    timeout 100 ncu --clock-control none --launch-skip 2 --launch-count 4 -k regex:copy_ --section SpeedOfLight \
        --section Occupancy --section WarpStateStats "$PROBE" rates >"$OUT/ncu.txt" 2>&1
    grep -E "copy_|Throughput|Occupancy|Long Scoreboard" "$OUT/ncu.txt" | head -n 30
fi
timeout 420 python3 benches/gpu/bench_transfer.py --require --no-calibrate --repeat 5 --json "$OUT/bench-all.json" 2>&1 |
    tee "$OUT/bench-all.txt" | tail -n 12
