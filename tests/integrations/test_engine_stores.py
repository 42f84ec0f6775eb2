"""What SGLang and LMCache keep in a prefix store: it comes back whole or is a miss, whatever the store does."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engine_drivers
import numpy as np
import pytest
from engine_drivers import FaultyStore, LMCache, SGLang
from numpy.typing import NDArray

from blockyard.errors import InvalidArgumentError
from blockyard.stores import register
from blockyard.stores.adapters import objects
from blockyard.stores.adapters.jobs import Steps
from blockyard.stores.adapters.objects import PrefixObjects
from blockyard.testing.faults import corrupt_slots

KINDS: dict[str, Callable[..., Any]] = {
    "sglang": lambda options, **more: SGLang(options, v1=False, **more),
    "sglang v1": SGLang,
    "lmcache": LMCache,
}
KEYS = [f"{n:064x}" for n in range(4)]
FAULTS = ("hangs", "raises", "damages", "swaps", "loses")
register("faulty")(FaultyStore)


@pytest.fixture(params=KINDS)
def open_engine(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    opened = []

    def open_one(options: dict[str, Any], **more: Any) -> Any:
        opened.append(KINDS[request.param](options, **more))
        return opened[-1]

    FaultyStore.media.clear()
    FaultyStore.fault = ""
    FaultyStore.released.clear()
    with engine_drivers.sglang():
        yield open_one
        FaultyStore.released.set()
        for engine in opened:
            engine.close()


def pages(engine: Any, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (len(KEYS), engine.page_bytes), dtype=np.uint8)


def folder(path: Path, **more: Any) -> dict[str, Any]:
    return {"root_dir": str(path), "size": "1MiB", **more}


def round_trip(engine: Any) -> bool:
    """Whether all that was stored is found, and comes back with its own bytes."""
    assert engine.store(KEYS, pages(engine))
    whole = engine.leading(KEYS) == len(KEYS)
    return whole and engine.load(KEYS) == [page.tobytes() for page in pages(engine)]


@pytest.mark.parametrize("url", [None, "faulty://one"])
def test_pages_come_back_whole_also_after_a_restart(open_engine: Any, tmp_path: Path, url: str | None):
    options = folder(tmp_path) if url is None else {"url": url}
    engine = open_engine(options)
    assert engine.leading(KEYS) == 0
    assert engine.load(KEYS) == [None] * len(KEYS)
    assert round_trip(engine)
    assert engine.leading([KEYS[0], "other", KEYS[1]]) == 1
    assert engine.load(["other", KEYS[2]]) == [None, pages(engine)[2].tobytes()]
    engine.close()
    again = open_engine(options)
    # A store that must ask a server knows in the background.
    while again.leading(KEYS) < len(KEYS):
        pass
    assert again.load(KEYS) == [page.tobytes() for page in pages(again)]


def test_another_revision_finds_nothing(open_engine: Any, tmp_path: Path):
    engine = open_engine(folder(tmp_path))
    assert round_trip(engine)
    engine.close()
    other = open_engine(folder(tmp_path), revision="two")
    assert other.leading(KEYS) == 0
    assert other.load(KEYS) == [None] * len(KEYS)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_store_is_a_miss_and_neither_wrong_nor_late(open_engine: Any, fault: str):
    engine = open_engine({"url": "faulty://one"})
    assert round_trip(engine)
    FaultyStore.fault = fault
    # A fault lasts until `released` is set: these calls end by the store's deadline alone.
    assert engine.load(KEYS) == [None] * len(KEYS)
    if fault in {"hangs", "raises"}:
        assert not engine.store(["new"], pages(engine)[:1])
        assert engine.leading(["new"]) == 0
    FaultyStore.released.set()
    FaultyStore.fault = ""


def test_damage_on_disk_is_a_miss_of_that_page_alone_and_from_then_on(
    open_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    opened = []
    known = objects.open_store
    monkeypatch.setattr(objects, "open_store", lambda *args, **more: opened.append(known(*args, **more)) or opened[-1])
    engine = open_engine(folder(tmp_path))
    assert round_trip(engine)
    # Pages fill slots from the first on; LMCache's take three each.
    parts = opened[0].num_slots and len(opened) and (3 if isinstance(engine, LMCache) else 1)
    corrupt_slots(opened[0], [parts])
    wanted: list[bytes | None] = [page.tobytes() for page in pages(engine)]
    wanted[1] = None
    assert engine.load(KEYS) == wanted
    assert engine.leading(KEYS) == 1
    assert engine.load(KEYS) == wanted
    assert round_trip(engine)


def test_no_more_than_the_store_holds_is_found_and_it_is_right(open_engine: Any, tmp_path: Path):
    engine = open_engine(folder(tmp_path, size="64KiB"))
    keys = [f"{n:064x}" for n in range(24)]
    for first in range(0, len(keys), len(KEYS)):
        engine.store(keys[first : first + len(KEYS)], pages(engine, first))
    found = [page for first in range(0, 24, 4) for page in engine.load(keys[first : first + 4])]
    wanted = [page.tobytes() for first in range(0, 24, 4) for page in pages(engine, first)]
    assert all(page in {None, right} for page, right in zip(found, wanted, strict=True))
    assert 0 < sum(page is not None for page in found) < 24


@pytest.mark.parametrize("sabotage", ["no-op", "wrong page"])
def test_a_load_that_is_sabotaged_shows(
    open_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sabotage: str
):
    known = PrefixObjects.get_steps

    def get(self: PrefixObjects, keys: Any, sizes: Any, take: Any) -> Steps[list[bool]]:
        if sabotage == "no-op":
            return known(self, keys, sizes, lambda index, data: take(index, np.zeros_like(data)))
        return known(self, [*keys[1:], keys[0]], sizes, take)

    engine = open_engine(folder(tmp_path))
    monkeypatch.setattr(PrefixObjects, "get_steps", get)
    assert not round_trip(engine)


@pytest.mark.parametrize("options", [{}, {"root_dir": "/tmp", "url": "faulty://one"}])
def test_wrong_options_are_refused_by_name(open_engine: Any, options: dict[str, Any]):
    with pytest.raises(InvalidArgumentError, match="must give exactly one of them"):
        open_engine(options)
