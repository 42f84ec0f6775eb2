"""The site builds without a warning, reads nothing from the network, and lists its pages for language models."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"

FROM_THE_NETWORK = r'<(?:script|img|object)[^>]* (?:src|data)="(?:https?:)?//|<link rel="style[^>]*"(?:https?:)?//'


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet"]
    command += ["-d", str(folder / "trees"), str(DOCS), str(folder / "html")]
    built = subprocess.run(command, check=False, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder / "html"


def sources() -> set[str]:
    paths = (path.relative_to(DOCS) for path in DOCS.rglob("*.md"))
    return {path.with_suffix("").as_posix() for path in paths if path.parts[0] != "_build"}


def titles(name: str) -> set[str]:
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return set(re.findall(r"^#{1,2} .*", prose, re.MULTILINE))


def test_every_page_is_there_and_reads_nothing_from_the_network(site: Path):
    for name in sources():
        page = (site / f"{name}.html").read_text(encoding="utf-8")
        assert not re.search(FROM_THE_NETWORK, page), name


def test_language_models_find_every_page(site: Path):
    listed = (site / "llms.txt").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([^)]*)\)", listed))
    assert {f"_sources/{name}.md.txt" for name in sources()} <= linked
    assert all((site / path).exists() for path in linked)
    full = (site / "llms-full.txt").read_text(encoding="utf-8")
    assert not [name for name in sources() if not titles(name) <= set(full.splitlines())]


def test_pages_name_tests_that_exist():
    root, missing, count = DOCS.parent, [], 0
    for name in sources():
        text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
        file = ""
        for path, test in re.findall(r"(tests/[\w/]+\.py)?(?:::(test_\w+))?", text):
            file = path or file
            if not (path or test):
                continue
            count += 1
            source = root / file
            if not source.exists() or (test and f"def {test}(" not in source.read_text(encoding="utf-8")):
                missing.append(f"{name}: {file}::{test}")
        for crate, test in re.findall(r"cargo test[^`\n]* (?:-p|--package) blockyard-(\w+)[^`\n]* --test (\w+)", text):
            count += 1
            if not (root / "rust" / crate / "tests" / f"{test}.rs").exists():
                missing.append(f"{name}: {crate}, {test}")
    assert not missing
    assert count > 40
