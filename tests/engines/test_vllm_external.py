"""vLLM itself, on a CPU, with a store below its host memory: tokens are those of vLLM alone, whatever storage does."""

import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import S3Store
from servers import ObjectServer, Server, serving, serving_objects
from vllm_engine import CONNECTOR, PYTHON, SPEC, Engine, serve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="ENGINES_PYTHON does not name a Python with vLLM; make test-engines does"),
]

SECRET = "a-secret-of-the-tests"
BY_SOURCE = "vllm:prompt_tokens_cached_by_source"
ROOMY = {**SPEC, "host_bytes": "16MiB", "weights_fixed": True, "prefetch_timeout_base": 60}


either = pytest.mark.parametrize("more", [{}, {"connector": CONNECTOR}], ids=["spec", "connector"])


class FileStorage:
    def __init__(self, root: Path) -> None:
        self.root, self.url = root, f"file://{root}?size=64MiB"

    def damage(self) -> None:
        """Flip a byte in every second chunk."""
        slab = self.root / "blockyard-prefix.slab"
        content = bytearray(slab.read_bytes())
        for place in range(20000, len(content), 2 * 36864):
            content[place] ^= 0xFF
        slab.write_bytes(content)


class ValkeyStorage:
    def __init__(self, server: Server) -> None:
        self.server, self.url = server, f"redis://127.0.0.1:{server.port}?size=64MiB&timeout_base=20"

    def damage(self) -> None:
        """Flip a byte in every second chunk."""
        from redis import Redis

        client = Redis(port=self.server.port)
        names = sorted(name for name in client.scan_iter(_type="string") if client.strlen(name) > 20000)
        assert names
        for name in names[::2]:
            byte = client.getrange(name, 20000, 20000)[0]
            client.setrange(name, 20000, bytes([byte ^ 0xFF]))


class ObjectStorage:
    def __init__(self, server: ObjectServer) -> None:
        self.url = f"{server.url('bucket')}size=64MiB&timeout_base=20"
        client: Any = {"client_options": {"allow_http": True}}
        self.client = S3Store("bucket", endpoint=f"http://127.0.0.1:{server.port}", region="us-east-1", **client)

    def damage(self) -> None:
        """Flip a byte in every second chunk."""
        listed = [meta for page in obstore.list(self.client) for meta in page if meta["size"] > 20000]
        assert listed
        for meta in sorted(listed, key=lambda meta: meta["path"])[::2]:
            content = bytearray(obstore.get(self.client, meta["path"]).bytes())
            content[20000] ^= 0xFF
            obstore.put(self.client, meta["path"], bytes(content))


@pytest.fixture(params=["file", "valkey", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if request.param == "file":
        yield FileStorage(tmp_path)
        return
    if request.param == "s3":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        with serving_objects(tmp_path, SECRET) as server:
            yield ObjectStorage(server)
        return
    with serving("valkey-server", tmp_path) as server:
        yield ValkeyStorage(server)


@either
def test_tokens_are_the_same_cold_warm_after_a_restart_and_over_damage(
    folder: Path, alone: Any, storage: Any, more: Any
):
    extra = {**ROOMY, "prefix_store": storage.url}
    cold = serve(folder, **more, extra=extra, rounds=1)
    assert cold["tokens"] == alone["tokens"][:1]
    assert cold["external"][-1]["written"] > 0
    warm = serve(folder, **more, extra=extra, rounds=1)
    assert warm["tokens"] == alone["tokens"][:1]
    assert warm["external"][-1]["loaded"] > 0
    assert warm["cached"] > cold["cached"]
    source = "disk" if isinstance(storage, FileStorage) else "external_unspecified"
    labelled = {name: warm["counters"][f"{BY_SOURCE} {name}"] for name in ("disk", "external_unspecified")}
    assert labelled == {"disk": 0, "external_unspecified": 0} | {source: labelled[source]}
    assert labelled[source] > cold["counters"][f"{BY_SOURCE} {source}"] == 0
    storage.damage()
    damaged = serve(folder, **more, extra=extra, rounds=1)
    assert damaged["tokens"] == alone["tokens"][:1]
    assert damaged["external"][-1]["missed"] > 0
    assert damaged["external"][-1]["loaded"] < warm["external"][-1]["loaded"]


@either
def test_a_prompt_is_found_in_each_tier_and_right_after_a_reset_in_the_store(folder: Path, tmp_path: Path, more: Any):
    asked = {"requests": 1, "length": 320, "tokens": 8}
    extra = {**ROOMY, "prefix_store": FileStorage(tmp_path / "store").url}
    with closing(Engine(folder, tmp_path / "log", **more, extra=extra, processes=True)) as engine:
        cold = engine.serve(**asked)
        served = [engine.serve(**asked, clear=clear) for clear in ("device", "host", "host", "")]
    assert [one["tokens"] for one in served] == [cold["tokens"]] * 4
    assert cold["external"]["written"] == 10
    # vLLM computes at least the last token, so it never takes a prompt's last block from the device.
    on_device, on_host, *in_store = [one["found"] for one in served]
    assert cold["found"] == {"device": 0, "host": 0, "store": 0}
    assert on_device == {"device": 288, "host": 32, "store": 0}
    assert on_host == {"device": 0, "host": 320, "store": 0}
    assert in_store == [{"device": 0, "host": 0, "store": 320}] * 2


@either
def test_a_store_that_loses_refuses_or_hangs_costs_no_token_and_no_engine(
    folder: Path, alone: Any, storage: Any, more: Any
):
    faults = ["", "", "lose", "refuse", "hang", ""]
    found = serve(folder, **more, extra={**ROOMY, "prefix_store": storage.url}, faults=faults)
    assert found["tokens"] == [alone["tokens"][0]] * len(faults)
    loaded = [count["loaded"] for count in found["external"]]
    after = [late - early for early, late in pairwise(loaded)]
    # Warm, lost, refused, hanging, well again.
    assert [bool(count) for count in after] == [True, False, False, False, True], json.dumps(found["external"])


def test_another_theta_finds_nothing_and_a_copy_of_the_model_what_the_first_has_stored(
    folder: Path, alone: Any, tmp_path: Path
):
    extra = {**ROOMY, "prefix_store": FileStorage(tmp_path / "store").url}
    assert serve(folder, extra=extra, rounds=1)["external"][-1]["written"] > 0
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    other = serve(folder, extra=extra, rounds=1, engine={"hf_overrides": theta})
    assert other["external"][-1]["loaded"] == 0
    copied = serve(Path(shutil.copytree(folder, tmp_path / "copy")), extra=extra, rounds=1)
    assert copied["external"][-1]["loaded"] > 0
    assert copied["tokens"] == alone["tokens"][:1]


def test_engines_share_a_store_that_is_killed_under_them(folder: Path, alone: Any, tmp_path: Path):
    from redis import Redis

    rounds = [""] * 4
    with serving("valkey-server", tmp_path) as server, ThreadPoolExecutor(2) as threads:
        storage = ValkeyStorage(server)
        client = Redis(port=storage.server.port)
        extra = {}
        for user in ("first", "second", "third"):  # so that the server tells who is connected
            client.acl_setuser(user, enabled=True, nopass=True, categories=["+@all"], keys=["*"])
            url = f"redis://{user}:any@127.0.0.1:{server.port}?size=64MiB"
            extra[user] = {**ROOMY, "prefix_store": url}
        first = serve(folder, extra=extra.pop("first"), rounds=1)
        assert first["external"][-1]["written"] > 0
        others = [threads.submit(serve, folder, extra=one, faults=rounds) for one in extra.values()]
        hits = client.info()["keyspace_hits"]
        while not all(other.done() for other in others):
            users = {connected["user"] for connected in client.client_list()}
            if client.info()["keyspace_hits"] >= hits + 10 and users >= set(extra):
                break
            time.sleep(0.01)
        server.process.kill()
        found = [other.result() for other in others]
    assert [one["tokens"] for one in found] == [[alone["tokens"][0]] * len(rounds)] * 2
    # What the first has computed the others have loaded.
    assert sum(one["external"][-1]["loaded"] for one in found) > 0


@either
def test_a_copy_to_the_host_that_is_left_out_shows_in_the_tokens(folder: Path, alone: Any, tmp_path: Path, more: Any):
    extra = {**ROOMY, "prefix_store": FileStorage(tmp_path).url}
    serve(folder, **more, extra=extra, rounds=1)
    assert serve(folder, **more, extra=extra, rounds=1, sabotage="staging")["tokens"] != alone["tokens"][:1]
