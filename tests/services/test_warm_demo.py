"""The demo over a prefix store: killed in the middle and started again, it finds its blocks and the same tokens."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import obstore
import pytest
import redis
from obstore.store import S3Store
from servers import serving, serving_objects

from blockyard._core import read_slab
from blockyard.errors import StoreError
from blockyard.tools.demo.run import DemoOptions, make_report

OPTIONS = {"requests": 3, "prompt_tokens": (48, 96), "output_tokens": (8, 16), "device": "cpu", "seed": 3}
CHILD = """
import sys
from blockyard.tools.demo.run import DemoOptions, make_report
make_report(DemoOptions(prefix_store=sys.argv[1], **eval(sys.argv[2])))
"""
ENOUGH = 8


@pytest.fixture
def file_store(tmp_path: Path) -> tuple[str, Callable[[], int]]:
    def count() -> int:
        try:
            return len(read_slab(tmp_path / "kv").slots)
        except (StoreError, OSError):
            return 0  # the process has not made it yet

    return f"file://{tmp_path}/kv", count


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[tuple[str, Callable[[], int]]]:
    with serving("valkey-server", tmp_path) as server, redis.Redis(port=server.port) as client:
        yield f"redis://127.0.0.1:{server.port}?size=64MiB", lambda: int(client.dbsize())


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Callable[[], int]]]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cr3t")
    with serving_objects(tmp_path, "s3cr3t") as server:
        where = {"endpoint": f"http://127.0.0.1:{server.port}", "region": "us-east-1"}
        client = S3Store("bucket", **where, client_options={"allow_http": True})  # type: ignore[arg-type]
        yield f"{server.url('bucket/demo')}size=64MiB", lambda: sum(map(len, obstore.list(client, "demo/")))


SERVERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("valkey", "bucket")]


@pytest.mark.parametrize("store", ["file_store", *SERVERS])
def test_a_killed_run_leaves_its_blocks_to_the_next_and_the_tokens_are_the_same(
    store: str, request: pytest.FixtureRequest
):
    url, count = request.getfixturevalue(store)
    child = subprocess.Popen([sys.executable, "-c", CHILD, url, repr(OPTIONS)])
    try:
        until = time.monotonic() + 300
        while count() < ENOUGH:
            assert child.poll() is None, "the run ended before it was killed"
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
    report = make_report(DemoOptions(prefix_store=url, **OPTIONS))  # type: ignore[arg-type]
    assert report.identical_requests == report.requests == OPTIONS["requests"]
    assert report.prefix_store is not None
    assert report.prefix_store["hit_blocks"] > 0
