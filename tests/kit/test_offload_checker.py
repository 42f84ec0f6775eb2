"""What other offload tiers got wrong, planted on purpose and caught by `OffloadChecker`; ours passes."""

from typing import Any

import pytest
from offload_checker import OffloadChecker, exact_name

from blockyard.errors import InvariantError
from blockyard.offload import OffloadManager

CHUNKS = 10


class Planted:
    """An offload manager with one thing wrong."""

    def __init__(self) -> None:
        self.inner = OffloadManager(CHUNKS)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class SaysHitAndFails(Planted):
    def lookup(self, keys: Any) -> list[str]:
        return ["hit" if found == "pending" else found for found in self.inner.lookup(keys)]


class ReusesPagesThatAreRead(Planted):
    def prepare_load(self, keys: Any) -> Any:
        chunks = self.inner.prepare_load(keys)
        self.inner.complete_load(keys)
        return chunks

    def complete_load(self, keys: Any) -> None:
        """Nothing is held any more."""


class ReusesPagesThatAreWritten(Planted):
    def expire(self, now: int) -> None:
        self.inner.complete_store(self.inner.expire(now), success=False)


class WaitsForEver(Planted):
    def prepare_store(self, keys: Any, *, deadline: int | None = None) -> Any:
        return self.inner.prepare_store(keys)


class FailedStoreIsAHit(Planted):
    def complete_store(self, keys: Any, success: bool = True) -> Any:
        return self.inner.complete_store(keys)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("eviction", ["lru", "adaptive"])
def test_ours_passes(eviction: str, groups: int, seed: int):
    manager = OffloadManager(CHUNKS, eviction=eviction)
    checker = OffloadChecker(manager, CHUNKS, groups=groups, seed=seed)
    checker.run(1000)
    assert checker.loaded > 20
    manager.check()


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        (SaysHitAndFails, "are hits and cannot be loaded"),
        (ReusesPagesThatAreRead, "holds"),
        (ReusesPagesThatAreWritten, "holds"),
        (WaitsForEver, "past its deadline"),
        (FailedStoreIsAHit, "holds None"),
    ],
)
def test_a_planted_fault_is_caught(planted: type[Planted], message: str):
    with pytest.raises(InvariantError, match=message):
        OffloadChecker(planted(), CHUNKS).run(5000)


@pytest.mark.parametrize("forgotten", ["salt", "group"])
def test_a_salt_dropped_on_the_way_and_a_hybrid_pool_that_comes_back_in_part_are_caught(forgotten: str):
    def name(prefix: tuple[int, ...], salt: bytes, group: int) -> bytes:
        return exact_name(prefix, b"" if forgotten == "salt" else salt, 0 if forgotten == "group" else group)

    with pytest.raises(InvariantError, match="holds"):
        OffloadChecker(OffloadManager(CHUNKS), CHUNKS, groups=2, name=name).run(5000)
