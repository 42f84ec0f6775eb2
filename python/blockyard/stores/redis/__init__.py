"""The Redis store: `store` has its URLs and options, `servers` one server or a cluster, `resp` one exchange."""

from blockyard.stores.redis.store import RedisStore, open_redis, read_url

__all__ = ["RedisStore", "open_redis", "read_url"]
