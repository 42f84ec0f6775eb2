#!/bin/bash
# Calibration, and the goals with its table. About 9 minutes.
. "$(dirname "$0")/common.sh"
# A second run goes on where the first was ended.
timeout -k 10 300 python3 -m blockyard calibrate 2>&1 | tee "$OUT/calibrate.txt" | tail -n 4
cp "$BLOCKYARD_CACHE"/*.json "$OUT/" 2>/dev/null || echo "no calibrated table"
timeout 240 python3 benches/gpu/bench_transfer.py --require --no-calibrate --quick --repeat 5 --json "$OUT/bench.json" 2>&1 |
    tee "$OUT/bench.txt" | grep -E "^goal|^pool|Error|nothing" | cut -c1-200
