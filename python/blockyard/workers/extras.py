"""Names the extra of pyproject.toml that installs a missing module."""

from __future__ import annotations

from typing import Final

__all__ = ["missing"]

_EXTRAS: Final = {
    "cuda": "elastic",
    "greenlet": "sim",
    "hypothesis": "testing",
    "lupa": "sim",
    "mooncake": "mooncake",
    "msgspec": "events",
    "obstore": "s3",
    "opentelemetry": "otel",
    "plotly": "html",
    "prometheus_client": "metrics",
    "rich": "cli",
    "shtab": "cli",
    "torch": "torch",
    "transformers": "demo",
    "zmq": "events",
}
"""Modules that Blockyard imports only where needed, with the extra of pyproject.toml that installs each."""


def missing(what: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Name the extra that installs a missing module; return the error itself if none does.

    Args:
        what: what needs the module, in words that the user knows.
        error: error of the failed import.
    """
    module = (error.name or "").partition(".")[0]
    extra = _EXTRAS.get(module)
    if extra is None:
        return error
    return ModuleNotFoundError(f'{what} needs {module}: pip install "blockyard[{extra}]"', name=module)
