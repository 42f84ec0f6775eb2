"""The package: extras, what a user reads where one is missing, and what a release says in several places."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import blockyard
from blockyard.workers.extras import missing

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OPEN = "from blockyard import open_store; open_store({url!r}, bytes_per_block=4096)"
DRIVER = "from blockyard.engine.elastic.cuda import load_driver; load_driver()"
COMPLETION = "import blockyard.tools.cli; sys.exit(blockyard.tools.cli.main(['--print-completion', 'bash']))"
DEMO = "import blockyard.tools.cli; sys.exit(blockyard.tools.cli.main(['demo']))"

# (module that is missing, what a user runs, what needs the module, the extra)
MISSING = [
    ("torch", "from blockyard import KVCache", "blockyard.KVCache", "torch"),
    ("torch", "from blockyard.executor import StepExecutor", "blockyard.engine", "torch"),
    ("torch", "import blockyard.metrics", "blockyard.metrics", "torch"),
    ("torch", "import blockyard.integrations.gaudi", "blockyard.integrations.gaudi", "torch"),
    ("transformers", "import blockyard.integrations.transformers", "blockyard.integrations.transformers", "demo"),
    ("transformers", DEMO, "this command", "demo"),
    ("hypothesis", "import blockyard.testing.machines", "blockyard.testing.machines", "testing"),
    ("prometheus_client", "import blockyard.metrics", "blockyard.metrics", "metrics"),
    ("zmq", "import blockyard.integrations.router_events", "blockyard.integrations.router_events", "events"),
    ("msgspec", "import blockyard.integrations.router_events", "blockyard.integrations.router_events", "events"),
    ("obstore", OPEN.format(url="s3://bucket/kv?size=1MiB"), "'s3://bucket/kv?size=1MiB'", "s3"),
    ("mooncake", OPEN.format(url="mooncake://host?size=1MiB"), "'mooncake://host?size=1MiB'", "mooncake"),
    ("opentelemetry", "from blockyard.tracing import instrument; instrument()", "blockyard.tracing", "otel"),
    ("greenlet", "import blockyard.tools.sim", "blockyard.tools.sim", "sim"),
    ("plotly", "import blockyard.tools.pictures", "blockyard.tools.pictures", "html"),
    ("lupa", "import blockyard.tools.sim", "blockyard.tools.sim", "sim"),
    ("shtab", COMPLETION, "--print-completion", "cli"),
    ("cuda", DRIVER, "an elastic cache on a GPU", "elastic"),
]

# The modules that each requirement of an extra is imported as, where they are not its name.
MODULES = {
    "cuda-bindings": "cuda",
    "mooncake-transfer-engine-non-cuda": "mooncake",
    "opentelemetry-api": "opentelemetry",
    "prometheus-client": "prometheus_client",
    "pyzmq": "zmq",
}


@pytest.fixture(scope="module")
def extras(repo: Path) -> dict[str, list[str]]:
    project = tomllib.loads((repo / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["optional-dependencies"]


@pytest.mark.parametrize(("module", "code", "what", "extra"), MISSING)
def test_a_module_that_is_not_installed_is_named_with_its_extra(module: str, code: str, what: str, extra: str):
    program = f"import sys; sys.modules[{module!r}] = None; {code}"
    found = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert found.returncode != 0
    assert found.stderr.splitlines()[-1].endswith(f': {what} needs {module}: pip install "blockyard[{extra}]"')


def test_another_module_that_is_missing_keeps_its_own_error():
    error = ModuleNotFoundError("No module named 'numpy'", name="numpy")
    assert missing("blockyard.KVCache", error) is error


def test_every_requirement_of_an_extra_is_known_to_the_message(extras: dict[str, list[str]]):
    names = {extra: [re.split(r"[^\w.-]", line)[0] for line in lines] for extra, lines in extras.items()}
    for name in {name for extra in extras if extra != "all" for name in names[extra]}:
        error = ModuleNotFoundError(name=MODULES.get(name, name))
        known = re.search(r"blockyard\[(\w+)\]", str(missing("it", error)))
        assert known, f"an extra installs {name}: name it in blockyard.workers.extras"
        assert name in names[known[1]]


def test_all_names_every_other_extra_but_one(extras: dict[str, list[str]]):
    """Mooncake has a wheel for each kind of machine, all with one module: `all` must not replace the user's."""
    assert extras["all"] == [f"blockyard[{','.join(sorted(extras.keys() - {'all', 'mooncake'}))}]"]


@pytest.fixture(scope="module")
def workflows(repo: Path) -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in (repo / ".github" / "workflows").glob("*.yml")}


def find(pattern: str, text: str) -> list[str]:
    return re.findall(pattern, text, re.MULTILINE)


def test_the_version_is_written_once(repo: Path):
    written = find(r'^version = "(.+)"', (repo / "Cargo.toml").read_text(encoding="utf-8"))
    assert written == [blockyard.__version__]
    for manifest in (repo / "rust").glob("*/Cargo.toml"):
        assert "version.workspace = true" in manifest.read_text(encoding="utf-8"), manifest
    for name in ("pyproject.toml", "CITATION.cff"):
        assert not find(r"^version\b", (repo / name).read_text(encoding="utf-8")), name


def test_the_changelog_starts_with_what_comes_next_or_with_the_version(repo: Path):
    headings = find(r"^## (.+)", (repo / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert headings[0] in {"Unreleased", blockyard.__version__}
    assert blockyard.__version__ in headings


def test_the_first_release_lists_features_and_no_fixes(repo: Path):
    first = (repo / "CHANGELOG.md").read_text(encoding="utf-8").rpartition("\n## ")[2]
    assert first.startswith("0.1.0\n")
    assert not find(r".*(?:no longer|\bBefore\b|\bbefore:|[Ff]ixed).*", first)


def test_every_promised_python_is_tested(repo: Path, workflows: dict[str, str]):
    project = (repo / "pyproject.toml").read_text(encoding="utf-8")
    promised = find(r'"Programming Language :: Python :: (3\.\d+)"', project)
    (tested,) = find(r"python: \[(.+)\]", workflows["ci"])
    assert tested.replace('"', "").split(", ") == promised
    assert "FREE_THREADED=python3.14t" in workflows["ci"]
    assert find(r'^requires-python = ">=(.+)"', project) == promised[:1]
    assert find(r"pyo3/abi3-py(\d+)", project) == [promised[0].replace(".", "")]


def test_a_release_is_built_by_the_maturin_that_is_tested(repo: Path, workflows: dict[str, str]):
    pinned = find(r"^maturin==(\S+)", (repo / "requirements-dev.txt").read_text(encoding="utf-8"))
    assert find(r"maturin-version: v(\S+)", workflows["release"]) == pinned


def test_workflows_run_commands_that_exist(repo: Path, workflows: dict[str, str]):
    makefile = (repo / "Makefile").read_text(encoding="utf-8")
    for text in workflows.values():
        for targets in find(r"run: make ([a-z -]+)", text):
            assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets.split())
    (built,) = find(r"-m sphinx .* (\S+)$", makefile)
    assert f"path: {built}" in workflows["docs"]
