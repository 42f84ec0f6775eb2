"""Builds the documentation site: `make docs`, then open `docs/_build/html/index.html`."""

import os
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "buildsystem"))
import public_names  # noqa: E402 (lies in the folder above)

project = "Blockyard"
author = "the Blockyard contributors"
release = re.findall(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(encoding="utf-8"), re.MULTILINE)[0]

extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
extensions += ["myst_parser", "sphinx_copybutton", "sphinx_llms_txt"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
nitpicky = True
suppress_warnings = ["ref.python"]
nitpick_ignore_regex = [("py:.*", ".*")]  # types in docstrings are words, not links
default_role = "code"  # docstrings are Markdown: `name`
autodoc_typehints = "none"
autodoc_class_signature = "mixed"
napoleon_custom_sections = [("Source", "notes")]
napoleon_use_rtype = False
napoleon_use_ivar = True

html_show_copyright = False
html_theme = "furo"
html_title = f"Blockyard {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    # In a fork's own CI the links to sources lead to the fork.
    "source_repository": f"https://github.com/{os.environ.get('GITHUB_REPOSITORY', 'blockyard/blockyard')}/",
    "source_branch": "main",
    "source_directory": "docs/",
}

llms_txt_exclude = ["reference/names/*"]  # the sources only name the docstrings, which are in these files:
llms_txt_code_files = [f"+:../python/blockyard/{name}" for name in ("_core.pyi", "cache.py", "scheduler/scheduler.py")]
# Relative to llms.txt: the site may lie anywhere.
llms_txt_uri_template = "_sources/{docname}{suffix}{sourcelink_suffix}"
llms_txt_summary = (
    "Blockyard is a Python library, with a Rust core, that tracks every block of a paged KV cache for LLM engines "
    "and moves blocks between device, host and external storage."
)


class SearchNames(SearchEnglish):
    """Finds `prefetch_timeout` by "prefetch timeout", too."""

    def split(self, input: str) -> list[str]:  # noqa: A002 (Sphinx's name)
        """Return the words of a text, and the words of its names."""
        words = super().split(input)
        return [*words, *(part for word in words if "_" in word for part in word.split("_"))]


def pages() -> Iterator[tuple[str, str]]:
    """Yield file and text of each public name's page: what `help()` shows, with an anchor for each member."""
    for module, names in public_names.listed().items():
        for name in names:
            target, path = getattr(import_module(module), name), f"{module}.{name}"
            title = f"``{name}``"
            directive = f".. autofunction:: {path}\n"
            if isinstance(target, type):
                members = ", ".join(member for member, _ in public_names.members_of(target))
                directive = f".. autoclass:: {path}\n" + (f"   :members: {members}\n" if members else "")
                directive += "   :member-order: bysource\n"
            # In a table of contents the names would be in the navigation of every page.
            yield f"{path}.rst", f":orphan:\n\n{title}\n{'=' * len(title)}\n\n``{module}``\n\n{directive}"


def write_pages(_: Sphinx) -> None:
    """Write the reference pages that have changed, and remove those of names that are gone."""
    folder = ROOT / "docs" / "reference" / "names"
    folder.mkdir(exist_ok=True)
    texts = dict(pages())
    for gone in {path.name for path in folder.iterdir()} - texts.keys():
        (folder / gone).unlink()
    for path, text in texts.items():
        if not (folder / path).exists() or (folder / path).read_text(encoding="utf-8") != text:
            (folder / path).write_text(text, encoding="utf-8")


def collapse_contents(_: Sphinx, _page: str, _template: str, context: dict[str, Any], _tree: object) -> None:
    """Show decisions and benchmarks in the navigation of their own pages only; it is on each page, and takes long."""
    if contents := context.get("toctree"):
        context["toctree"] = lambda **options: contents(**options | {"collapse": True})


def setup(app: Sphinx) -> None:
    """Register the search, the reference pages and the navigation."""
    app.add_search_language(SearchNames)
    app.connect("config-inited", lambda app, _: write_pages(app))
    app.connect("html-page-context", collapse_contents, priority=400)  # before the theme's
