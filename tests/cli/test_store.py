"""`blockyard store` over files and a shared directory: what it lists, what it removes, and what it leaves alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blockyard import KVLayout
from blockyard._core import read_slab
from blockyard.stores import ExternalStore, Owners, open_store, store_namespace
from blockyard.testing.faults import corrupt_slots
from blockyard.tools import cli
from blockyard.tools.store import Selection, open_contents, survey

LAYOUT = KVLayout("kv_first", num_layers=2, block_size=16, num_kv_heads=2, head_size=16, dtype="float16")
TINY = store_namespace(model="tiny", revision="5f0b02c", layout=LAYOUT)
BIG = store_namespace(model="big", revision="1", layout=LAYOUT, salt=b"secret of a tenant", rank=1, world_size=2)
TENANT = bytes([7]) * 32


@pytest.fixture(params=["file", "local"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.param}://{tmp_path}/kv?size=1MiB"


def opened(url: str, namespace: bytes) -> ExternalStore:
    return open_store(url, bytes_per_block=LAYOUT.bytes_per_block, namespace=namespace, use="prefix")


def keys(count: int, first: int = 1) -> list[bytes]:
    return [bytes([number]) * 32 for number in range(first, first + count)]


def put(store: ExternalStore, count: int, first: int = 1) -> None:
    rows = np.ones((count, store.bytes_per_block), np.uint8)
    owners = Owners(np.frombuffer(TENANT * count, np.uint8).reshape(count, 32), np.zeros((count, 32), np.uint8))
    assert store.wait(store.submit_put(keys(count, first), rows, owners if store.keeps_quotas else None)).ok.all()


def fill(url: str) -> None:
    for namespace, count in ((TINY, 3), (BIG, 5)):
        with opened(url, namespace) as store:
            put(store, count)


def found(url: str, namespace: bytes, count: int) -> int:
    with opened(url, namespace) as store:
        return int(store.wait(store.submit_get(keys(count))).ok.sum())


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = cli.main(["store", *arguments, "--format", "json"])
    printed = capsys.readouterr()
    return code, json.loads(printed.out) if printed.out else printed.err


def test_ls_names_the_parts_of_each_namespace(url: str, capsys: pytest.CaptureFixture[str]):
    fill(url)
    code, report = run(capsys, url, "ls")
    groups = {group["namespace"]: group for group in report["groups"]}
    assert (code, set(groups), report["blocks"]) == (0, {TINY.hex()[:16], BIG.hex()[:16]}, 8)
    tiny, big = groups[TINY.hex()[:16]], groups[BIG.hex()[:16]]
    described = "2 layers of 2 heads x 16 float16, 16 tokens, kv_first"
    assert tiny["parts"] == {"model": "tiny", "revision": "5f0b02c", "layout": described}
    assert (tiny["blocks"], big["blocks"], big["parts"]["rank"]) == (3, 5, "1 of 2")
    assert tiny["tenant"] == (TENANT.hex()[:16] if url.startswith("file") else "")
    assert 0 <= tiny["youngest_seconds"] <= tiny["oldest_seconds"] < 600
    assert "secret" not in json.dumps(report)
    assert cli.main(["store", url, "stat"]) == 0
    shown = capsys.readouterr().out
    assert "    layout: 2 layers" in shown
    assert "8 blocks, " in shown


def test_rm_changes_nothing_until_it_is_told_yes(url: str, capsys: pytest.CaptureFixture[str]):
    fill(url)
    choice = ("--namespace", "model=tiny", "--namespace", TINY.hex()[:6])
    code, report = run(capsys, url, "rm", *choice)
    assert (code, report["blocks"], report["removed"]) == (0, 3, 0)
    assert (found(url, TINY, 3), found(url, BIG, 5)) == (3, 5)
    code, report = run(capsys, url, "rm", *choice, "--yes")
    assert (code, report["blocks"], report["removed"]) == (0, 3, 3)
    assert (found(url, TINY, 3), found(url, BIG, 5)) == (0, 5)
    with opened(url, TINY) as store:
        put(store, 3)
    assert found(url, TINY, 3) == 3


def test_a_part_of_a_value_chooses_nothing(url: str, capsys: pytest.CaptureFixture[str]):
    fill(url)
    assert run(capsys, url, "rm", "--namespace", "model=tin", "--yes")[1]["removed"] == 0
    assert run(capsys, url, "rm", "--namespace", "model=tiny", "--namespace", "model=big", "--yes")[1]["removed"] == 0


def test_the_age_of_a_block_is_the_time_since_it_was_put(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fill(url)
    ages = [age for page in open_contents(url).pages() for age in page.ages]
    assert all(0 <= age < 600 for age in ages)
    assert survey(open_contents(url), Selection(older_than=3600)).blocks == 0
    if url.startswith("local"):
        for path in (tmp_path / "kv/blockyard" / TINY.hex()[:16]).iterdir():
            os.utime(path, (0, 1e9))
        assert survey(open_contents(url), Selection(older_than=3600)).blocks == 3
    else:
        with opened(url, TINY) as store:
            put(store, 1, first=9)
            last = float(read_slab(tmp_path / "kv").generations.max())
        monkeypatch.setattr("blockyard.tools.store.files.time.time", lambda: last / 1e9 + 50)
        assert survey(open_contents(url), Selection(older_than=50 + 1e-6)).blocks == 8


def test_a_tenant_is_chosen_by_its_digits(tmp_path: Path):
    url = f"file://{tmp_path}/kv?size=1MiB"
    fill(url)
    with opened(url, TINY) as store:
        store.wait(store.submit_put([bytes([99]) * 32], np.ones((1, store.bytes_per_block), np.uint8)))
    assert survey(open_contents(url), Selection(tenant=TENANT.hex()[:8])).blocks == 8
    assert survey(open_contents(url), Selection(tenant=BIG.parts["salt"][:8])).blocks == 5  # type: ignore[attr-defined]
    assert survey(open_contents(url), Selection(tenant="ff")).blocks == 0


def test_removing_a_namespace_that_there_is_not_says_so(url: str, capsys: pytest.CaptureFixture[str]):
    fill(url)
    assert run(capsys, url, "rm", "--namespace", "model=nobody", "--yes")[0] == 1
    assert run(capsys, url, "rm", "--older-than", "9d", "--yes")[0] == 0
    assert run(capsys, url, "rm", "--namespace", "model=tiny", "--yes")[0] == 0


def test_the_record_of_what_was_forgotten_stays(url: str, capsys: pytest.CaptureFixture[str]):
    with opened(url, TINY) as old:
        put(old, 2)
        old.forget("step-2")
        put(old, 1, first=5)
        old.close()
    code, report = run(capsys, url, "rm", "--all", "--yes")
    assert (code, report["removed"]) == (0, 1 if url.startswith("file") else 3)
    if url.startswith("local"):
        with opened(url, TINY) as other:  # with the weights of before
            assert other.wait(other.submit_put(keys(1), np.ones((1, other.bytes_per_block), np.uint8))).reasons == (
                "forgotten",
            )


def test_a_file_in_use_is_listed_and_neither_verified_nor_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    url = f"file://{tmp_path}/kv?size=1MiB"
    with opened(url, TINY) as store:
        put(store, 3)
        assert run(capsys, url, "ls")[1]["blocks"] == 3
        for arguments in (("stat", "--verify"), ("rm", "--all", "--yes"), ("rm", "--damaged")):
            code, message = run(capsys, url, *arguments)
            assert code == 1
            assert "is in use by another store" in message
        assert store.wait(store.submit_get(keys(3))).ok.all()


def test_damaged_blocks_are_found_by_reading_them_and_removed_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    url = f"file://{tmp_path}/kv?size=1MiB"
    with opened(url, TINY) as store:
        put(store, 3)
        corrupt_slots(store, [1], part="payload")
    assert run(capsys, url, "stat")[0] == 0
    code, report = run(capsys, url, "stat", "--verify")
    place = f"{tmp_path}/kv/blockyard-prefix.slab slot 1"
    assert (code, report["blocks"], report["damaged"]) == (1, 2, [{"block": place, "reason": "payload_checksum"}])
    assert cli.main(["store", url, "rm", "--damaged"]) == 1
    assert capsys.readouterr().out == f"damaged: {place}: payload_checksum\nwould remove 1 blocks: give --yes\n"
    code, report = run(capsys, url, "rm", "--damaged", "--yes")
    assert (code, report["removed"]) == (0, 1)
    assert run(capsys, url, "stat", "--verify")[0] == 0
    with opened(url, TINY) as store:
        assert store.wait(store.submit_get(keys(3))).ok.tolist() == [True, False, True]


def test_several_disks_are_one_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    url = f"file://{tmp_path}/a,{tmp_path}/b?size=2MiB"
    with opened(url, TINY) as store:
        put(store, 40)
    code, report = run(capsys, url, "stat")
    assert (code, report["blocks"]) == (0, 40)
    assert report["groups"][0]["parts"]["model"] == "tiny"
    assert run(capsys, url, "rm", "--all", "--yes")[1]["removed"] == 40
    assert found(url, TINY, 40) == 0


@pytest.mark.parametrize("text", ['{"parts": {"model": "a\\u001b[2J"}}', "no json", '{"parts": 7}', "[]", ""])
def test_a_text_that_others_may_have_written_harms_nothing(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    url = f"file://{tmp_path}/kv?size=1MiB"
    with opened(url, TINY) as store:
        put(store, 1)
    (tmp_path / "kv" / f"blockyard-{TINY.hex()[:16]}-about.json").write_text(text)
    code, report = run(capsys, url, "stat")
    assert (code, report["blocks"]) == (0, 1)
    assert report["groups"][0]["parts"] in ({}, {"model": "a?[2J"})


def test_the_stores_in_the_folders_of_a_directory_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """As adapters make them in a `root_dir`: LMCache's in `lmcache`, SGLang's by rank."""
    with opened(f"file://{tmp_path}/a b?size=1MiB", TINY) as store:
        put(store, 1)
    code, error = run(capsys, f"file://{tmp_path}", "ls")
    assert (code, f"there is no store in {tmp_path}: look into file://{tmp_path}/a%20b" in error) == (1, True)
    code, report = run(capsys, f"file://{tmp_path}/a%20b", "stat")
    assert (code, report["blocks"]) == (0, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["file:///nowhere", "ls"], "there is no store in /nowhere"),
        (["local:///nowhere", "ls"], "there is no store in this directory"),
        (["redis://user:hidden@127.0.0.1:1", "ls"], "'redis://***@127.0.0.1:1'"),
    ],
)
def test_a_store_that_cannot_be_opened_is_no_bad_usage(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    code, error = run(capsys, *arguments)
    assert code == 1
    assert message in error
    assert "hidden" not in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["file:///nowhere", "rm"], "rm needs a choice: --namespace"),
        (["memory://here", "ls"], "the scheme 'memory' cannot be looked into"),
        (["local:///nowhere", "stat", "--verify"], "--verify and --damaged are for file stores"),
        (["file:///nowhere", "ls", "--yes"], "--yes has no effect with ls and stat"),
        (["file:///nowhere", "rm", "--verify"], "--verify has no effect with rm"),
        (["file:///nowhere", "rm", "--damaged", "--tenant", "5f"], "--tenant has no effect with --damaged"),
        (["file:///nowhere", "rm", "--all", "--older-than", "1h"], "--all has no effect with a choice"),
        (["/var/cache/kv", "ls"], "has no scheme"),
    ],
)
def test_what_cannot_be_done_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    code, error = run(capsys, *arguments)
    assert code == 2
    assert message in error


def test_a_salt_in_place_of_its_digest_is_refused_with_the_digest(url: str, capsys: pytest.CaptureFixture[str]):
    with opened(url, BIG) as store:
        put(store, 5)
    for action in ("ls", "rm"):
        with pytest.raises(SystemExit) as ended:
            cli.main(["store", url, action, "--tenant", "secret of a tenant"])
        assert ended.value.code == 2
        digits = BIG.parts["salt"]  # type: ignore[attr-defined]
        assert f"the tenant with this salt is {digits}" in capsys.readouterr().err
    assert run(capsys, url, "rm", "--tenant", digits.upper(), "--yes")[1]["removed"] == 5


def test_rm_of_nothing_asks_for_no_yes(url: str, capsys: pytest.CaptureFixture[str]):
    fill(url)
    assert cli.main(["store", url, "rm", "--tenant", "ffff"]) == 0
    assert capsys.readouterr().out.endswith("no block is chosen, see ls\n")


@pytest.mark.parametrize("text", ["7", "7w", "-1h", "h", "nand", "infd"])
def test_an_age_has_a_unit(text: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli.main(["store", "file:///kv", "ls", f"--older-than={text}"])
    assert "is not an age such as 90s, 15min, 12h or 7d" in capsys.readouterr().err


def test_a_file_that_is_no_slab_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "kv"
    folder.mkdir(0o700)
    slab = folder / "blockyard-prefix.slab"
    slab.write_bytes(os.urandom(8192))
    slab.chmod(0o600)
    for mode, message in ((0o600, "is not a slab"), (0o644, "is not a file that only this user can read")):
        slab.chmod(mode)
        code, error = run(capsys, f"file://{folder}", "ls")
        assert code == 1
        assert message in error
