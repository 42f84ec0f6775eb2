"""`blockyard doctor` on a set-up: stores that work and that do not, `/dev/shm`, and an engine's version."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis
from servers import admit, serving

from blockyard.stores import open_store
from blockyard.tools import cli, setup_checks
from blockyard.tools.doctor import Check


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_checks, "_SLOW", 100.0)  # a busy machine is no slow store


def statuses(checks: Iterator[Check]) -> list[tuple[str, str]]:
    return [(check.name, check.status) for check in checks]


def test_a_file_store_is_tried_and_leaves_nothing(tmp_path: Path):
    for number, url in enumerate((f"file://{tmp_path}/kv?size=1MiB", f"file://{tmp_path}/a,{tmp_path}/b?size=1MiB"), 1):
        checks = list(setup_checks.check_store(url))
        assert statuses(iter(checks)) == [("store", "ok"), *[("store_room", "ok")] * number]
        assert "wrote a block of 64 KiB in 0." in checks[0].found
    assert not list(tmp_path.iterdir())


def test_a_size_below_that_of_the_store_there_is_a_warning(tmp_path: Path):
    url = f"file://{tmp_path}/kv?size="
    with open_store(f"{url}4MiB", bytes_per_block=4096, use="prefix"):
        pass
    *_, size = setup_checks.check_store(f"{url}2MiB")
    assert (size.name, size.status) == ("store_size", "warn")
    assert "more than the 2 MiB of the URL" in size.found
    for same in ("4MiB", "2MiB&drop=on"):
        assert statuses(setup_checks.check_store(url + same)) == [("store", "ok"), ("store_room", "ok")]
    url = f"file://{tmp_path}/a,{tmp_path}/b,{tmp_path}/c?size=4MB"
    with open_store(url, bytes_per_block=4096, use="prefix"):
        pass
    assert statuses(setup_checks.check_store(url)) == [("store", "ok"), *[("store_room", "ok")] * 3]


def test_a_store_in_a_shared_directory_is_tried_and_leaves_nothing(tmp_path: Path):
    (tmp_path / "there").mkdir()
    for folder in ("there", "new/kv"):
        assert statuses(setup_checks.check_store(f"local://{tmp_path}/{folder}?size=1MiB")) == [("store", "ok")]
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_a_slow_store_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(setup_checks, "_SLOW", 0.0)
    assert next(setup_checks.check_store(f"file://{tmp_path}/kv?size=1MiB")).status == "warn"


def test_a_disk_without_room_is_named_before_an_engine_fails_on_it(tmp_path: Path):
    *_, room = setup_checks.check_store(f"file://{tmp_path}/kv?size=900000GiB")
    assert (room.name, room.status) == ("store_room", "fail")
    assert f"for 879 TiB in {tmp_path}/kv" in room.found


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("file:///kv", "file:///kv has no size"),
        ("redis://user:hidden@127.0.0.1:1?size=1GiB", "'redis://***@127.0.0.1:1?size=1GiB': Connection refused"),
        ("redis://127.0.0.1?size=1GiB&thread=2", "'thread=2' is not an option of this store"),
        ("/var/kv", "has no scheme"),
    ],
)
def test_a_store_that_does_not_work_is_a_failed_check_without_a_secret(url: str, found: str):
    (check,) = setup_checks.check_store(url)
    assert (check.name, check.status) == ("store", "fail")
    assert found in check.found
    assert check.advice
    assert "hidden" not in check.found


def test_a_server_with_less_memory_or_fewer_rights_than_a_store_needs_is_named(tmp_path: Path):
    with serving("valkey-server", tmp_path) as server, redis.Redis(port=server.port) as client:
        url = f"redis://127.0.0.1:{server.port}?size=100MiB"
        _, room = setup_checks.check_store(url)
        assert room.status == "ok"
        assert re.fullmatch(
            r"the server has no limit \(maxmemory\) for 100 MiB, policy noeviction, [\d.]+ MiB in use", room.found
        )
        _, room = setup_checks.check_store(url.replace("100MiB", "900TiB"))
        assert (room.status, "for 900 TiB, policy noeviction, on a machine of" in room.found) == ("warn", True)
        assert "name a smaller size" in room.advice
        advice = ""
        for megabytes in (101, 126):  # an allocator that rounds up needs a quarter more
            client.config_set("maxmemory", megabytes << 20)
            _, room = setup_checks.check_store(url)
            advice += room.advice
        assert "unless this store holds what is in use, remove old blocks" in advice
        client.config_set("maxmemory", 50 << 20)
        _, room = setup_checks.check_store(url)
        assert room.status == "warn"
        assert "plus 550 bytes per block" in room.advice
        admit(server)
        mine = url.replace("127", "kv-tier:PASSWORD@127")
        found = list(setup_checks.check_store(mine))
        assert statuses(iter(found)) == [("store", "ok"), ("store_room", "warn")], found
        client.execute_command("ACL", "SETUSER", "kv-tier", "-zadd")
        *_, refused = setup_checks.check_store(mine)
        assert refused.status == "fail"
        assert "the server refuses ZADD: a prefix store needs Redis 6.2 or newer" in refused.found
        client.execute_command("ACL", "SETUSER", "kv-tier", "+zadd")
        assert not [key for key in client.scan_iter() if b":order" in key or b":listed" in key]


def test_a_server_that_wants_a_password_or_no_tls_is_said_so(tmp_path: Path):
    with serving("valkey-server", tmp_path, "--requirepass", "pw") as server:
        (check,) = setup_checks.check_store(f"redis://127.0.0.1:{server.port}?size=1MiB")
        assert "password_file=" in check.advice
        (check,) = setup_checks.check_store(f"valkeys://127.0.0.1:{server.port}?size=1MiB&timeout_base=0.5")
        assert check.advice == "perhaps the port does not speak TLS: then write valkey://"


@pytest.mark.parametrize(
    ("allocator", "most", "status", "wanted"),
    [
        ("jemalloc-5.3.0", 120, "warn", "125 MiB plus 550 bytes per block, a quarter more than size"),
        ("jemalloc-5.3.0", 125, "ok", ""),
        ("libc", 120, "ok", ""),
        ("libc", 99, "warn", "set maxmemory to 100 MiB plus 550 bytes per block"),
        ("jemalloc-5.3.0", 0, "ok", ""),
    ],
)
def test_a_server_with_jemalloc_needs_a_quarter_more(
    allocator: str, most: int, status: str, wanted: str, monkeypatch: pytest.MonkeyPatch
):
    facts = {"maxmemory": most << 20, "maxmemory_policy": "noeviction", "mem_allocator": allocator}
    monkeypatch.setattr(setup_checks, "Servers", lambda url: SimpleNamespace(info=lambda: facts))
    (room,) = setup_checks._check_room("redis://127.0.0.1?size=100MiB", 100 << 20)
    assert room.status == status
    assert wanted in room.advice


def test_shared_memory_is_compared_with_what_the_workers_share(tmp_path: Path):
    assert setup_checks.check_shared_memory(0, tmp_path).status == "ok"
    assert setup_checks.check_shared_memory(1 << 60, tmp_path).status == "fail"
    assert setup_checks.check_shared_memory(0, tmp_path / "none").status == "fail"


def test_host_tiers_are_compared_with_the_memory_of_the_machine_and_of_its_container(tmp_path: Path):
    facts, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    facts.write_text("MemTotal:       1024 kB\nMemFree: 1 kB\nMemAvailable:    512 kB\n")
    for kib, most, status in (
        (512, "max", "ok"),
        (513, "max", "warn"),
        (1024, "max", "warn"),
        (1025, "max", "fail"),
        (256, str(256 << 10), "ok"),
        (257, str(256 << 10), "fail"),
    ):
        limit.write_text(most)
        found = setup_checks.check_memory(kib << 10, facts, limit)
        assert (found.name, found.status) == ("host_memory", status)
    assert setup_checks.check_memory(1, tmp_path / "none", limit).status == "warn"
    facts.write_text("no facts")
    assert setup_checks.check_memory(1, facts, limit).status == "warn"


def test_a_file_store_that_another_process_has_open_is_a_warning(tmp_path: Path):
    url = f"file://{tmp_path}/kv?size=1MiB"
    with open_store(url, bytes_per_block=4096, namespace=bytes(32), use="prefix"):
        store, lock, room = setup_checks.check_store(url)
        assert (store.status, room.status) == ("ok", "ok")
        assert (lock.name, lock.status) == ("store_lock", "warn")
        assert f"{tmp_path}/kv is in use by another process" in lock.found
    assert statuses(setup_checks.check_store(url)) == [("store", "ok"), ("store_room", "ok")]


def test_a_configuration_that_does_not_exist_is_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "none.json"
    assert cli.main(["doctor", "--engine", "vllm", "--config", str(path)]) == 2
    assert capsys.readouterr().err == f"blockyard: cannot read {path}: there is no such file\n"


def test_a_right_configuration_passes_where_its_engine_is_not_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path, url = tmp_path / "config.json", f"file://{tmp_path}/kv?size=1MiB"
    fields = {"kv_role": "kv_both", "kv_connector_module_path": "blockyard.integrations.vllm"}
    fields |= {"kv_connector": "BlockyardKVConnector", "kv_load_failure_policy": "recompute"}
    path.write_text(json.dumps(fields | {"kv_connector_extra_config": {"host_bytes": 4096, "prefix_store": url}}))
    assert cli.main(["doctor", "--engine", "vllm", "--config", str(path), "--format", "json"]) == 0
    found = [(check["name"], check["status"]) for check in json.loads(capsys.readouterr().out)["checks"]]
    assert ("engine", "warn") in found
    assert [name for name, _ in found].count("shared_memory") == 1


def test_an_engine_that_is_not_installed_fails(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["doctor", "--engine", "vllm", "--format", "json"]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [check["name"] for check in checks[-2:]] == ["engine", "shared_memory"]
    assert checks[-2]["found"] == "vllm is not installed for this Python"
    assert cli.main(["doctor", "--config", "file.json"]) == 2
    assert "--config has no effect without --engine" in capsys.readouterr().err


def test_an_untested_version_is_a_warning_and_a_foreign_one_a_failure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(setup_checks, "_version", lambda package: "9.9" if package == "vllm" else "")
    check, _ = setup_checks.check_engine("vllm", None)
    assert check.status == "fail"
    assert "needs vLLM 0.32 or 0.33" in check.found
