"""What `BlockyardSpec` records under `BLOCKYARD_RECORD`: over vLLM's own interfaces or stand-ins."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_modules

from blockyard.traces import read_trace

CHUNK_TOKENS = 32  # two blocks of 16
GROUPS = (bytes(4), bytes([0, 0, 0, 1]))


def manager_of(vllm: SimpleNamespace, chunks: int = 40) -> Any:
    options = {"host_bytes": 128 * chunks, "blocks_per_chunk": 2}
    return vllm.ours.BlockyardSpec(vllm_modules.config(vllm, options)).get_manager()


def keys_of(text: list[int]) -> list[bytes]:
    """The keys of a text's chunks, each with that of the chunk before it."""
    keys, key = [], b"the model"
    for chunk in text:
        key = hashlib.sha256(key + chunk.to_bytes(8, "little")).digest()
        keys.append(key)
    return keys


class Requests:
    """vLLM's scheduler as a manager sees it: one request after the other."""

    def __init__(self, vllm: SimpleNamespace, manager: Any) -> None:
        self._vllm, self._manager, self._names = vllm, manager, 0

    def note(self, context: Any, keys: list[bytes]) -> None:
        for group in GROUPS:
            for number, key in enumerate(keys, 1):
                context.set_offload_key_position(key + group, number * CHUNK_TOKENS)
                context.set_offload_key_position(b"part" + key + group, number * CHUNK_TOKENS - 16)

    def end_step(self, *new: str) -> None:
        self._manager.on_schedule_end(self._vllm.base.ScheduleEndContext(new_req_ids=new, preempted_req_ids=[]))

    def serve(self, prompt: list[bytes], answer: list[bytes]) -> int:
        """Serve a request; return the chunks of its prompt that the host had."""
        manager, self._names = self._manager, self._names + 1
        context = self._vllm.base.ReqContext(req_id=f"request {self._names}")
        manager.on_new_request(context)
        self.note(context, prompt)
        keys = [key + GROUPS[0] for key in (*prompt, *answer)]
        hit = self._vllm.base.LookupResult.HIT
        hits = 0
        while hits < len(prompt) and manager.lookup(keys[hits], context) == hit:
            hits += 1
        manager.prepare_load(keys[:hits], context)
        self.end_step(context.req_id)
        manager.complete_load(keys[:hits], context)
        store = manager.prepare_store(keys[hits:], context)
        manager.complete_store(store.keys_to_store, context)
        self.note(context, [*prompt, *answer])
        self.end_step()
        manager.on_request_finished(context)
        return hits


def test_the_replay_of_a_recording_has_the_same_hits_on_the_host(
    vllm: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "trace.jsonl.gz"
    monkeypatch.setenv("BLOCKYARD_RECORD", str(path))
    manager = manager_of(vllm)
    rng, served = random.Random(3), []
    texts: list[list[int]] = [[]]
    engine = Requests(vllm, manager)
    for _ in range(120):
        prompt = [*rng.choice(texts[-15:]), *(rng.randrange(10**9) for _ in range(rng.randint(1, 4)))][-12:]
        answer = [rng.randrange(10**9) for _ in range(rng.randint(0, 2))]
        texts.append([*prompt, *answer])
        keys = keys_of([*prompt, *answer])
        served.append((engine.serve(keys[: len(prompt)], keys[len(prompt) :]), len(prompt), len(answer)))
    manager.shutdown()
    monkeypatch.delenv("BLOCKYARD_RECORD")

    again = Requests(vllm, manager_of(vllm))
    rows = read_trace(path)
    for row, (hits, prompt_chunks, answer_chunks) in zip(rows, served, strict=True):
        assert (row.input_tokens, row.hash_tokens) == (prompt_chunks * CHUNK_TOKENS, CHUNK_TOKENS)
        assert row.output_tokens == max(1, answer_chunks * CHUNK_TOKENS)
        ids = [[number.to_bytes(8, "big") for number in part] for part in (row.hash_ids, row.output_hash_ids)]
        assert again.serve(*ids) == hits
    assert sum(hits for hits, _, _ in served) > 100
    assert path.stat().st_size < 10_000
    assert list(tmp_path.iterdir()) == [path]


def test_requests_that_are_never_scheduled_or_have_no_chunk_are_recorded_without_ids(
    vllm: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "trace.jsonl"
    monkeypatch.setenv("BLOCKYARD_RECORD", str(path))
    manager = manager_of(vllm)
    engine = Requests(vllm, manager)
    contexts = {name: vllm.base.ReqContext(req_id=name) for name in ("aborted", "short", "whole")}
    for context in contexts.values():
        manager.on_new_request(context)
    engine.note(contexts["aborted"], keys_of([1]))
    manager.on_request_finished(contexts["aborted"])
    engine.note(contexts["whole"], keys_of([1, 2]))
    engine.end_step("aborted", "short", "whole", "unknown")
    for name in ("short", "whole"):
        manager.on_request_finished(contexts[name])
    assert not manager._recorder._new
    assert not manager._recorder._prompt_chunks
    manager.shutdown()
    rows = read_trace(path)
    assert [list(row.hash_ids) for row in rows] == [[], [], [0, 1]]
    assert [(row.input_tokens, row.output_tokens) for row in rows] == [(1, 1), (1, 1), (64, 1)]


def test_a_request_has_the_time_when_it_came(vllm: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "trace.jsonl"
    monkeypatch.setenv("BLOCKYARD_RECORD", str(path))
    manager = manager_of(vllm)
    engine, recorder = Requests(vllm, manager), manager._recorder._recorder
    now = 7.0
    recorder._clock = lambda: now
    contexts = [vllm.base.ReqContext(req_id=name) for name in "ab"]
    for context in contexts:
        manager.on_new_request(context)
        engine.note(context, keys_of([1]))
        now += 2
    engine.end_step("b", "a")
    for context in contexts:
        manager.on_request_finished(context)
    manager.shutdown()
    assert [(row.arrival, list(row.hash_ids)) for row in read_trace(path)] == [(0.0, [0]), (2.0, [0])]


def test_a_version_without_chunks_in_the_context_records_nothing_and_says_so_once(
    vllm: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("BLOCKYARD_RECORD", str(tmp_path / "trace.jsonl"))
    manager = manager_of(vllm)
    for name in ("a", "b"):
        manager.on_new_request(SimpleNamespace(req_id=name, kv_hints=None))
        Requests(vllm, manager).end_step(name)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "requests are not recorded: this version of vLLM does not list their chunks"
    ]
