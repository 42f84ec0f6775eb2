#!/bin/sh
# The copies' and the binding's tests under AddressSanitizer: `make test-asan`.
# The sanitizer's runtime is g++'s; Rust's own comes only with executables. Python's allocator is left out, because it
# hands out pieces of larger memory, beyond which the sanitizer sees nothing. What starts programs, runs models or compiles
# is left out: it takes most of the time and reaches no memory that the rest does not. So is what limits or counts the
# memory of the process, most of which is the sanitizer's.
set -eu
cd "$(dirname "$0")/.."
host=$(rustc -vV | sed -n 's/^host: //p')
# Some tests ask for more memory than there is, and must get an error.
export RUSTC_BOOTSTRAP=1 CARGO_TARGET_DIR=target/asan ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:allocator_may_return_null=1

RUSTFLAGS=-Zsanitizer=address PROPTEST_CASES=64 cargo test --locked --package blockyard-copy --lib --tests --target "$host"
RUSTFLAGS=-Zsanitizer=address PYO3_BUILD_EXTENSION_MODULE=1 cargo build --locked --quiet --package blockyard-binding \
    --features pyo3/abi3-py310 --target "$host"

site=$PWD/target/asan/site
rm -rf "$site" && mkdir -p "$site" && cp -rs "$PWD/python/blockyard" "$site"
ln -sf "$PWD/target/asan/$host/debug/lib_core.so" "$site/blockyard/_core.abi3.so"
# With the C++ runtime, or the sanitizer does not find what throws and aborts at the first exception of torch.
preload="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)"
PYTHONPATH=$site LD_PRELOAD=$preload PYTHONMALLOC=malloc \
    .venv/bin/python -m pytest -m "not slow" -k "not inductor and not two_workers and not memory_has_no_room" -p no:cacheprovider \
    $(for name in base buildsystem cli demo doctor examples generator kernels lean_import models run run_engine serve shrink tidy transformers wheel workers; do
        echo "--ignore $(echo tests/*/test_$name.py)"; done) --ignore tests/docs "$@"
