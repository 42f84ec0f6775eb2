"""One seed is one run under every version of Python, and so is one replay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

UV = Path(sys.executable).with_name("uv")
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
PACKAGES = ("numpy", "greenlet", "lupa")  # serving engines and prefix stores need torch, and are left out

PROGRAM = """
import hashlib, json
from blockyard.tools.replay.engine import EngineOptions, replay_times
from blockyard.tools.replay.step_time import LinearStepTime
from blockyard.tools.sim import FleetOptions, simulate_fleet
from blockyard.traces import TraceRequest

found = {seed: simulate_fleet(seed, FleetOptions(work="calls")).digest for seed in range(8)}
options = EngineOptions(
    device_blocks=60, host_blocks=30, block_size=4, max_num_seqs=4, max_num_batched_tokens=64, bytes_per_block=1 << 20
)
prompts = [[number % 5 * 10 + place for place in range(3 + number % 7)] for number in range(60)]
trace = [TraceRequest(number / 3, 4 * len(ids) + 1, 9, tuple(ids), 4.0) for number, ids in enumerate(prompts)]
step_time = LinearStepTime(fixed=0.01, prefill_token=1e-3, decode_row=1e-4, context_token=1e-6)
times = replay_times(trace, options, step_time)
said = (times.first_token.tolist(), times.last_token.tolist(), times.scheduler, times.loaded_blocks)
found["replay"] = hashlib.sha256(repr(said).encode()).hexdigest()
print(json.dumps(found))
"""


def run(python: Path, repo: Path) -> dict[str, str]:
    """Return the digests of what a Python runs."""
    env = {"PYTHONPATH": str(repo / "python"), "PATH": os.environ["PATH"]}
    done = subprocess.run([python, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def others() -> Iterator[tuple[str, str]]:
    """Yield the other versions that this machine has, and where."""
    for version in VERSIONS:
        if version == f"{sys.version_info[0]}.{sys.version_info[1]}":
            continue
        command = [UV, "python", "find", "--system", "--no-python-downloads", version]
        # The commands that pyenv puts on PATH need its variable.
        env = {**os.environ, "PYENV_VERSION": version}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            yield version, done.stdout.strip()


def make_environment(interpreter: str, folder: Path, repo: Path) -> Path:
    """Return the Python of a new environment that has what simulations need, in the versions of the tests."""
    pins = folder.with_suffix(".txt")
    lines = (repo / "requirements-dev.txt").read_text().splitlines()
    pins.write_text("\n".join(line for line in lines if line.partition("==")[0] in PACKAGES))
    python = folder / "bin" / "python"
    for command in (["venv", "--python", interpreter, folder], ["pip", "install", "--python", python, "-r", pins]):
        done = subprocess.run([UV, *command, "--quiet"], capture_output=True, text=True, check=False)
        if done.returncode and "CI" not in os.environ:
            pytest.skip(f"cannot set up another Python to compare with: {done.stderr.strip()[:200]}")
        assert done.returncode == 0, done.stderr
    return python


@pytest.mark.slow
def test_a_seed_is_one_run_in_every_version_of_python(repo: Path, tmp_path: Path):
    found = dict(others())
    if not found:
        pytest.skip(f"no other Python of {', '.join(VERSIONS)} on PATH to compare with")
    here = run(Path(sys.executable), repo)
    assert len(set(here.values())) == len(here)
    for version, interpreter in found.items():
        assert run(make_environment(interpreter, tmp_path / version, repo), repo) == here, version
