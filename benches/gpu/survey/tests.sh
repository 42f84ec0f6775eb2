#!/bin/bash
# The project's GPU tests, and a few of them under memcheck. About 8 minutes.
. "$(dirname "$0")/common.sh"
# Warnings as warnings first, so that one of them hides nothing; then as the project runs them.
timeout 300 python3 -m pytest -q -m gpu tests/gpu -W default --durations=6 2>&1 | tee "$OUT/tests.log" | tail -n 60
timeout 60 python3 -m pytest -q -m gpu tests/gpu/test_capture_cuda.py 2>&1 | tee "$OUT/capture.log" |
    grep -E "^(FAILED|ERROR)|passed|failed|skipped|UserWarning" | head -n 20
if command -v compute-sanitizer >/dev/null; then
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 150 compute-sanitizer --report-api-errors no --error-exitcode 9 \
        --target-processes all python3 -m pytest -q -m gpu -W default tests/gpu/test_moves_cuda.py \
        tests/gpu/test_staged_cuda.py tests/gpu/test_swaps_cuda.py -k "not calibration" >"$OUT/memcheck.log" 2>&1
    echo "memcheck of the copies ended with $?"
    tail -n 5 "$OUT/memcheck.log"
fi
