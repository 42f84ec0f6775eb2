#!/bin/bash
# Rates: the link by every strategy, a layout of 160 views, calibration, the sizes of the goals. About 8 minutes.
. "$(dirname "$0")/common.sh"
timeout 150 "$PROBE" rates 2>&1 | tee "$OUT/rates.txt"
timeout 90 python3 $SURVEY/views.py 2>&1 | tee "$OUT/views.txt" | tail -n 32
timeout 150 python3 -m blockyard calibrate 2>&1 | tee "$OUT/calibrate.txt" | tail -n 4
timeout 200 python3 benches/gpu/bench_transfer.py --require --no-calibrate --quick --repeat 5 --json "$OUT/bench.json" 2>&1 |
    tee "$OUT/bench.txt" | cut -c1-420
cp "$BLOCKYARD_CACHE"/*.json "$OUT/" 2>/dev/null || echo "no calibrated table"
