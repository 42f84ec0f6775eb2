"""`import blockyard` is cheap: it takes milliseconds and loads neither torch nor CUDA."""

import os
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "triton", "rich", "cuda", "opentelemetry")

# What a scheduler process imports; it may run where torch is not installed at all.
LEAN_MODULES = [
    "blockyard",
    "blockyard.errors",
    "blockyard.layout.grouped",
    "blockyard.layout.kv",
    "blockyard.stores",
    "blockyard.scheduler",
    "blockyard.prefix_store",
    "blockyard.tools.replay.engine",
    "blockyard.tools.replay.plan",
    "blockyard.tracing",
    "blockyard.traces",
    "blockyard.tools.cli",
    "blockyard.integrations.vllm_v0",
    "blockyard.tools.doctor",
]

PROBE = """
import importlib, sys
importlib.import_module({module!r})
heavy = sorted(set(sys.modules) & set({heavy!r}))
libraries = {{line.split()[-1] for line in open("/proc/self/maps") if "libcuda" in line or "libtorch" in line}}
print(heavy + sorted(libraries))
"""


@pytest.mark.parametrize("module", LEAN_MODULES)
def test_import_loads_neither_torch_nor_cuda(module: str):
    code = PROBE.format(module=module, heavy=HEAVY)
    finished = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert finished.stdout.strip() == "[]"


def test_import_works_where_torch_is_not_installed():
    # None in sys.modules makes every later import of that name fail.
    code = "import sys; sys.modules['torch'] = None; import blockyard, blockyard.tools.cli, blockyard.stores"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONWARNINGS": "error"})


def test_import_loads_few_modules():
    # What an import takes depends on the machine; numpy alone loads more than this.
    code = "import sys; before = len(sys.modules); import blockyard; print(len(sys.modules) - before)"
    assert int(subprocess.check_output([sys.executable, "-c", code])) < 100
