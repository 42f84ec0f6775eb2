#!/bin/bash
# Counters of each kernel with the grid of a real copy. About 4 minutes.
. "$(dirname "$0")/common.sh"
if ! command -v ncu >/dev/null; then
    echo "no ncu: no counters"
    exit 0
fi
build_probe
timeout 240 ncu --clock-control none -k regex:copy_ --section LaunchStats --section SpeedOfLight --section Occupancy \
    --section WarpStateStats "$PROBE" counters >"$OUT/ncu.txt" 2>&1 || echo "ncu ended with $?"
grep -E "copy_|Grid Size|Throughput|Occupancy|Long Scoreboard|ERR" "$OUT/ncu.txt" | head -n 60
