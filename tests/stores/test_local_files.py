"""Files that stores make: nobody but the user can read them, and no link that others planted is followed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockyard.errors import StoreError
from blockyard.stores import ExternalStore, open_store
from blockyard.stores.object_store import LocalFiles

SIZE = 4096
KEYS = [bytes(32), bytes([1]) * 32]
ROWS = np.ones((2, SIZE), np.uint8)


@pytest.fixture(autouse=True)
def _nothing_masked() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def opened(url: str, **options: Any) -> ExternalStore:
    return open_store(url, bytes_per_block=SIZE, **options)


@pytest.mark.parametrize("use", ["swap", "prefix"])
@pytest.mark.parametrize("scheme", ["file", "local"])
def test_nobody_else_can_read_what_a_store_writes(scheme: str, use: Any, tmp_path: Path):
    folder = tmp_path / "kv"
    with opened(f"{scheme}://{folder}?size=1MiB", use=use) as store:
        if use == "prefix":
            assert store.wait(store.submit_put(KEYS, ROWS)).ok.all()
            store.forget()
            assert store.wait(store.submit_put(KEYS, ROWS)).ok.all()
        else:
            assert store.wait(store.submit_write(np.arange(2), ROWS)).ok.all()
        made = [folder, *folder.rglob("*")]
    made += folder.rglob("*")  # what closing leaves
    files = [path for path in made if path.is_file()]
    assert files or use == "swap"
    for path in made:
        if path.exists():
            wanted = 0o700 if path.is_dir() else 0o600
            assert stat.S_IMODE(path.stat().st_mode) == wanted, path


@pytest.mark.parametrize("name", ["", "blockyard", "blockyard/0000000000000000"])
def test_a_planted_link_to_a_folder_is_refused(name: str, tmp_path: Path):
    root, elsewhere = tmp_path / "kv", tmp_path / "elsewhere"
    elsewhere.mkdir(0o700)
    (root / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    (root / "blockyard").chmod(0o700) if name.count("/") else None
    (root / name).symlink_to(elsewhere)
    with pytest.raises(StoreError, match="is a symbolic link, must be a directory"), opened_and_used(root):
        pass
    assert not list(elsewhere.iterdir())


def opened_and_used(root: Path) -> ExternalStore:
    store = opened(f"local://{root}?size=1MiB", use="prefix")
    done = store.wait(store.submit_put(KEYS, ROWS))
    error = store.stats().last_error
    store.close()
    assert not done.ok.any()
    raise StoreError(error)


def test_links_to_files_are_replaced_and_not_followed(tmp_path: Path):
    url, secret = f"local://{tmp_path}?size=1MiB", tmp_path / "secret"
    secret.write_bytes(b"kept")
    with opened(url, use="prefix") as store:
        assert store.wait(store.submit_put(KEYS, ROWS)).ok.all()
    for path in (tmp_path / "blockyard").rglob("*"):
        if path.is_file():
            path.unlink()
            path.symlink_to(secret)
    with opened(url, use="prefix") as store, pytest.raises(StoreError, match="not confirmed"):
        store.forget()
    (tmp_path / "blockyard" / "lock").unlink()
    with opened(url, use="prefix") as store:
        store.forget()
        assert store.wait(store.submit_put(KEYS, ROWS)).ok.all()
        assert store.wait(store.submit_get(KEYS)).ok.all()
    assert secret.read_bytes() == b"kept"


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path):
    (tmp_path / "blockyard").mkdir(0o770)
    with pytest.raises(StoreError, match=r"others can write to '.*blockyard': chmod 700"):
        opened(f"local://{tmp_path}?size=1MiB")


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "blockyard").mkdir(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StoreError, match=r"belongs to user \d+, must belong to"):
        opened(f"local://{tmp_path}?size=1MiB")


def test_a_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    obstore: Any = pytest.importorskip("obstore")
    files = LocalFiles(obstore, tmp_path)
    files.put(None, "blockyard/a", memoryview(b"old"))
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        files.put(None, "blockyard/a", memoryview(b"new"), mode="create")
    monkeypatch.setattr(os, "rename", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "no space")))
    with pytest.raises(OSError, match="no space"):
        files.put(None, "blockyard/a", memoryview(b"new"))
    assert [path.name for path in (tmp_path / "blockyard").iterdir()] == ["a"]
    assert (tmp_path / "blockyard" / "a").read_bytes() == b"old"


def test_without_hard_links_blocks_are_stored_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "link", lambda *_, **__: (_ for _ in ()).throw(OSError(1, "not permitted")))
    with opened(f"local://{tmp_path}?size=1MiB", use="prefix") as store:
        assert store.wait(store.submit_put(KEYS, ROWS)).ok.all()
        assert store.wait(store.submit_get(KEYS)).ok.all()
