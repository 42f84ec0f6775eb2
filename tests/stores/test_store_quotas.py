"""Quotas of tenants in the file store: what is refused, what goes, and what the next process counts."""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from blockyard.errors import InvalidArgumentError, StoreError
from blockyard.stores import ExternalStore, Owners, open_store
from blockyard.stores.value import is_damage

SLOTS = 32
TENANT = sha256(b"salt").digest()
NO_SALT = bytes(32)
GUARDS: list[dict[str, Any]] = [{}, {"mac_key": bytes(range(32))}]
both = pytest.mark.parametrize("guard", GUARDS, ids=["plain", "mac"])


@contextmanager
def opened(folder: Path, guard: dict[str, Any], width: int = 4096, **options: Any) -> Iterator[ExternalStore]:
    options = {"use": "prefix", "num_slots": SLOTS} | options
    with open_store(f"file://{folder}", bytes_per_block=width, **guard, **options) as store:
        yield store


def keys(*numbers: int) -> NDArray[np.uint8]:
    return np.array([list(sha256(b"%d" % number).digest()) for number in numbers], np.uint8).reshape(-1, 32)


def chain(tenant: bytes, first: int, count: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8], Owners]:
    """Keys, rows and owners of a prompt's blocks."""
    found = keys(*range(first, first + count))
    tenants = np.tile(np.frombuffer(tenant, np.uint8), (count, 1))
    rows = np.arange(first, first + count, dtype=np.uint8)[:, None].repeat(4096, axis=1)
    return found, rows, Owners(tenants, np.vstack([np.zeros((1, 32), np.uint8), found])[:count])


def put(store: ExternalStore, tenant: bytes, first: int, count: int) -> tuple[str, ...]:
    return store.wait(store.submit_put(*chain(tenant, first, count))).reasons


def held(store: ExternalStore, first: int, count: int) -> list[int]:
    done = store.wait(store.submit_get(keys(*range(first, first + count))))
    assert (done.rows[done.ok][:, 0] == first + np.flatnonzero(done.ok)).all()
    return (first + np.flatnonzero(done.ok)).tolist()


@both
@pytest.mark.parametrize("tenant", [TENANT, NO_SALT], ids=["salt", "none"])
def test_of_a_prompt_longer_than_its_quota_the_beginning_stays(tmp_path: Path, guard: dict[str, Any], tenant: bytes):
    with opened(tmp_path, guard) as store:
        assert store.keeps_quotas
        assert store.quota(tenant) is None
        store.set_quota(tenant, 9)
        for _ in range(3):
            assert put(store, tenant, 0, 18) == ("",) * 9 + ("refused",) * 9
            assert held(store, 0, 18) == list(range(9))
            assert store.quota(tenant) == (9, 9)
        assert store.stats().misses["refused"] == 27
        assert not is_damage("refused")


@both
def test_a_tenants_older_prompts_are_dropped_first_and_other_tenants_keep_theirs(tmp_path: Path, guard: dict[str, Any]):
    with opened(tmp_path, guard) as store:
        store.set_quota(TENANT, 6)
        put(store, NO_SALT, 100, 4)
        put(store, TENANT, 0, 4)
        assert put(store, TENANT, 20, 5) == ("",) * 5
        assert held(store, 0, 4) == [0]
        assert held(store, 20, 5) == [20, 21, 22, 23, 24]
        assert held(store, 100, 4) == [100, 101, 102, 103]


@both
def test_a_later_process_keeps_the_quota_and_counts_the_stored_blocks(tmp_path: Path, guard: dict[str, Any]):
    with opened(tmp_path, guard) as store:
        store.set_quota(TENANT, 9)
        put(store, TENANT, 0, 7)
    with opened(tmp_path, guard) as store:
        assert store.quota(TENANT) == (7, 9)
        assert put(store, TENANT, 0, 12) == ("",) * 9 + ("refused",) * 3
    with opened(tmp_path, guard) as store:
        store.set_quota(TENANT, 5)
        assert store.quota(TENANT) == (5, 5)
        assert held(store, 0, 12) == [0, 1, 2, 3, 4]


def test_quotas_are_in_a_private_file_of_their_namespace_and_damage_means_none(tmp_path: Path):
    secret, name = tmp_path / "secret", tmp_path / "kept" / "blockyard-prefix.quotas"
    secret.write_text("not ours")
    with opened(name.parent, {}) as store:
        (name.parent / f"{name.name}.new").symlink_to(secret)
        store.set_quota(TENANT, 9)
    assert (name.stat().st_mode & 0o777, secret.read_text()) == (0o600, "not ours")
    with opened(name.parent, {}, namespace=b"other".ljust(32)) as store:
        assert store.quota(TENANT) is None
    with opened(name.parent, {}) as store:
        assert store.quota(TENANT) == (0, 9)
        store.set_quota(TENANT, None)
    with opened(name.parent, {}) as store:
        assert store.quota(TENANT) is None
        store.set_quota(TENANT, 9)
    name.write_bytes(name.read_bytes()[:-1])
    with opened(name.parent, {}) as store:
        assert store.quota(TENANT) is None
    name.unlink()
    name.symlink_to(secret)
    with opened(name.parent, {}) as store:
        assert store.quota(TENANT) is None
        store.set_quota(TENANT, 2)
    assert secret.read_text() == "not ours"


@both
def test_a_smaller_quota_drops_blocks_at_once_and_none_means_no_limit(tmp_path: Path, guard: dict[str, Any]):
    with opened(tmp_path, guard) as store:
        put(store, TENANT, 0, 10)
        store.set_quota(TENANT, 3)
        assert store.poll() == []
        assert held(store, 0, 10) == [0, 1, 2]
        store.set_quota(TENANT, 0)
        assert put(store, TENANT, 0, 2) == ("refused", "refused")
        assert (held(store, 0, 10), store.quota(TENANT)) == ([], (0, 0))
        store.set_quota(TENANT, None)
        assert put(store, TENANT, 0, 10) == ("",) * 10


@both
def test_blocks_without_owners_count_towards_no_quota(tmp_path: Path, guard: dict[str, Any]):
    with opened(tmp_path, guard) as store:
        store.set_quota(NO_SALT, 2)
        found, rows, _ = chain(NO_SALT, 0, 5)
        assert store.wait(store.submit_put(found, rows)).ok.all()
        assert store.quota(NO_SALT) == (0, 2)


@both
def test_a_deleted_or_forgotten_block_counts_no_more(tmp_path: Path, guard: dict[str, Any]):
    with opened(tmp_path, guard) as store:
        store.set_quota(TENANT, 4)
        put(store, TENANT, 0, 4)
        assert store.wait(store.submit_delete(keys(3))).ok.all()
        assert store.quota(TENANT) == (3, 4)
        store.forget()
        assert store.quota(TENANT) == (0, 4)
        assert put(store, TENANT, 0, 5) == ("", "", "", "", "refused")


def test_lent_rows_have_owners_too(tmp_path: Path):
    with opened(tmp_path, {}) as store:
        store.set_quota(TENANT, 2)
        found, rows, owners = chain(TENANT, 0, 3)
        lent = np.zeros(4 * 4096, np.uint8)
        start = -lent.ctypes.data % 4096
        pages = lent[start : start + 3 * 4096].reshape(3, 4096)
        pages[:] = rows
        assert store.wait(store.submit_put(found, pages, owners)).reasons == ("", "", "refused")
        assert store.wait(store.submit_put(found, rows, owners)).reasons == ("", "", "refused")
        assert held(store, 0, 3) == [0, 1]


@both
@pytest.mark.parametrize("field", ["tenants", "parents"])
@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((2, 32), np.uint8),
        np.zeros((3, 31), np.uint8),
        np.zeros((3, 32), np.int8),
        np.zeros(96, np.uint8),
        [bytes(32)] * 3,
        None,
    ],
    ids=["fewer", "narrow", "dtype", "flat", "list", "none"],
)
def test_wrong_owners_are_refused_by_name(tmp_path: Path, guard: dict[str, Any], field: str, wrong: Any):
    with opened(tmp_path, guard) as store:
        found, rows, owners = chain(TENANT, 0, 3)
        with pytest.raises(InvalidArgumentError, match=rf"^owners\.{field} "):
            store.submit_put(found, rows, owners._replace(**{field: wrong}))
        assert held(store, 0, 3) == []


@pytest.mark.parametrize("wrong", [(), (1,), 7, "ab", np.zeros((3, 3, 32), np.uint8)])
def test_owners_that_are_not_a_pair_are_refused(tmp_path: Path, wrong: Any):
    with opened(tmp_path, {}) as store:
        found, rows, _ = chain(TENANT, 0, 3)
        with pytest.raises(InvalidArgumentError, match=r"^owners"):
            store.submit_put(found, rows, wrong)


@both
def test_a_wrong_tenant_or_number_is_refused(tmp_path: Path, guard: dict[str, Any]):
    with opened(tmp_path, guard) as store:
        bad: Any
        for bad in (b"", bytes(31), bytes(33), "a" * 32, 7, None):
            with pytest.raises(InvalidArgumentError, match=r"^tenant is .*, must be 32 bytes"):
                store.set_quota(bad, 1)
            with pytest.raises(InvalidArgumentError, match=r"^tenant is .*, must be 32 bytes"):
                store.quota(bad)
        for bad in (-1, 2**32, 1.5, "1"):
            with pytest.raises(InvalidArgumentError, match=r"^num_blocks is "):
                store.set_quota(TENANT, bad)
        assert store.quota(TENANT) is None


@both
def test_swap_space_several_directories_and_closed_stores_refuse(tmp_path: Path, guard: dict[str, Any]):
    with opened(tmp_path, guard, use="swap") as store:
        for call in (lambda: store.set_quota(TENANT, 1), lambda: store.quota(TENANT)):
            with pytest.raises(StoreError, match=r"no keys|opened as swap"):
                call()
    folders = f"{tmp_path}/a,{tmp_path}/b"
    with open_store(f"file://{folders}", bytes_per_block=4096, num_slots=8, use="prefix", **guard) as store:
        assert not store.keeps_quotas
        with pytest.raises(StoreError):
            store.set_quota(TENANT, 1)
    with opened(tmp_path, guard) as store:
        pass
    with pytest.raises(StoreError):
        store.set_quota(TENANT, 1)
