#!/bin/bash
# What is there, what the driver refuses, and every op once. About 3 minutes.
. "$(dirname "$0")/common.sh"
build_probe
{
    nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,memory.total --format=csv
    uname -r; nproc; free -g | sed -n 2p; ulimit -l; cat /sys/kernel/mm/transparent_hugepage/enabled
    for tool in make nvcc compute-sanitizer ncu; do command -v $tool || echo "no $tool"; done
    python3 -m blockyard doctor
    echo "--- limits"
    timeout 40 "$PROBE" limits || echo "limits ended with $?"
    for pieces in 1000 8192 16384 32768 51828 100000; do
        timeout 20 "$PROBE" batch $pieces 8192 || echo "a batch of $pieces ended with $? (124: hangs, 139: segmentation fault)"
    done
    echo "--- smoke"
    timeout 150 python3 $SURVEY/smoke.py || echo "smoke ended with $?"
    echo "--- a capture while the host pool locks pages"
    for mode in global thread_local relaxed; do
        timeout 45 python3 $SURVEY/capture.py $mode || echo "capture $mode ended with $?"
    done
} 2>&1 | tee "$OUT/limits.log"
