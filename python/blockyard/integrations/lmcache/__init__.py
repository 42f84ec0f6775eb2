"""Blockyard in LMCache 0.5.6, unpatched: loaded by name as an L2 adapter of the type `native_plugin`.

    {"type": "native_plugin", "module_path": "blockyard.integrations.lmcache", "class_name": "BlockyardConnector",
     "adapter_params": {"root_dir": "/var/cache/blockyard", "size": "500GiB", "kv_dtype": "bfloat16"}}

`docs/engines/lmcache.md` describes the options. Importing this raises `ImportError` if LMCache is missing.
"""

from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from blockyard.integrations.compat import engine_log, log_through, warn_version

SUPPORTED = "0.5.6"

try:
    lmcache_version = version("lmcache")
except PackageNotFoundError as error:
    raise ImportError(f"blockyard.integrations.lmcache needs LMCache {SUPPORTED}: {error}") from error

from blockyard.integrations.lmcache.connector import BlockyardConnector  # noqa: E402 (checked above)

__all__ = ["BlockyardConnector"]

with suppress(ImportError):  # LMCache sets each logger up by itself
    import_module("lmcache.logging").init_logger(engine_log("LMCache").name)
log_through("LMCache")
warn_version("LMCache", lmcache_version, SUPPORTED)
