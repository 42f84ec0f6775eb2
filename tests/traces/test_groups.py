"""Recordings say the model's cache groups: what is written is read, and malformed groups are named."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from blockyard import BlockManager, CacheGroup, Request, Scheduler
from blockyard.errors import InvalidArgumentError, TraceError
from blockyard.traces import TraceRecorder, read_groups, read_trace

GROUPS = (
    CacheGroup.full_attention().with_blocks(bytes=4096),
    CacheGroup.sliding_window(128).with_blocks(tokens=4, bytes=512),
    CacheGroup.chunked_attention(64).with_blocks(bytes=4096),
    CacheGroup.recurrent().with_blocks(bytes=65536),
    CacheGroup.drafter(),
    CacheGroup.windowed_drafter(128),
    CacheGroup.cross_attention(),
)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_groups_are_read_as_written_in_the_first_line_alone(tmp_path: Path, name: str):
    with TraceRecorder(tmp_path / name, block_size=8, groups=GROUPS) as recorder:
        for request in range(3):
            recorder.add(request, [request], 9)
            recorder.finish(request, 1)
    assert read_groups(tmp_path / name) == GROUPS
    assert len(read_trace(tmp_path / name)) == 3
    text = (gzip.open if name.endswith("gz") else open)(tmp_path / name, "rt")
    with text:
        assert ["cache_groups" in json.loads(line) for line in text] == [True, False, False]


def test_a_scheduler_names_its_groups_unless_it_keeps_all_tokens(tmp_path: Path):
    for number, groups in enumerate((None, (CacheGroup.full_attention(), CacheGroup.sliding_window(4)))):
        path = tmp_path / f"{number}.jsonl"
        with TraceRecorder(path, block_size=4) as recorder:
            manager = BlockManager(block_size=4, device_blocks=32, groups=groups, prefix_caching=True)
            scheduler = Scheduler(manager, recorder=recorder)
            scheduler.add(Request("a", [1, 2, 3], max_tokens=1))
            scheduler.abort("a")
        assert read_groups(path) == (groups or ())


@pytest.mark.parametrize("text", ["TIMESTAMP,ContextTokens,GeneratedTokens\n", "{}\n", "[1]\n", "", "{\n"])
def test_other_traces_have_no_groups(tmp_path: Path, text: str):
    path = tmp_path / "trace"
    path.write_text(text, encoding="ascii")
    assert read_groups(path) == ()


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({}, "cache_groups: must be a list of at most 64"),
        ([{"kind": "full_attention"}] * 65, "must be a list of at most 64"),
        ([7], "7 is not an object"),
        ([{"kind": "full"}], "kind is 'full', must be one of full_attention, "),
        ([{"kind": []}], r"kind is \[\], must be"),
        ([{"kind": "sliding_window"}], "window"),
        ([{"kind": "sliding_window", "window": -1}], "window"),
        ([{"kind": "sliding_window", "window": "a"}], "window"),
        ([{"kind": "recurrent", "window": 5}], "argument"),
        ([{"kind": "recurrent", "block_bytes": 2**70}], "bytes|int"),
        ([{"kind": "recurrent", "block_tokens": 0}], "tokens"),
    ],
)
def test_malformed_groups_are_named_by_line(tmp_path: Path, groups: Any, message: str):
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 1, "output_length": 1, "cache_groups": groups}
    path.write_text(f"\n{json.dumps(line)}\n", encoding="ascii")
    with pytest.raises(TraceError, match=f"{path}, line 2: .*({message})"):
        read_groups(path)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(TraceError, match="cannot read trace"):
        read_groups(tmp_path / "none")


def test_what_is_no_group_is_refused_before_there_is_a_file(tmp_path: Path):
    with pytest.raises(InvalidArgumentError, match="groups has 'full', must have instances of CacheGroup"):
        TraceRecorder(tmp_path / "trace.jsonl", block_size=4, groups=["full"])  # type: ignore[list-item]
    assert not list(tmp_path.iterdir())
