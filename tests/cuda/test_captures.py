"""The GPU tests' captures, over a stand-in for torch's graphs that warns of an empty one as torch does."""

import ast
import warnings
from pathlib import Path

import pytest
import torch
from captures import capturing

TESTS = Path(__file__).resolve().parents[1]


class Stream:
    """A stream that captures, or does not; it is its own context manager, as torch's is."""

    current: "Stream"

    def __init__(self, *_: object) -> None:
        self.nodes = 0

    def __enter__(self) -> None:
        self.before, Stream.current = Stream.current, self

    def __exit__(self, *_: object) -> None:
        Stream.current = self.before


class Graph:
    def capture_begin(self, *_: object, **__: object) -> None:
        self.stream = Stream.current

    def capture_end(self) -> None:
        if not self.stream.nodes:
            warnings.warn("The CUDA Graph is empty.", stacklevel=2)


@pytest.fixture
def usual(monkeypatch: pytest.MonkeyPatch) -> Stream:
    Stream.current = usual = Stream()
    zeros = torch.zeros

    def queue(*shape: int, **_: object) -> torch.Tensor:
        Stream.current.nodes += 1
        return zeros(*shape)

    monkeypatch.setattr(torch, "zeros", queue)
    for name, value in {
        "CUDAGraph": Graph,
        "Stream": Stream,
        "stream": lambda stream: stream,
        "current_stream": lambda: Stream.current,
        "set_stream": lambda stream: setattr(Stream, "current", stream),
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", None)
    return usual


@pytest.mark.skipif(torch.__version__ >= (2, 15), reason="torch 2.15 gives the stream back")
def test_torch_leaves_the_captures_stream_current_where_a_warning_is_an_error(usual: Stream):
    with pytest.raises(UserWarning, match="is empty"), torch.cuda.graph(Graph()):
        pass
    assert Stream.current is not usual


def test_a_capture_of_what_is_refused_ends_well(usual: Stream):
    with capturing(), pytest.raises(ValueError, match="refused"):
        raise ValueError("refused")
    assert Stream.current is usual


def test_a_capture_that_fails_gives_the_stream_back(usual: Stream, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Graph, "capture_end", lambda _: (_ for _ in ()).throw(RuntimeError("invalidated")))
    with pytest.raises(RuntimeError, match="invalidated"), capturing():
        pass
    assert Stream.current is usual


def test_all_gpu_tests_capture_this_way():
    for path in (TESTS / "gpu").glob("*.py"):
        names = {ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert "torch.cuda.graph" not in names, path.name
