"""The site builds without a warning, reads nothing from the network, and lists its pages for language models."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, LOADED, browser_page
from sphinx.util.inventory import InventoryFile

import public_names

DOCS = Path(__file__).resolve().parents[2] / "docs"

FROM_THE_NETWORK = r'<(?:script|img|object)[^>]* (?:src|data)="(?:https?:)?//|<link rel="style[^>]*"(?:https?:)?//'


@pytest.fixture(scope="session")
def site(shared_folder: Any) -> Path:
    """The site, built once for all workers of a run."""
    with shared_folder("site") as folder:
        result = folder / "result"
        if not result.exists():
            command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet"]
            command += ["-d", str(folder / "trees"), str(DOCS), str(folder / "html")]
            built = subprocess.run(command, check=False, capture_output=True, text=True)
            result.write_text(f"{built.returncode}\n{built.stderr}", encoding="utf-8")
        code, _, said = result.read_text(encoding="utf-8").partition("\n")
        assert code == "0", said
        return folder / "html"


@pytest.fixture(scope="session")
def inventory(site: Path) -> dict[str, str]:
    """Page and anchor of each class, function, method and attribute, by name."""
    found = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    return {name: entry.uri for kind in found if kind.startswith("py:") for name, entry in found[kind].items()}


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
    assert all(f"class {name}" in full for name in ("BlockManager", "KVCache", "Scheduler"))


def test_an_inventory_leads_other_sites_to_each_name(site: Path, inventory: dict[str, str]):
    named = [f"{module}.{name}" for module, names in public_names.listed().items() for name in names]
    assert len(named) > 150
    for name in (*named, "blockyard.BlockManager.append", "blockyard.Scheduler.schedule"):
        page, _, anchor = inventory[name].partition("#")
        assert anchor == name
        assert f'id="{name}"' in (site / page).read_text(encoding="utf-8")
    api = (site / "reference" / "api.html").read_text(encoding="utf-8")
    assert not [name for name in named if f'title="{name}"' not in api]


def test_a_page_of_a_class_has_what_help_says_without_the_rules_of_machines(site: Path):
    page = (site / "reference/names/blockyard.BlockManager.html").read_text(encoding="utf-8")
    for said in ("<strong>lookahead</strong>", "Returns", "Raises", "too few free blocks", "&gt;&gt;&gt; "):
        assert said in page, said
    machine = (site / "reference/names/blockyard.testing.machines.ManagerMachine.html").read_text(encoding="utf-8")
    assert "preempt_and_resume" not in machine
    assert "same_ids" in machine


def test_the_search_finds_an_option_by_its_words(site: Path):
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index: Any = json.loads(text[text.index("(") + 1 : text.rindex(")")])
    found = [index["terms"][word] for word in ("prefetch", "timeout")]
    both = set.intersection(*[{pages} if isinstance(pages, int) else set(pages) for pages in found])
    assert "reference/names/blockyard.KVCache" in {index["docnames"][page] for page in both}


PAGES = ("index", "engines/vllm", "reference/store-urls", "reference/errors", "benchmarks/manager", "changelog")
BROKEN_WORDS = """
[...document.querySelectorAll('td, th')].flatMap(cell => {
  const walk = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT), broken = [];
  while (walk.nextNode()) {
    for (const word of walk.currentNode.data.matchAll(/\\w+/g)) {
      const range = document.createRange();
      range.setStart(walk.currentNode, word.index);
      range.setEnd(walk.currentNode, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1) broken.push(word[0]);
    }
  }
  return broken;
})
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
@pytest.mark.parametrize("width", [400, 1280])
def test_a_window_shows_the_contents_and_breaks_no_word_in_a_table(site: Path, tmp_path: Path, width: int):
    with browser_page(site / "index.html", tmp_path / "profile", width=width, ready=LOADED) as browser:
        for name in (*PAGES, "reference/names/blockyard.BlockManager", "genindex"):
            browser.open(site / f"{name}.html", dark=False, width=width, ready=LOADED)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width, name
            assert browser.evaluate(BROKEN_WORDS) == [], name

            contents = browser.evaluate(
                "(tree => tree && [tree.getBoundingClientRect().left, tree.getBoundingClientRect().right])"
                "(document.querySelector('.toc-tree'))"
            )
            if width == 1280 and contents:
                assert 0 < contents[0] < contents[1] <= width, name


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
