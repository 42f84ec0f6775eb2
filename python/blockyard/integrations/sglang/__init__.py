"""Blockyard in SGLang 0.5.23, unpatched: loaded by name as the storage backend `dynamic` of its HiCache.

`blockyard.integrations.sglang.linker` has `BlockyardLinker`, for its unified cache without HiCache.

    {"backend_name": "blockyard", "module_path": "blockyard.integrations.sglang", "class_name": "BlockyardHiCache",
     "interface_v1": 1, "root_dir": "/var/cache/blockyard", "size": "500GiB"}

`docs/engines/sglang.md` describes the options. Importing this raises `ImportError` if SGLang is missing or has other
interfaces.
"""

from blockyard.integrations.compat import log_through, require_fit, warn_version

SUPPORTED = "0.5.23"

try:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
    from sglang.version import __version__ as sglang_version

    from blockyard.integrations.sglang.storage import BlockyardHiCache
except ImportError as error:
    raise ImportError(f"blockyard.integrations.sglang needs SGLang {SUPPORTED}: {error}") from error

__all__ = ["BlockyardHiCache"]

log_through("SGLang")
warn_version("SGLang", sglang_version, SUPPORTED)
require_fit(BlockyardHiCache, HiCacheStorage, f"SGLang {sglang_version} (Blockyard supports {SUPPORTED})")
