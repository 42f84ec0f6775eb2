"""The rights that the documentation gives to a Redis user are all that a store needs, and no more than its own keys."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from servers import admit, denied, serving, serving_cluster

from blockyard.errors import StoreError
from blockyard.stores import ExternalStore, Owners, open_store
from blockyard.testing.store_suite import PrefixStoreSuite, StoreSuite


class Suites:
    """Both suites over one URL; prefix stores get a namespace for each test."""

    def __init__(self, url: str) -> None:
        class Swap(StoreSuite):
            def open_store(self) -> ExternalStore:
                return open_store(url, bytes_per_block=self.bytes_per_block, num_slots=self.num_slots)

        class Prefix(PrefixStoreSuite):
            num_slots = 64 * 64  # a cluster has 64 segments
            evicts = "cluster" not in url
            number = 0

            def open_store(self, namespace: bytes = bytes(32)) -> ExternalStore:
                options: Any = {"bytes_per_block": self.bytes_per_block, "num_slots": self.num_slots}
                space = bytes([self.number]) + namespace[1:]
                return open_store(url, use="prefix", namespace=space, **options)

        self.swap, self.prefix = Swap(), Prefix()

    def run(self) -> None:
        for suite in (self.swap, self.prefix):
            for name in dir(suite):
                if name.startswith("test_") and "a_full_store" not in name:
                    self.prefix.number += 1
                    getattr(suite, name)()


def fill(url: str, *, has_quotas: bool) -> None:
    """Put more blocks than fit, from several owners, and quotas where there are any."""
    with open_store(url, bytes_per_block=512, num_slots=64, namespace=bytes([255]) * 32, use="prefix") as store:
        if has_quotas:
            store.set_quota(bytes(32), 40)
            assert store.quota(bytes(32)) == (0, 40)
        for part in range(6):
            keys = np.random.default_rng(part).integers(0, 256, (32, 32), dtype=np.uint8)
            owners = Owners(np.zeros((32, 32), np.uint8), np.zeros((32, 32), np.uint8))
            store.wait(store.submit_put(keys, np.ones((32, 512), np.uint8), owners), 60)
            store.wait(store.submit_get(keys), 60)
        store.forget("step-1")
        assert store.stats().errors == 0, store.stats().last_error


def test_a_server_refuses_a_user_with_these_rights_nothing(tmp_path: Path):
    with serving("valkey-server", tmp_path) as node:
        admit(node)
        url = f"redis://kv-tier:PASSWORD@127.0.0.1:{node.port}?timeout_base=60"
        fill(url, has_quotas=True)
        Suites(url).run()
        assert not denied(node)
        with redis.Redis(port=node.port, username="kv-tier", password="PASSWORD") as other:
            for command in (("GET", "others"), ("FLUSHALL",), ("KEYS", "*"), ("CONFIG", "GET", "*"), ("ACL", "LIST")):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    other.execute_command(*command)


def test_a_cluster_refuses_a_user_with_these_rights_nothing(tmp_path: Path):
    with ExitStack() as stack:
        nodes = stack.enter_context(serving_cluster(tmp_path))
        for node in nodes:
            admit(node)
        url = f"redis+cluster://kv-tier:PASSWORD@127.0.0.1:{nodes[0].port}?timeout_base=60"
        fill(url, has_quotas=False)
        Suites(url).run()
        assert [denied(node) for node in nodes] == [[], [], []]


def test_a_user_without_a_right_shows_no_password(tmp_path: Path):
    with serving("valkey-server", tmp_path) as node:
        admit(node)
        with redis.Redis(port=node.port) as client:
            url = f"redis://kv-tier:PASSWORD@127.0.0.1:{node.port}?timeout_base=60"
            store = open_store(url, bytes_per_block=512, num_slots=8, use="prefix")
            client.execute_command("ACL", "SETUSER", "kv-tier", "-eval", "-get")
        with pytest.raises(StoreError, match="the server refuses EVAL") as refused:
            open_store(url, bytes_per_block=512, num_slots=8, use="prefix")
        assert "PASSWORD" not in str(refused.value)
        with store:
            assert not store.wait(store.submit_put([bytes(32)], np.ones((1, 512), np.uint8)), 60).ok.any()
            with pytest.raises(StoreError) as caught:
                store.forget()
            assert "PASSWORD" not in f"{caught.value} {store.stats()} {store!r}"
