"""The copy engine, which moves blocks between device, host and staging rows, and its torch ops."""

from blockyard.workers.extras import missing

try:
    from blockyard.engine.elastic.cache import ElasticCache, Resized
    from blockyard.engine.engine import CacheEngine, Traffic
    from blockyard.engine.host_pool import HostPool
    from blockyard.engine.mapping import unequal_pairs
    from blockyard.engine.streams import Streams
    from blockyard.engine.transfers import Transfer
except ModuleNotFoundError as error:
    raise missing("blockyard.engine", error) from None

__all__ = [
    "CacheEngine",
    "ElasticCache",
    "HostPool",
    "Resized",
    "Streams",
    "Traffic",
    "Transfer",
    "unequal_pairs",
]
