"""`ObjectStore`: objects of any length over blocks of one width."""

from pathlib import Path

import numpy as np
import pytest

from blockyard.errors import InvalidArgumentError
from blockyard.integrations import objects
from blockyard.integrations.objects import ObjectStore, store_url


def test_an_object_of_another_length_is_a_miss(tmp_path: Path):
    store = ObjectStore(f"file://{tmp_path}/one?size=1MiB", object_bytes=100, fields={})
    data = np.arange(250, dtype=np.uint8)
    assert store.put(["a"], [250], lambda index: data) == [True]
    taken: list[bytes] = []
    for size in (249, 251, 300):
        assert store.contains(["a"]) == [True]
        assert store.get(["a"], [size], lambda index, found: taken.append(found.tobytes())) == [False]
        assert not taken
        assert store.contains(["a"]) == [False]
        assert store.put(["a"], [250], lambda index: data) == [True]
    assert store.get(["a"], [250], lambda index, found: taken.append(found.tobytes())) == [True]
    assert taken == [data.tobytes()]
    assert store.put(["b"], [251], lambda index: data) == [False]
    assert store.delete(["a"]) == [True]
    assert store.contains(["a"]) == [False]
    store.close()
    assert store.put(["a"], [250], lambda index: data) == [False]
    assert store.contains(["a"], [250]) == [False]


@pytest.mark.parametrize("batch_bytes", [1, 300, 1 << 20])
def test_objects_of_many_lengths_come_back_whatever_the_batch_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_bytes: int
):
    monkeypatch.setattr(objects, "_BATCH_BYTES", batch_bytes)
    store = ObjectStore(f"file://{tmp_path}/one?size=1MiB", object_bytes=100, fields={"model": "one"})
    sizes = [0, 1, 92, 99, 100, 101, 207, 208, 209, 1000]
    random = np.random.default_rng(0)
    data = [random.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    keys = [f"key {size}" for size in sizes]
    assert store.put(keys, sizes, data.__getitem__) == [True] * len(sizes)
    assert store.contains([*keys, "other"], [*sizes, 5]) == [*[True] * len(sizes), False]
    taken: dict[int, bytes] = {}
    found = store.get([*keys, "other"], [*sizes, 5], lambda index, got: taken.update({index: got.tobytes()}))
    assert found == [*[True] * len(sizes), False]
    assert taken == {index: one.tobytes() for index, one in enumerate(data)}
    assert store.put([], [], data.__getitem__) == []
    assert store.get([], [], lambda index, got: None) == []
    store.close()


def test_a_root_dir_is_made_for_its_owner_alone_and_any_path_is_one(tmp_path: Path):
    url = store_url(str(tmp_path / "a folder" / "100%"), None, "1MiB", "rank")
    ObjectStore(url, object_bytes=100, fields={}).close()
    assert (tmp_path / "a folder" / "100%" / "rank" / "blockyard-prefix.slab").exists()
    assert (tmp_path / "a folder" / "100%").stat().st_mode & 0o077 == 0
    with pytest.raises(InvalidArgumentError, match="must be exactly one of them"):
        store_url(None, None, 0, "")
