# Sourced by each script: the wheel in a folder of its own, the probe, and where the output goes.
cd "$(dirname "${BASH_SOURCE[0]}")/../../.." || exit 1
SURVEY=benches/gpu/survey
SITE="${TMPDIR:-/tmp}/blockyard-survey"
export OUT="${OUT:-$PWD/gpu-survey}" PYTHONUNBUFFERED=1 BLOCKYARD_CACHE="$SITE/cache" BLOCKYARD_TEST_GPU=require
if ! nvidia-smi -L >/dev/null 2>&1; then
    echo "no CUDA device: nothing to survey"
    exit 0
fi
mkdir -p "$OUT" "$BLOCKYARD_CACHE"
WHEEL=$(ls -t dist/blockyard-*.whl | head -n 1)
if [ -z "$WHEEL" ]; then
    echo "no wheel in dist/: run make wheel, and copy dist/ here too; git ignores it"
    exit 1
fi
INSTALL="python3 -m pip install -q --no-index --no-compile --upgrade --target $SITE/site"
if [ ! "$SITE/installed" -nt "$WHEEL" ]; then
    $INSTALL --no-deps "$WHEEL" || exit 1
    touch "$SITE/installed"
fi
# What the caller has named stays.
export PYTHONPATH="$SITE/site${PYTHONPATH:+:$PYTHONPATH}"
if ! python3 -c 'import hypothesis, pytest; raise SystemExit(pytest.version_tuple < (9,))' 2>/dev/null; then
    $INSTALL --find-links dist 'pytest>=9' hypothesis ||
        echo "the tests need pytest 9 and hypothesis: put their wheels and those they need into dist/"
fi
PROBE="$SITE/probe"
build_probe() {
    if [ ! "$PROBE" -nt $SURVEY/probe.cu ]; then
        timeout 100 nvcc -O3 -std=c++17 -arch=sm_90 ${NVCC_FLAGS:-} -Icuda $SURVEY/probe.cu cuda/steps.cpp -o "$PROBE" ||
            echo "no probe"
    fi
}
