"""The engines' factories take the configurations of the pages of SGLang and LMCache as they stand."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import engine_drivers
import numpy as np
import pytest
from servers import serving

DOCS = Path(__file__).resolve().parents[2] / "docs" / "engines"
ENGINES = {"sglang": engine_drivers.SGLang, "lmcache": engine_drivers.LMCache}


def configurations(engine: str) -> list[dict[str, Any]]:
    text = (DOCS / f"{engine}.md").read_text(encoding="utf-8")
    return [json.loads(block) for block in re.findall(r"^```json\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]


@pytest.mark.parametrize("kind", ["root_dir", "url"])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_configurations_of_the_guide_work(engine: str, kind: str, tmp_path: Path):
    shown = next(found for found in configurations(engine) if kind in found.get("adapter_params", found))
    assert shown["module_path"] == f"blockyard.integrations.{engine}"
    options = shown.get("adapter_params", shown)
    with contextlib.ExitStack() as stack:
        if kind == "root_dir":
            options |= {"root_dir": str(tmp_path / "cache"), "size": "4MiB"}
        else:
            server = stack.enter_context(serving("valkey-server", tmp_path))
            options["url"] = options["url"].replace("6379", str(server.port))
        stack.enter_context(engine_drivers.sglang())
        made = stack.enter_context(contextlib.closing(ENGINES[engine](options)))
        page = np.full((1, made.page_bytes), 3, np.uint8)
        assert made.store(["a"], page)
        assert made.load(["a"]) == [page.tobytes()]
        assert made.leading(["a"]) == 1
