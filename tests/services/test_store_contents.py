"""Looking into stores on real servers: what is listed, that listing changes nothing, and what removing leaves right."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from servers import SERVERS, Server, admit, denied, serving, serving_cluster, serving_objects

from blockyard import KVLayout
from blockyard.stores import ExternalStore, Owners, open_store, store_namespace
from blockyard.tools.store import Selection, StoreReport, open_contents, survey

LAYOUT = KVLayout("kv_first", num_layers=2, block_size=16, num_kv_heads=2, head_size=16, dtype="float16")
TINY = store_namespace(model="tiny", revision="1", layout=LAYOUT)
BIG = store_namespace(model="big", revision="1", layout=LAYOUT)
TENANT = bytes([7]) * 32
KEYS = [bytes([number]) * 32 for number in range(1, 9)]


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    with serving(request.param, tmp_path) as found:
        yield found


def opened(url: str, namespace: bytes = TINY, use: Any = "prefix", num_slots: int | None = None) -> ExternalStore:
    size = LAYOUT.bytes_per_block
    return open_store(url, bytes_per_block=size, namespace=namespace, use=use, num_slots=num_slots)


def put(store: ExternalStore, keys: list[bytes]) -> None:
    owners = Owners(np.frombuffer(TENANT * len(keys), np.uint8).reshape(-1, 32), np.zeros((len(keys), 32), np.uint8))
    rows = np.ones((len(keys), store.bytes_per_block), np.uint8)
    assert store.wait(store.submit_put(keys, rows, owners if store.keeps_quotas else None)).ok.all()


def chosen(url: str, *namespaces: str, **options: Any) -> StoreReport:
    return survey(open_contents(url), Selection(namespaces, **options), keep_places=True)


def by_model(report: StoreReport) -> dict[str, int]:
    return {group.parts.get("model", group.namespace[:4]): group.blocks for group in report.groups}


def test_a_server_lists_namespaces_tenants_and_swap_space(server: Server):
    url = f"redis://127.0.0.1:{server.port}?size=1MiB"
    with opened(url) as store, opened(url, BIG) as other, opened(url, use="swap", num_slots=4) as swap:
        store.set_quota(TENANT, 9)
        put(store, KEYS)
        put(other, KEYS[:3])
        swap.wait(swap.submit_write(np.arange(2), np.ones((2, swap.bytes_per_block), np.uint8)))
        report = chosen(url)
        assert by_model(report) == {"tiny": 8, "big": 3, "swap": 2}
        tenants = {group.parts.get("model"): group.tenant for group in report.groups}
        assert tenants == {"tiny": TENANT.hex()[:16], "big": "", None: ""}, "the digits that a file has for it, too"
        assert chosen(url, tenant=tenants["tiny"]).blocks == 8
        assert report.bytes > 13 * LAYOUT.bytes_per_block
        assert report.facts["used_memory"] > report.bytes
        assert chosen(url, "model=tiny", "revision=1").blocks == 8


def test_the_documented_script_removes_every_key_and_no_other(server: Server):
    url = f"redis://127.0.0.1:{server.port}?size=1MiB"
    text = (Path(__file__).parents[2] / "docs/operate/formats.md").read_text()
    (script,) = re.findall(r'^redis-cli EVAL "(.*)" 0$', text, re.MULTILINE)
    with opened(url) as store, redis.Redis(port=server.port) as client:
        store.set_quota(TENANT, 9)
        put(store, KEYS)
        client.set("theirs", 1)
        client.set("blockyardish", 1)
        count = client.dbsize()
        assert client.eval(script, 0) == count - 2
        assert sorted(client.scan_iter()) == [b"blockyardish", b"theirs"]


def test_the_age_is_the_time_since_the_last_use_and_looking_is_no_use(server: Server):
    url = f"redis://127.0.0.1:{server.port}?size=1MiB"
    with opened(url) as store, redis.Redis(port=server.port) as client:
        put(store, KEYS)
        names = [key for key in client.scan_iter("blockyard:*") if len(key) == len(b"blockyard::") + 16 + 32]
        for key in names:
            client.restore(key, 0, client.dump(key), replace=True, idletime=7200)
        for _ in range(2):
            assert chosen(url, older_than=7200).blocks == len(KEYS)
        assert store.wait(store.submit_get(KEYS[:3])).ok.all()
        assert chosen(url, older_than=7200).blocks == len(KEYS) - 3
        client.config_set("maxmemory-policy", "allkeys-lfu")
        report = chosen(url)
        assert (report.blocks, report.groups[0].oldest_seconds) == (len(KEYS), None)
        assert chosen(url, older_than=1).blocks == 0


def test_removing_keeps_the_lists_the_quota_and_the_record_of_a_store_in_use(server: Server):
    url = f"redis://127.0.0.1:{server.port}?size=1MiB"
    with opened(url) as store, redis.Redis(port=server.port) as client:
        store.set_quota(TENANT, 8)
        put(store, KEYS)
        assert store.quota(TENANT) == (8, 8)
        report = chosen(url)
        assert open_contents(url).remove(report.places[:5]) == 5
        assert store.quota(TENANT) == (3, 8)
        (order,) = client.scan_iter("blockyard:*:order")
        assert client.zcard(order) == 3 == chosen(url).blocks
        assert open_contents(url).remove(report.places) == 8  # five are gone already
        assert store.quota(TENANT) == (0, 8)
        put(store, KEYS[:2])
        assert store.wait(store.submit_get(KEYS[:2])).ok.all()
    with opened(url) as store:
        assert store.wait(store.submit_get(KEYS[:3])).reasons == ("", "", "absent")


def test_a_namespace_has_its_names_again_after_the_server_restarted_empty(server: Server):
    url = f"redis://127.0.0.1:{server.port}?size=1MiB"
    with opened(url) as store:
        put(store, KEYS)
        with server.killed():
            assert not store.wait(store.submit_get(KEYS)).ok.any()
        until = time.monotonic() + 60
        while not store.wait(store.submit_put(KEYS, np.ones((len(KEYS), store.bytes_per_block), np.uint8))).ok.all():
            assert time.monotonic() < until
            time.sleep(0.01)
        assert chosen(url, "model=tiny").blocks == len(KEYS)


def test_a_cluster_is_listed_node_by_node(tmp_path: Path):
    with serving_cluster(tmp_path) as nodes:
        url = f"redis+cluster://127.0.0.1:{nodes[0].port}?size=10MiB"
        for node in nodes:
            admit(node)
        rights = url.replace("127", "kv-tier:PASSWORD@127")
        with opened(url) as store, opened(url, BIG) as other, opened(url, use="swap", num_slots=9) as swap:
            put(store, KEYS)
            put(other, KEYS[:3])
            swap.wait(swap.submit_write(np.arange(9), np.ones((9, swap.bytes_per_block), np.uint8)))
            report = chosen(rights)
            assert by_model(report) == {"tiny": 8, "big": 3, "swap": 9}
            small = chosen(rights, "model=big")
            assert open_contents(rights).remove(small.places) == 3
            assert by_model(chosen(rights)) == {"tiny": 8, "swap": 9}
            assert store.wait(store.submit_get(KEYS)).ok.all()
            assert not any(map(denied, nodes))


def test_the_rights_of_a_store_are_enough(server: Server):
    admit(server)
    url = f"redis://kv-tier:PASSWORD@127.0.0.1:{server.port}?size=1MiB"
    with opened(url) as store:
        put(store, KEYS)
        report = chosen(url)
        assert by_model(report) == {"tiny": 8}
        assert open_contents(url).remove(report.places) == 8
        assert not denied(server)


def test_objects_are_listed_and_removed_in_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden/secret")
    with serving_objects(tmp_path, "hidden/secret") as server:
        url = f"{server.url('bucket/team')}&size=1MiB"
        with opened(url) as store, opened(url, BIG) as other:
            put(store, KEYS)
            put(other, KEYS[:3])
            assert by_model(chosen(url)) == {"tiny": 8, "big": 3}
            assert chosen(url, older_than=3600).blocks == 0
            assert open_contents(url).remove(chosen(url, "model=tiny").places) == 8
            assert by_model(chosen(url)) == {"big": 3}
            assert other.wait(other.submit_get(KEYS[:3])).ok.all()
            put(store, KEYS[:1])
        assert chosen(f"{server.url('bucket/other')}&size=1MiB").blocks == 0
