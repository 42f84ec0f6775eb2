"""Checks that archives contain what was built, and that the op library matches the wheel's platform tag.

maturin silently leaves out missing files, and audits only `_core`.
"""

import re
import subprocess
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from blockyard_build.oplibrary import LIBRARY, MANIFEST
from blockyard_build.settings import BuildError
from blockyard_build.stub import STUB


def check_wheel(wheel: Path, root: Path, *, with_library: bool) -> None:
    """Check that a wheel contains stub and manifest, and the op library iff it was built, and that its tag fits.

    Args:
        wheel: path of the wheel.
        root: root of the source tree with the packed op library.
        with_library: whether the op library was built.

    Raises:
        BuildError: the wheel does not match the build.
    """
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    library, manifest, stub = (str(path.relative_to("python")) for path in (LIBRARY, MANIFEST, STUB))
    if stub not in inside:
        raise BuildError(f"{wheel.name} lacks {stub}: see include in [tool.maturin]")
    if manifest not in inside or (library in inside) != with_library:
        raise BuildError(f"{wheel.name}: {library} is packed: {library in inside}, was built: {with_library}")
    promised = re.search(r"manylinux_(\d+)_(\d+)", wheel.name)
    if with_library and promised:
        needed = newest_glibc(root / LIBRARY)
        if needed > (int(promised[1]), int(promised[2])):
            raise BuildError(f"{wheel.name}: {library} needs glibc {needed[0]}.{needed[1]}, newer than the tag says")


def check_sdist(sdist: Path, needed: Iterable[Path]) -> None:
    """Check that a source archive contains all given files.

    Args:
        sdist: path of the archive.
        needed: paths relative to the source tree.

    Raises:
        BuildError: files are missing.
    """
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    missing = sorted(str(path) for path in needed if str(path) not in inside)
    if missing:
        raise BuildError(f"{sdist.name} lacks {', '.join(missing)}: see include in [tool.maturin]")


def newest_glibc(library: Path) -> tuple[int, int]:
    """Return the newest glibc whose symbols a shared library needs, as (major, minor)."""
    command = ["objdump", "--dynamic-syms", str(library)]
    symbols = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    versions = re.findall(r"GLIBC_(\d+)\.(\d+)", symbols)
    return max(((int(major), int(minor)) for major, minor in versions), default=(0, 0))
