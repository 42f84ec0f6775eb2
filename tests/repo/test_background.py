"""Tests interrupt the processes that they start, also if the run itself was started in the background of a script."""

import signal
import subprocess
import sys


def test_a_process_that_a_test_starts_can_be_interrupted():
    program = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(3600)"
    finished = subprocess.run([sys.executable, "-c", program], check=False, stderr=subprocess.PIPE, text=True)
    assert finished.returncode == -signal.SIGINT
    assert finished.stderr.endswith("KeyboardInterrupt\n")


def test_so_can_one_where_the_run_was_started_with_ctrl_c_ignored():
    """`nohup make test &` in a script does so, as many runners do."""
    name = test_a_process_that_a_test_starts_can_be_interrupted.__name__
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{__file__}::{name}"]
    ignoring = ["env", "--ignore-signal=INT", *command]
    finished = subprocess.run(ignoring, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert finished.returncode == 0, finished.stdout
