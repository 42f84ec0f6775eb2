"""The user's build settings: `BLOCKYARD_CUDA` and `BLOCKYARD_CUDA_ARCHS`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

MODES = ("auto", "require", "off")
DEFAULT_ARCHS = "80,90,100,120"


class BuildError(RuntimeError):
    """The build failed; the message says what to do."""


@dataclass(frozen=True)
class Settings:
    """The build's settings.

    Attributes:
        mode: "auto" builds the op library if possible, "require" fails if that is impossible, "off" does not build it.
        archs: compute capabilities without the dot, ascending: machine code for each, PTX for the first.
    """

    mode: str
    archs: tuple[str, ...]

    def gencode(self) -> list[str]:
        """Return nvcc's architecture flags: PTX only for the lowest, which every later device can run."""
        flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in self.archs]
        lowest = self.archs[0]
        flags[0] = f"-gencode=arch=compute_{lowest},code=[sm_{lowest},compute_{lowest}]"
        return flags


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Read the settings from environment variables.

    Args:
        environ: `os.environ` or a stand-in.

    Returns:
        The settings, with defaults filled in.

    Raises:
        BuildError: a variable has an invalid value.
    """
    mode = environ.get("BLOCKYARD_CUDA", "") or "auto"
    if mode not in MODES:
        raise BuildError(f"BLOCKYARD_CUDA={mode!r} is not one of {', '.join(MODES)}")
    return Settings(mode, _parse_archs(environ.get("BLOCKYARD_CUDA_ARCHS", "") or DEFAULT_ARCHS))


def _parse_archs(text: str) -> tuple[str, ...]:
    archs = {arch.strip() for arch in text.split(",") if arch.strip()}
    for arch in archs:
        if not re.fullmatch(r"\d{2,3}[af]?", arch):
            raise BuildError(f"BLOCKYARD_CUDA_ARCHS={text!r}: {arch!r} is not an architecture such as 80, 90a or 120")
    if not archs:
        raise BuildError(f"BLOCKYARD_CUDA_ARCHS={text!r} names no architecture")
    return tuple(sorted(archs, key=lambda arch: (int(arch.rstrip("af")), arch)))
