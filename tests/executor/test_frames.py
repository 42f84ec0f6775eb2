"""How many frames and objects a copy takes from its block ids on, and how many calls a step over a cache."""

from __future__ import annotations

import sys
import threading
from types import FrameType

import numpy as np

import blockyard
from blockyard import CacheEngine, KVCache, KVLayout, Pairs, Request, Scheduler, StepDecision, StepExecutor

HOME = blockyard.__path__[0]
LAYOUT = KVLayout("kv_first", num_layers=1, block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
IN_RUST = 3
"""Frames of the copy below `Bound.__call__`: the bound views, the copy, its loop."""


def depth(frame: FrameType | None) -> int:
    """Number of frames of the library above and including this one."""
    found = 0
    while frame is not None and frame.f_code.co_filename.startswith(HOME):
        found, frame = found + 1, frame.f_back
    return found


def test_a_leg_of_a_swap_takes_twelve_frames_and_six_objects():
    depths: dict[str, int] = {}
    made: set[str] = set()

    def note(frame: FrameType, event: str, _value: object) -> None:
        if event != "call":
            return
        name, owner = frame.f_code.co_name, frame.f_locals.get("self")
        if name in {"launch", "__call__"} and type(owner).__name__ in {"WorkerStreams", "Bound"}:
            depths[name] = depth(frame)
        if name == "__init__" and type(owner).__module__.startswith(("blockyard.engine.transfers", "blockyard.exec")):
            made.add(type(owner).__name__)
        if name == "__init__" and type(owner).__name__ == "_WorkerEvent":
            made.add("_WorkerEvent")

    with CacheEngine(LAYOUT, device_blocks=4, host_blocks=4) as engine:
        executor = StepExecutor(engine)
        decision = StepDecision(1, [("swap_out", Pairs("device", "host", np.array([[0, 1], [2, 3]])))])
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            executor.submit(decision)
            executor.wait(1)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
    assert depths["launch"] + depths["__call__"] + IN_RUST <= 12
    from_rust = {"StepDecision", "Pairs", "Mapping"}
    assert len(made - {"_OpenDecision"} | from_rust) == 6, made


def test_a_decode_step_over_a_cache_takes_at_most_sixty_python_calls():
    with KVCache(LAYOUT, device_blocks=64, host_blocks=4, watermark=0) as cache:
        scheduler = Scheduler(cache)
        for number in range(8):
            scheduler.add(Request(f"{number}", [number] * 5, max_tokens=100))

        def step() -> None:
            with scheduler.step() as made:
                pass
            scheduler.update(made, [7] * made.num_draws)

        def note(_frame: FrameType, event: str, _value: object) -> None:
            nonlocal calls
            calls += event == "call"

        for _ in range(6):  # within a block, so that none is filled in the last
            step()
        calls = 0
        sys.setprofile(note)
        try:
            step()
        finally:
            sys.setprofile(None)
        assert calls <= 60
