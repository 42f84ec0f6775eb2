"""Builds the documentation site: `make docs`, then open `docs/_build/html/index.html`."""

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

project = "Blockyard"
author = "the Blockyard contributors"
release = re.findall(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(encoding="utf-8"), re.MULTILINE)[0]

extensions = ["myst_parser", "sphinx_copybutton", "sphinx_llms_txt"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
nitpicky = True

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

# Relative to llms.txt: the site may lie anywhere.
llms_txt_uri_template = "_sources/{docname}{suffix}{sourcelink_suffix}"
llms_txt_summary = (
    "Blockyard is a Python library, with a Rust core, that tracks every block of a paged KV cache for LLM engines "
    "and moves blocks between device, host and external storage."
)
