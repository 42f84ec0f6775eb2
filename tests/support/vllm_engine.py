"""The real vLLM, served in a separate process with the Python that `ENGINES_PYTHON` names."""

import json
import os
import queue
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

PYTHON = os.environ.get("ENGINES_PYTHON", "")
OURS = "blockyard.integrations.vllm"
SPEC = {"spec_name": "BlockyardSpec", "spec_module_path": OURS, "host_bytes": "16MiB"}
CONNECTOR = {"kv_connector": "BlockyardKVConnector", "kv_connector_module_path": OURS}
HERE = Path(__file__).parents[1] / "engines"


SECONDS = 1800  # on busy machines, importing vLLM may take minutes


def serve(folder: Path, **options: Any) -> Any:
    """Run `serve_vllm.py`, and return its result, which it documents, and vLLM's log."""
    finished = subprocess.run(
        _command(folder, options), check=False, capture_output=True, text=True, timeout=SECONDS, env=environment()
    )
    results = [line for line in finished.stdout.splitlines() if line.startswith("RESULT ")]
    assert finished.returncode == 0, finished.stderr[-4000:]
    return {**json.loads(results[0].removeprefix("RESULT ")), "log": finished.stdout.splitlines()}


class Engine:
    """A persistent engine that serves a round on request.

    Args:
        folder: folder of the model.
        log: file for all output except results.
        options: options of `serve_vllm.py`.
    """

    def __init__(self, folder: Path, log: Path, **options: Any) -> None:
        self._log = log
        command = _command(folder, {**options, "asked": True})
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment(),
                start_new_session=True,
            )
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def close(self) -> None:
        """End the process and those that it has started."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()  # vLLM then ends its processes and removes their shared memory
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._reader.join()
        self.process.stdout.close()
        self.process.wait()

    def ask(self, **asked: Any) -> None:
        """Start a round."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """Wait for the result of the oldest round."""
        try:
            found = self._answers.get(timeout=SECONDS)
        except queue.Empty:
            raise AssertionError(f"the engine stands still: {self._log.read_text()[-4000:]}") from None
        assert found is not None, self._log.read_text()[-4000:]
        return json.loads(found)

    def has_answered(self) -> bool:
        """Whether `answer` would not wait."""
        return not self._answers.empty()

    def serve(self, **asked: Any) -> Any:
        """Serve a round and return its result."""
        self.ask(**asked)
        return self.answer()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                self._answers.put(line.removeprefix("RESULT "))
        self._answers.put(None)


def _command(folder: Path, options: dict[str, Any]) -> list[str]:
    return [PYTHON, str(HERE / "serve_vllm.py"), str(folder), json.dumps(options)]


def environment() -> dict[str, str]:
    """Return the environment of a process that runs vLLM and ours."""
    paths = [str(HERE), str(HERE.parents[1] / "python")]
    # vLLM imports thousands of files, which takes a fraction of the time once they are compiled.
    known = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    known.pop("PYTHONHASHSEED", None)  # vLLM's keys are equal in all processes without it
    return {**known, "PYTHONPATH": os.pathsep.join(paths)}
