"""The command line: exit codes, one clear line for bad input, and nothing heavy loaded to say it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import demo_report
import pytest
from demo_report import REPORT

from blockyard import __version__
from blockyard.errors import BlockyardError, InvariantError
from blockyard.tools import cli
from blockyard.tools.cli import commands, options
from blockyard.tools.cli.result import Result
from blockyard.tools.demo import run as demo
from blockyard.tools.demo.report import Damage

BIG_URL_SIZE = "900TiB"


def run(*arguments: str) -> int:
    """Call the command as the shell would, and return its exit code."""
    try:
        return cli.main(arguments)
    except SystemExit as left:
        return int(left.code or 0)


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must be refused; return the one line that says why."""
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err.strip().splitlines()[-1]


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"blockyard {__version__}\n"


def test_help_lists_the_options_under_engines_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--help") == 0
    text = capsys.readouterr().out
    for option in ("--num-device-blocks", "--num-host-blocks", "--swap-store", "--preemption-mode"):
        assert option in text


def test_module_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "blockyard", "--version"]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == f"blockyard {__version__}\n"


def test_refused_command_line_loads_no_torch() -> None:
    program = (
        "import sys, blockyard.tools.cli\n"
        "code = blockyard.tools.cli.main(['demo', '--swap-store', 'swap'])\n"
        "assert code == 2, code\n"
        "assert not {'torch', 'transformers', 'rich'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONWARNINGS": "error"})


def test_command_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert "required" in complaint(capsys)


@pytest.mark.parametrize(
    ("arguments", "wording"),
    [
        (["--requests", "many"], "'many' is not a whole number"),
        (["--requests", "0"], "0 is not between 1 and"),
        (["--block-size", "-4"], "-4 is not between 1 and"),
        (["--num-host-blocks", "99999999999"], "99999999999 is not between 0 and"),
        (["--preemption-mode", "pause"], "invalid choice: 'pause'"),
        (["--num-device-block-s", "3"], "unrecognized arguments"),
    ],
)
def test_unusable_option_is_named_with_its_value(
    capsys: pytest.CaptureFixture[str], arguments: list[str], wording: str
) -> None:
    assert wording in complaint(capsys, "demo", *arguments)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--requests", "0"], "blockyard demo: error: argument --requests: 0 is not between 1 and 2147483647"),
        (["--sed", "3", "--request=2"], "blockyard: error: unrecognized arguments: --sed 3; did you mean --seed?"),
        (["--zzz"], "blockyard: error: unrecognized arguments: --zzz"),
    ],
)
def test_a_wrong_option_is_explained_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert run("demo", *arguments) == 2
    command = line.partition(": ")[0]
    assert capsys.readouterr().err == f"{line}; see {command} --help\n"


def test_trace_that_is_absent_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = complaint(capsys, "replay", str(tmp_path / "absent.csv"))
    assert line.startswith("blockyard: cannot read trace")
    assert "absent.csv" in line


def test_trace_in_no_known_format_is_refused_by_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("when,how long\n1,2\n")
    assert f"{path}, line 1: neither" in complaint(capsys, "replay", str(path))


@pytest.mark.parametrize(
    "url", ["file:", "file://", "http://example.org/swap", "file:///tmp?size=lots", "file:///tmp?sise=1GiB", "swap"]
)
def test_malformed_url_of_the_file_store_is_refused(capsys: pytest.CaptureFixture[str], url: str) -> None:
    assert complaint(capsys, "demo", "--swap-store", url).startswith("blockyard: ")


def test_size_that_the_disk_cannot_hold_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = complaint(capsys, "demo", "--swap-store", f"file://{tmp_path}?size={BIG_URL_SIZE}")
    assert line.startswith("blockyard: ")
    assert any(character.isdigit() for character in line)
    assert list(tmp_path.iterdir()) == []


def test_model_folder_that_is_absent_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert str(tmp_path / "model") in complaint(capsys, "demo", "--model", str(tmp_path / "model"))


def test_our_errors_end_in_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_options: object) -> Result:
        raise BlockyardError("asked for 9 blocks, 3 are free")

    monkeypatch.setattr(commands, "demo", fail)
    assert complaint(capsys, "demo") == "blockyard: asked for 9 blocks, 3 are free"


HOLDS = """
import sys, time
from blockyard.tools import cli
from blockyard.tools.demo import run
from blockyard.stores import open_store

def hold(options, *, quiet):
    with run.swap_folder(options) as url, open_store(url, bytes_per_block=4096, num_slots=4):
        while True:
            time.sleep(0.01)

run.make_report = hold
sys.exit(cli.main(sys.argv[1:]))
"""
"""The demo, whose run opens its store and waits for a signal."""


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGHUP], [signal.SIGHUP, signal.SIGTERM]])
@pytest.mark.parametrize("given", [True, False], ids=["given folder", "temporary folder"])
def test_a_demo_that_is_stopped_leaves_no_file_behind(
    tmp_path: Path, numbers: list[signal.Signals], *, given: bool
) -> None:
    arguments = ["--swap-store", f"file://{tmp_path}"] if given else []
    # A hangup ends it, also where whoever runs the tests ignores one (`nohup`).
    command = ["env", "--default-signal=HUP", sys.executable, "-c", HOLDS, "demo", *arguments]
    process = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        while not list(tmp_path.rglob("*.slab")):
            assert process.poll() is None
            time.sleep(0.01)
        for number in numbers:  # terminals and shutdowns send both
            process.send_signal(number)
        # The second signal may come when everything is removed, and only the end of the process is left.
        codes = {128 + number for number in numbers} | {-number for number in numbers[1:]}
        assert process.wait(timeout=300) in codes
        assert list(tmp_path.iterdir()) == []
    finally:
        process.kill()
        process.wait()


def test_a_signal_that_is_ignored_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with cli._orderly_end():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--output", "."],
        ["--output", "/absent/report.json"],
        ["--swap-store", "file:///tmp/a\tb?size=1GiB"],
        ["--swap-store", "nfs://server/dir"],
        ["--swap-store", "file:///tmp?sise=1GiB"],
        ["--swap-store", f"file:///tmp?size={'9' * 400}.5GiB"],
        ["--swap-store", "file:///tmp?size=12XiB"],
        ["--prefix-store", "file:///tmp", "--tensor-parallel-size", "2"],
        ["--prefix-store", "file:///tmp", "--no-prefix-caching"],
    ],
)
def test_bad_input_is_refused_before_torch_is_loaded(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with without("torch"):
        assert complaint(capsys, "demo", *arguments).startswith("blockyard: ")


@contextmanager
def without(module: str) -> Iterator[None]:
    """Let an import of a module fail."""
    before = {name: found for name, found in sys.modules.items() if name.partition(".")[0] == module}
    for name in before:
        del sys.modules[name]
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]
        sys.modules.update(before)


def test_any_other_error_has_an_exit_code_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for bug in (ZeroDivisionError("a bug"), InvariantError("a bug")):

        def fail(_options: object, bug: Exception = bug) -> Result:
            raise bug

        monkeypatch.setattr(commands, "demo", fail)
        assert run("demo") == 4
        assert f"{type(bug).__name__}: a bug" in capsys.readouterr().err


PRINTS = """
import sys
from blockyard.tools import cli
from blockyard.tools.cli import commands, result
commands.doctor = lambda _options: result.Result({}, lambda stream: print("all is well", file=stream))
sys.exit(cli.main(["doctor"]))
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_has_an_exit_code_of_its_own(unbuffered: str) -> None:
    def prints(stdout: int) -> tuple[int, str]:
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        command = [sys.executable, "-c", PRINTS]
        process = subprocess.run(
            command, check=False, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment
        )
        return process.returncode, process.stderr

    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    assert prints(writer) == (3, "blockyard: cannot write standard output: Broken pipe\n")
    assert prints(full) == (3, "blockyard: cannot write standard output: No space left on device\n")
    os.close(writer)
    os.close(full)


def test_a_closed_output_is_no_error() -> None:
    command = ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, PRINTS]
    assert subprocess.run(command, check=True, stderr=subprocess.PIPE).stderr == b""


def test_help_names_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ((), ("demo",), ("doctor",), ("calibrate",), ("store",)):
        assert run(*command, "--help") == 0
        assert options.EXIT_CODES in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value", "wording"),
    [
        ("--device", "abacus", "device is 'abacus', must be cpu, cuda or auto"),
        ("--num-device-blocks", "2000000000", "2000000000 device and"),
        ("--num-device-blocks", "3", "there are 3"),
        ("--output", "/absent/report.json", "/absent is not a folder"),
    ],
)
def test_what_the_machine_cannot_do_is_refused_with_the_numbers(
    capsys: pytest.CaptureFixture[str], option: str, value: str, wording: str
) -> None:
    assert wording in complaint(capsys, "demo", option, value)


def test_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_options: object) -> Result:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "demo", interrupt)
    assert run("demo") == 130


@pytest.mark.parametrize("command", ["simulate", "replay"])
def test_ctrl_c_while_processes_start_prints_no_traceback_and_leaves_none(command: str, tmp_path: Path) -> None:
    pytest.importorskip("greenlet")
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [0]}\n' * 10_000)
    arguments = ["simulate", "--seeds", "9999"] if command == "simulate" else ["replay", str(trace)]
    with subprocess.Popen(
        [sys.executable, "-m", "blockyard", *arguments, "--jobs", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")

        def has_loaded_numpy() -> bool:
            maps = [Path(f"/proc/{pid}/maps") for pid in children.read_text().split()]
            return any("multiarray" in file.read_text() for file in maps)

        try:
            while not has_loaded_numpy():  # then it has still to load our modules
                assert process.poll() is None
                time.sleep(0.005)
            os.killpg(process.pid, signal.SIGINT)
            _, said = process.communicate(timeout=300)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, [line for line in said.splitlines() if "..." not in line]) == (130, [])


def test_the_help_shows_no_default_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--help") == 0
    text = capsys.readouterr().out
    assert "default: None" not in text
    assert "default: False" not in text
    assert "seed of texts, lengths and samplers (default: 0)" in text


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[demo.DemoOptions]:
    """The options of each run, which ends at once with a report."""
    given: list[demo.DemoOptions] = []
    monkeypatch.setattr(demo, "make_report", lambda options, **_: given.append(options) or REPORT)
    return given


@pytest.mark.parametrize("flag", ["-q", "--quiet"])
def test_quiet_prints_nothing_and_still_writes_the_file(
    flag: str, tmp_path: Path, runs: list[demo.DemoOptions], capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    assert run("demo", flag, "--format", "json", "--output", str(path)) == 0
    assert capfd.readouterr() == ("", "")
    assert json.loads(path.read_text())["identical"] is True
    assert run("demo", flag) == 0
    assert capfd.readouterr() == ("", "")
    assert runs == [demo.DemoOptions()] * 2


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("quiet", [[], ["-q"]])
def test_json_is_one_object_alone_on_standard_output(quiet: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--format", "json", *quiet) == 0
    printed = capfd.readouterr()
    found = json.loads(printed.out)
    assert list(found)[:3] == ["command", "version", "exit_code"]
    assert (found["command"], found["version"], found["exit_code"], found["identical"]) == (
        "demo",
        __version__,
        0,
        True,
    )
    assert printed.err == ""


@pytest.mark.usefixtures("runs")
def test_text_goes_to_the_file_and_nothing_to_standard_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.txt"
    assert run("demo", "--output", str(path)) == 0
    assert capfd.readouterr() == ("", "")
    assert path.read_text().endswith("tokens identical to the unpaged Hugging Face model: 48/48\n")


REPORTS = """
import sys
from blockyard.tools import cli
from blockyard.tools.demo import run
from demo_report import REPORT

run.make_report = lambda *_, **__: REPORT
sys.exit(cli.main(["demo", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(
    ("arguments", "name"),
    [(["--output", "/dev/full"], "/dev/full"), (["-q", "--format", "json"], "standard output")],
)
def test_a_report_that_cannot_be_written_exits_3_and_is_printed_if_that_can_be(arguments: list[str], name: str) -> None:
    stdout = subprocess.PIPE if "/dev/full" in arguments else os.open("/dev/full", os.O_WRONLY)
    ended = subprocess.run(
        [sys.executable, "-c", REPORTS, *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(demo_report.__file__).parent)},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (3, f"blockyard: cannot write {name}: No space left on device\n")
    assert stdout != subprocess.PIPE or "48/48" in ended.stdout


def test_damage_that_nobody_reads_exits_2_and_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = replace(REPORT, damage=Damage(0, 0, 0))
    monkeypatch.setattr(demo, "make_report", lambda *_, **__: report)
    assert run("demo", "--corrupt", "3") == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("blockyard: no damaged block was read")
    assert "48/48" in printed.out
