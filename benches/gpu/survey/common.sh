# Sourced by each script: the wheel in a folder of its own, the probe, and where the output goes.
cd "$(dirname "${BASH_SOURCE[0]}")/../../.." || exit 1
SURVEY=benches/gpu/survey
SITE="${TMPDIR:-/tmp}/blockyard-survey"
export OUT="${OUT:-$PWD/gpu-survey}" PYTHONUNBUFFERED=1 BLOCKYARD_CACHE="$SITE/cache" BLOCKYARD_TEST_GPU=require
mkdir -p "$OUT" "$BLOCKYARD_CACHE"
WHEEL=$(ls -t dist/blockyard-*.whl | head -n 1) || exit 1
if [ ! "$SITE/installed" -nt "$WHEEL" ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$SITE/site" "$WHEEL" || exit 1
    touch "$SITE/installed"
fi
export PYTHONPATH="$SITE/site"
PROBE="$SITE/probe"
if [ ! "$PROBE" -nt $SURVEY/probe.cu ]; then
    nvcc -O3 -std=c++17 -arch=sm_90 ${NVCC_FLAGS:-} -Icuda $SURVEY/probe.cu cuda/steps.cpp -o "$PROBE" || echo "no probe"
fi
