"""vLLM itself, served in a process of its own with the Python that `ENGINES_PYTHON` names."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

PYTHON = os.environ.get("ENGINES_PYTHON", "")
OURS = "blockyard.integrations.vllm"
SPEC = {"spec_name": "BlockyardSpec", "spec_module_path": OURS, "host_bytes": "16MiB"}
HERE = Path(__file__).parents[1] / "engines"


def serve(folder: Path, **options: Any) -> Any:
    """Run `serve_vllm.py`, and return what it prints; its options are described there."""
    paths = [str(HERE), str(HERE.parents[1] / "python")]
    finished = subprocess.run(
        [PYTHON, str(HERE / "serve_vllm.py"), str(folder), json.dumps(options)],
        check=False,
        capture_output=True,
        text=True,
        timeout=540,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0"},
    )
    results = [line for line in finished.stdout.splitlines() if line.startswith("RESULT ")]
    assert finished.returncode == 0, finished.stderr[-4000:]
    return json.loads(results[0].removeprefix("RESULT "))
