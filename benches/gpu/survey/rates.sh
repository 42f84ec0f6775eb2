#!/bin/bash
# Rates: the link by every strategy, and a layout of 160 views. About 5 minutes.
. "$(dirname "$0")/common.sh"
build_probe
timeout 200 "$PROBE" rates 2>&1 | tee "$OUT/rates.txt"
timeout 150 python3 $SURVEY/views.py 2>&1 | tee "$OUT/views.txt" | tail -n 32
