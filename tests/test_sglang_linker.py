"""What the SGLang linker looks up and stages: costs and bounds, over stand-ins or SGLang itself."""

import importlib
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import engine_drivers
import pytest
import sglang_stand_in

PAGE = 8


@pytest.fixture
def make() -> Iterator[Callable[[int], Any]]:
    made = []

    def one(staging_bytes: int) -> Any:
        made.append(sglang_stand_in.linker(PAGE, staging_bytes))
        return made[-1]

    with engine_drivers.sglang():
        yield one
        for linker in made:
            linker.close()


class Key(tuple):  # type: ignore[type-arg]
    """A page's name that counts how often it is hashed: once in each set or dictionary that it meets."""

    hashed = 0
    __slots__ = ()

    def __hash__(self) -> int:
        Key.hashed += 1
        return super().__hash__()


def transfers(keys: list[str]) -> list[Any]:
    storage = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
    return [storage.PoolTransfer(name=storage.PoolName.KV, keys=keys)]


def test_a_lookup_finds_every_page_and_again_once_it_is_staged(make: Callable[[int], Any]):
    linker = make(1 << 20)
    keys = [f"{n:064x}" for n in range(100)]
    for _ in range(2):
        assert linker.lookup("one", transfers(keys)) == list(range(1, 101))
    assert linker._staged_bytes == 100 * PAGE


@pytest.mark.parametrize("pages", [50, 400])
def test_staging_takes_the_same_work_for_each_page(make: Callable[[int], Any], pages: int):
    linker = make(1 << 20)
    wanted = [Key(("kv", f"{n:064x}")) for n in range(pages)]
    Key.hashed = 0
    assert len(linker._stage("one", wanted)) == pages
    assert Key.hashed <= 8 * pages


def test_staging_keeps_its_bound_and_counts_what_it_holds(make: Callable[[int], Any]):
    rng, linker = random.Random(1), make(40 * PAGE)
    for _ in range(300):
        request = f"{rng.randrange(12)}"
        if rng.random() < 0.3:
            with linker._changed:
                linker._unstage(request)
        else:
            first, count = rng.randrange(30), rng.randrange(1, 20)
            wanted = [("kv", f"{place:064x}") for place in range(first, first + count)]
            staged = linker._stage(request, wanted)
            assert set(wanted) <= set(staged)
        held = sum(len(pages) for pages in linker._staged.values())
        assert linker._staged_bytes == held * PAGE <= 40 * PAGE


def test_a_request_of_which_nothing_came_leaves_nothing_behind(make: Callable[[int], Any]):
    linker = make(1 << 20)
    linker._objects.get = lambda keys, sizes, take: [False] * len(keys)
    for n in range(10):
        assert linker.lookup(f"{n}", transfers(["a", "b"])) == []
    assert not linker._staged
    assert not linker._reading


def test_a_window_is_whole_where_none_of_its_pages_is_missing(make: Callable[[int], Any]):
    pages = importlib.import_module("blockyard.integrations.sglang.pages")
    storage = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
    rng = random.Random(2)
    for _ in range(500):
        there = [rng.random() < 0.7 for _ in range(rng.randrange(1, 12))]
        leading, window = rng.randrange(len(there) + 1), rng.randrange(1, 6)
        known = {"kv": [place < leading for place in range(len(there))], "swa": there}
        policy = storage.PoolHitPolicy.TRAILING_PAGES
        asked = SimpleNamespace(name="swa", keys=["x"] * window, hit_policy=policy)
        found = pages.restorable_pages([asked], lambda name, known=known: known[str(name)])
        right = [end for end in range(1, leading + 1) if all(there[max(0, end - window) : end])]
        assert found.restorable_prefix_pages == right
