"""Points the relative links of README.md to GitHub: PyPI shows the README without the other files.

python buildsystem/absolute_links.py    target: GITHUB_REPOSITORY and GITHUB_REF_NAME; changes README.md in place
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

LINK: Final = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:)([^)]+)\)")


def absolute_links(text: str, repository: str, ref: str) -> str:
    """Return the document with its relative links replaced by links to a repository at a ref."""

    def absolute(link: re.Match[str]) -> str:
        image, label, path = link.groups()
        page = f"https://github.com/{repository}/blob/{ref}"
        base = f"https://raw.githubusercontent.com/{repository}/{ref}" if image else page
        return f"{image}[{label}]({base}/{path})"

    return LINK.sub(absolute, text)


if __name__ == "__main__":
    readme = Path(__file__).resolve().parent.parent / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(
        absolute_links(text, os.environ["GITHUB_REPOSITORY"], os.environ["GITHUB_REF_NAME"]), encoding="utf-8"
    )
