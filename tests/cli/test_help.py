"""What `--help` says and what a shell completes: examples that run, lines of a terminal, one set of options."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import shtab
from demo_report import REPORT

from blockyard.progress import show_progress
from blockyard.stores import open_store
from blockyard.tools import cli
from blockyard.tools.cli.options import EXIT_CODES, make_parser
from blockyard.tools.demo import run as demo
from blockyard.tools.doctor import run_doctor
from blockyard.tools.sim.fleet.campaign import Campaign
from blockyard.tools.sim.fleet.faults import FAULTS

CHOICES = next(action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction)).choices
COMMANDS = tuple(CHOICES)
KV_TRANSFER_CONFIG = """{"kv_connector": "BlockyardKVConnector", "kv_role": "kv_both",
"kv_connector_module_path": "blockyard.integrations.vllm", "kv_connector_extra_config": {"host_bytes": "1GiB"}}"""


def help_of(*command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        cli.main([*command, "--help"])
    assert left.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help_fits_80_columns_and_has_examples(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(*command, capsys=capsys)
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert "\nexamples:\n  blockyard " in text


def test_help_lists_every_kind_of_fault(capsys: pytest.CaptureFixture[str]) -> None:
    words = help_of("simulate", capsys=capsys).replace(",", " ").replace(";", " ").split()
    assert set(FAULTS) <= set(words)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_the_same_options_for_its_output(command: str) -> None:
    given = {name: ["trace.jsonl"] for name in ("plan", "replay")}
    given |= {"record": ["trace.jsonl", "true"], "store": ["file:///kv", "ls"]}
    options = make_parser().parse_args([command, *given.get(command, [])])
    assert (options.format, options.output, options.quiet) == ("text", None, False)
    options = make_parser().parse_args(
        [command, *given.get(command, []), "--format", "json", "--output", "found.json", "-q"]
    )
    assert (options.format, options.output, options.quiet) == ("json", Path("found.json"), True)


def examples() -> list[str]:
    lines = [line for command in CHOICES.values() for line in (command.epilog or "").splitlines()]
    return [line.strip() for line in lines if line.startswith("  blockyard ")]


def test_each_command_has_examples() -> None:
    assert {example.split()[1] for example in examples()} == set(COMMANDS)


@pytest.mark.parametrize("example", examples())
def test_example_runs(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def checked(options: demo.DemoOptions, **_: object) -> object:
        demo._check(options)
        return REPORT

    monkeypatch.chdir(tmp_path)
    example = example.replace("$PWD", str(tmp_path))
    monkeypatch.setattr(demo, "make_report", checked)
    monkeypatch.setattr("blockyard.tools.sim.run_campaign", lambda _seeds, fleet, **_: Campaign(fleet))
    monkeypatch.setattr("blockyard.tools.cli.recording.run_recorded", lambda _path, _program: 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: {0})  # each process of `plan` would load torch
    monkeypatch.setattr("blockyard.tools.setup_checks.check_engine", lambda *_: ())  # it is not installed here
    if "calibrate" in example:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in ("trace.jsonl", "sessions.jsonl.gz"):
        (tmp_path / name).write_text('{"timestamp": 0, "input_length": 33, "output_length": 1, "hash_ids": [5, 6]}')
    (tmp_path / "kv-transfer-config.json").write_text(KV_TRANSFER_CONFIG)
    options = {"bytes_per_block": 5000, "num_slots": 8, "use": "prefix"}
    with open_store(f"file://{tmp_path}/kv", **options) as store:  # type: ignore[arg-type]
        store.wait(store.submit_put([bytes(32)], np.ones((1, 5000), np.uint8)))
    words = shlex.split(example)
    assert cli.main(words[1 : words.index("&&") if "&&" in words else None]) == 0
    assert "Traceback" not in capsys.readouterr().err


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    """The completion script of each shell."""
    command = [sys.executable, "-m", "blockyard", "--print-completion"]
    return {
        shell: subprocess.run([*command, shell], check=True, capture_output=True, text=True).stdout
        for shell in ("bash", "zsh", "fish")
    }


def test_bash_completes_commands_options_and_choices(scripts: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "completion.bash"
    script.write_text(scripts["bash"])
    ask = (
        'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); set -- $(complete -p blockyard)\n'
        'while [ "$1" != -F ]; do shift; done; "$2"; printf "%s\\n" "${COMPREPLY[@]}"'
    )

    def complete(*words: str) -> set[str]:
        command = ["bash", "-c", ask, str(script), *words]
        return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())

    assert complete("blockyard", "d") == {"demo", "doctor"}
    assert complete("blockyard", "demo", "--prefix-") == {"--prefix-caching", "--prefix-store"}
    assert complete("blockyard", "store", "--da") == {"--damaged"}
    assert complete("blockyard", "doctor", "--format", "") == {"text", "json"}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_take_their_scripts(scripts: dict[str, str], shell: str, tmp_path: Path) -> None:
    for word in ("calibrate", "prefix-store", "damaged"):
        assert word in scripts[shell]
    if shutil.which(shell) is None:
        return
    script = tmp_path / "completion"
    script.write_text(scripts[shell])
    if shell == "zsh":  # it completes for a person alone
        subprocess.run([shell, "-n", script], check=True)
    else:
        command = [shell, "-c", f'source {script}; complete -C "blockyard demo --prefix-"']
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        assert [line.split()[0] for line in lines] == ["--prefix-caching", "--prefix-store"]


def test_files_and_folders_are_completed_where_they_are_meant(scripts: dict[str, str]) -> None:
    variables = dict(line.split("=", 1) for line in scripts["bash"].splitlines() if "_COMPGEN=" in line)
    assert variables["_shtab_blockyard_demo___model_COMPGEN"] == shtab.DIRECTORY["bash"]
    for name in ("replay___fit", "plan_pos_0", "doctor___output"):
        assert variables[f"_shtab_blockyard_{name}_COMPGEN"] == shtab.FILE["bash"]


def test_completion_without_shtab_says_what_to_install() -> None:
    program = "import sys; sys.modules['shtab'] = None; import blockyard.tools.cli; blockyard.tools.cli.main()"
    command = [sys.executable, "-c", program, "--print-completion", "bash"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == 2
    assert '--print-completion needs shtab: pip install "blockyard[cli]"\n' in ended.stderr


def test_the_page_has_every_command_exit_code_and_check(repo: Path) -> None:
    page = (repo / "docs/reference/cli.md").read_text()
    for line in EXIT_CODES.splitlines()[1:]:
        code, meaning = line.strip().split("  ", 1)
        assert f"| {code.replace('+', ' + ')} | {meaning.strip()} |" in page
    with show_progress("doctor", quiet=True) as view:
        checks = run_doctor(view)
    for word in (*COMMANDS, *(check.name for check in checks), "copy_strategies"):
        assert f"`{word}`" in page or f"`blockyard {word}" in page
