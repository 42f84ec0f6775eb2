"""Two engines of vLLM over one store of several nodes, one of which is killed: tokens are those of vLLM alone."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from servers import Server, serving_cluster, serving_objects
from vllm_engine import PYTHON, SPEC, Engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="ENGINES_PYTHON does not name a Python with vLLM; make test-engines does"),
]

SECRET = "a-secret-of-the-tests"


class Storage:
    """A store of several nodes.

    Args:
        url: of the store.
        nodes: those that can be killed.
    """

    def __init__(self, url: str, nodes: list[Server]) -> None:
        self.url, self.nodes = f"{url}size=64MiB&timeout_base=20", nodes


@pytest.fixture(params=["cluster", "s3"])
def storage(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Storage]:
    place = tmp_path_factory.mktemp(request.param)  # short, for the path of a socket
    if request.param == "cluster":
        with serving_cluster(place) as nodes:
            yield Storage(f"redis+cluster://127.0.0.1:{nodes[0].port}?", nodes[1:])
        return
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tester")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with serving_objects(place, SECRET, more_volumes=1) as server:
        yield Storage(server.url("bucket"), server.volumes)


@pytest.fixture(scope="module")
def wanted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What vLLM says without us to each of three sets of prompts."""
    with closing(Engine(folder, tmp_path_factory.mktemp("alone") / "log")) as engine:
        return [engine.serve(prompts=number, clear="host")["tokens"] for number in range(3)]


def test_engines_share_prefixes_and_a_node_that_is_killed_costs_no_token_and_stalls_none(
    folder: Path, wanted: list[Any], storage: Storage, tmp_path: Path
):
    extra = {**SPEC, "weights_fixed": True, "prefetch_timeout_base": 30, "prefix_store": storage.url}
    makers = [Engine(folder, tmp_path / f"log-{number}", extra=extra) for number in range(2)]
    with closing(makers[0]) as one, closing(makers[1]) as other:

        def serve_both(number: int) -> list[Any]:
            for engine in (one, other):
                engine.ask(prompts=number, clear="host")
            return [engine.answer() for engine in (one, other)]

        # What one has computed the other loads, in both directions; every node holds some of it.
        idle = [node.bytes_sent for node in storage.nodes]
        for number, (first, second) in enumerate([(one, other), (other, one)]):
            computed = first.serve(prompts=number, clear="host")
            loaded = second.serve(prompts=number, clear="host")
            assert [computed["tokens"], loaded["tokens"]] == [wanted[number]] * 2
            assert computed["external"]["written"] > 0
            assert loaded["external"]["loaded"] > 0
            assert loaded["cached"] > computed["cached"]
        node = storage.nodes[0]
        assert all(now.bytes_sent > then + 30000 for now, then in zip(storage.nodes, idle, strict=True))

        # The node goes while both read from it.
        sent = node.bytes_sent
        one.ask(prompts=0, clear="host")
        other.ask(prompts=1, clear="host")
        while node.bytes_sent < sent + 60000 and not (one.has_answered() and other.has_answered()):
            time.sleep(0.005)
        node.process.kill()
        node.process.wait()
        under = [one.answer(), other.answer()]
        assert [found["tokens"] for found in under] == wanted[:2]
        after = [serve_both(number) for number in (0, 2, 1)]
        assert [[found["tokens"] for found in both] for both in after] == [[wanted[n]] * 2 for n in (0, 2, 1)]
        # Chunks of that node were asked for, and did not come.
        for early, late in zip(under, after[-1], strict=True):
            assert late["external"]["missed"] > early["external"]["missed"]
