"""Audits finished wheels before they are published, and prints the sizes of their parts.

    python buildsystem/audit_wheel.py dist/*.whl

It needs abi3audit and auditwheel next to its Python. maturin and the build backend check only the parts that they
build; this audits the whole wheel. A wheel for free-threaded Python has no stable ABI to check.
"""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

PARTS = ("blockyard/_ops.so", "blockyard/_ops.json", "blockyard/_core.pyi", "blockyard/py.typed")
FROM_TORCH = {"libtorch.so"}
"""Libraries that the op library finds in the process, because torch is imported first."""


def audit(wheel: Path) -> None:
    """Check one wheel.

    Args:
        wheel: path of the wheel.

    Raises:
        SystemExit: a part is missing, an abi3 wheel uses Python outside the stable ABI, or the wheel needs a newer
            system than its tag says.
    """
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: (info.compress_size, info.file_size) for info in archive.infolist()}
    is_stable = "-abi3-" in wheel.name
    core = f"blockyard/_core.{'abi3' if is_stable else 'cpython-*'}.so"
    core = next(iter(fnmatch.filter(sizes, core)), core)
    missing = [part for part in (core, *PARTS) if part not in sizes]
    if not any("/sboms/" in name for name in sizes):
        missing.append("an SBOM")
    if missing:
        raise SystemExit(f"{wheel.name} lacks {', '.join(missing)}")
    if is_stable:
        _run("abi3audit", "--strict", str(wheel))
    found: dict[str, Any] = json.loads(_run("auditwheel", "show", "--json", str(wheel)))
    if strangers := set(found["external_libs"]) - FROM_TORCH:
        raise SystemExit(f"{wheel.name} needs {', '.join(sorted(strangers))}, which no manylinux system promises")
    if "manylinux" in wheel.name and _glibc(found["sym_tag"]) > _glibc(wheel.name):
        raise SystemExit(f"{wheel.name} promises older systems than {found['sym_tag']}, which it needs")
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes, needs {found['sym_tag']}")
    for part in (core, PARTS[0]):
        print("  {}: {:,} bytes packed, {:,} unpacked".format(part, *sizes[part]))


def _run(tool: str, *arguments: str) -> str:
    command = [str(Path(sys.executable).parent / tool), *arguments]
    finished = subprocess.run(command, check=False, capture_output=True, text=True)
    if finished.returncode:
        raise SystemExit(f"{tool} {' '.join(arguments)}:\n{finished.stdout}{finished.stderr}")
    return finished.stdout


def _glibc(tag: str) -> list[int]:
    """Return the glibc version of a manylinux tag, such as [2, 28]; empty for other tags."""
    return [int(part) for numbers in re.findall(r"manylinux_(\d+)_(\d+)", tag)[:1] for part in numbers]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        audit(Path(name))
