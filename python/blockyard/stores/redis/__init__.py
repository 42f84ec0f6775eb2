"""The Redis store: `store` has its URLs and options, `servers` one server or a cluster, `resp` the exchange with one."""

from blockyard.stores.redis.store import RedisStore, open_redis, read_url

__all__ = ["RedisStore", "open_redis", "read_url"]
