"""`blockyard doctor` on a set-up: stores that work and that do not, `/dev/shm`, and the options that vLLM gets."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_drivers
import pytest
import redis
import vllm_modules
from servers import admit, serving

from blockyard.tools import cli, setup_checks
from blockyard.tools.doctor import Check
from blockyard.tools.vllm_config import _POLICY, _SPEC, _TIER, VllmConfig

ROOT = Path(__file__).parents[2]

SPEC = {"spec_module_path": vllm_modules.OURS, "spec_name": "BlockyardSpec", "host_bytes": "1MiB"}
OURS = vllm_modules.OURS
TIERING = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 20}
TIER = {"type": "BlockyardTier", "module_path": OURS, "revision": "1", "size": "1MiB"}
MEMORY = {"type": "BlockyardTier", "module_path": OURS, "revision": "1", "url": "memory://x?size=1MiB"}
POLICY = {"eviction_policy": "AdaptivePolicy", "cache_policy_module_path": OURS, "cpu_bytes_to_use": 1 << 20}


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


def test_a_slow_store_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(setup_checks, "_SLOW", 0.0)
    assert next(setup_checks.check_store(f"file://{tmp_path}/kv?size=1MiB")).status == "warn"


def test_a_disk_without_room_is_named_before_an_engine_fails_on_it(tmp_path: Path):
    *_, room = setup_checks.check_store(f"file://{tmp_path}/kv?size=900000GiB")
    assert (room.name, room.status) == ("store_room", "fail")
    assert f"for 9e+05 GiB in {tmp_path}/kv" in room.found


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
        assert (room.status, room.found) == (
            "ok",
            "the server has no limit (maxmemory) for 0.0977 GiB, policy noeviction",
        )
        client.config_set("maxmemory", 50 << 20)
        _, room = setup_checks.check_store(url)
        assert room.status == "warn"
        assert "plus 550 bytes per block" in room.advice
        admit(server)
        mine = url.replace("127", "blockyard:PASSWORD@127")
        assert statuses(setup_checks.check_store(mine)) == [("store", "ok"), ("store_room", "warn")]
        client.execute_command("ACL", "SETUSER", "blockyard", "-zadd")
        *_, refused = setup_checks.check_store(mine)
        assert refused.status == "fail"
        assert "the server refuses ZADD: a prefix store needs Redis 6.2 or newer" in refused.found
        client.execute_command("ACL", "SETUSER", "blockyard", "+zadd")
        assert not [key for key in client.scan_iter() if b":order" in key or b":listed" in key]


@pytest.mark.parametrize(
    ("allocator", "most", "status", "wanted"),
    [
        ("jemalloc-5.3.0", 120, "warn", "0.122 GiB plus 550 bytes per block, a quarter more than size"),
        ("jemalloc-5.3.0", 125, "ok", ""),
        ("libc", 120, "ok", ""),
        ("libc", 99, "warn", "set maxmemory to 0.0977 GiB plus 550 bytes per block"),
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


def test_an_engine_that_is_not_installed_fails(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["doctor", "--engine", "vllm", "--format", "json"]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [check["name"] for check in checks[-2:]] == ["shared_memory", "engine"]
    assert checks[-1]["found"] == "vllm is not installed for this Python"
    assert cli.main(["doctor", "--config", "file.json"]) == 2
    assert "--config has no effect without --engine" in capsys.readouterr().err


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def check(config: object) -> list[Check]:
        path = tmp_path / "config.json"
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        return list(setup_checks.check_engine("vllm", path))

    monkeypatch.setattr(setup_checks, "_version", lambda package: "0.33.0" if package == "vllm" else "")
    with vllm_modules.loaded("stand-in 0.33"):
        yield check


def config(extra: dict[str, Any], connector: str = "OffloadingConnector", **fields: Any) -> dict[str, Any]:
    return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra} | fields


def ours(extra: dict[str, Any], connector: str = "BlockyardKVConnector", **fields: Any) -> dict[str, Any]:
    return config(extra, connector, **{"kv_connector_module_path": vllm_modules.OURS} | fields)


def test_a_configuration_of_vllm_is_checked_with_its_store_and_shared_memory(checked: Any, tmp_path: Path):
    extra = SPEC | {"prefix_store": f"file://{tmp_path}/kv?size=1MiB"}
    names = ["engine", "engine_options", "shared_memory", "store", "store_room"]
    assert statuses(checked(config(extra))) == [(name, "ok") for name in names]
    assert statuses(checked(ours({"host_bytes": "1MiB"}))) == [("engine", "ok"), ("engine_options", "ok")]
    tiers = TIERING | {"secondary_tiers": [TIER | {"root_dir": f"{tmp_path}/new/tier"}]}
    names = ["engine", "engine_options", "store", "store_room"]
    assert statuses(checked(config(tiers))) == [(name, "ok") for name in names]
    assert not (tmp_path / "new").exists(), "the tier creates it, and doctor leaves nothing"
    both = {"connectors": [ours({"host_bytes": "1MiB"}), config({}, "NixlConnector")]}
    assert statuses(checked(config(both, "MultiConnector"))) == [("engine", "ok"), ("engine_options", "ok")]


@pytest.mark.parametrize("policy", ["AdaptivePolicy", "LRUPolicy"])
def test_a_policy_in_vllms_own_spec_is_blockyards(policy: str, checked: Any):
    extra = POLICY | {"eviction_policy": policy}
    for spec in ({}, {"spec_name": "CPUOffloadingSpec"}, {"spec_name": "TieringOffloadingSpec"}):
        assert statuses(checked(config(extra | spec))) == [("engine", "ok"), ("engine_options", "ok")]


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        (config(SPEC | {"polcy": "lru"}), "warn", "without effect: 'polcy' (did you mean 'policy'?)"),
        (config(SPEC | {"revision": "2"}), "warn", "'revision' (needs 'prefix_store')"),
        (config(SPEC | {"policy": "fifo"}), "fail", "policy is 'fifo'"),
        (config(SPEC | {"cpu_bytes_to_use": 64}), "fail", "host_bytes and cpu_bytes_to_use is given"),
        (config(SPEC | {"blocks_per_chunk": 1.5}), "fail", "blocks_per_chunk is 1.5, must be a whole number"),
        (config(SPEC | {"blocks_per_chunk": 2, "block_size": 32}), "fail", "must be at most one of them"),
        (config(SPEC | {"offload_prompt_only": "false"}), "fail", "offload_prompt_only is 'false'"),
        (config(SPEC | {"blocks_per_chnk": 2}), "warn", "did you mean 'blocks_per_chunk'?"),
        (config(SPEC | {"ofload_prompt_only": True}), "warn", "did you mean 'offload_prompt_only'?"),
        (config(TIERING | {"secondary_tiers": [TIER]}), "fail", "root_dir"),
        (config(TIERING | {"secondary_tiers": [MEMORY | {"sise": 1}]}), "fail", "'sise' (did you mean 'size'?)"),
        (
            config(TIERING | {"secondary_tiers": [MEMORY], "evicton_policy": "AdaptivePolicy"}),
            "warn",
            "'evicton_policy' (did you mean 'eviction_policy'?)",
        ),
        (config(TIERING | {"secondary_tiers": [MEMORY | {"type": "BlockyardTeir"}]}), "fail", "'BlockyardTier'?"),
        (config(TIERING | {"secondary_tiers": [MEMORY], "cpu_bytes_to_use": "1GiB"}), "fail", "without a unit"),
        (
            config({"cpu_bytes_to_use": 1 << 20, "secondary_tiers": [MEMORY]}),
            "warn",
            "'secondary_tiers' (needs 'spec_name': 'TieringOffloadingSpec')",
        ),
        (config(SPEC | {"spec_name": "BlockyardSpecc"}), "fail", "did you mean 'BlockyardSpec'?"),
        (config(SPEC | {"spec_module_path": "blockyard.integration.vllm"}), "fail", f"did you mean '{OURS}'?"),
        (config(SPEC | {"spec_module_path": "blokyard.integrations.vllm"}), "fail", f"did you mean '{OURS}'?"),
        (config({"spec_name": "BlockyardSpec", "host_bytes": 1}), "fail", "without spec_module_path"),
        (config({"spec_module_path": OURS}), "warn", "'spec_module_path' (needs 'spec_name': 'BlockyardSpec')"),
        (config({"host_bytes": 1}, "BlockyardKVConnector"), "fail", "without kv_connector_module_path"),
        (ours({"host_bytes": 1}, "BlockyardKVConector"), "fail", "did you mean 'BlockyardKVConnector'?"),
        (ours({"host_bytes": 1}, "OffloadingConnector"), "fail", "kv_connector is 'OffloadingConnector'"),
        (
            ours({"host_bytes": 1}, kv_connector_module_path="blockyard.integrations.vllm_v0"),
            "fail",
            f"did you mean '{OURS}'?",
        ),
        (ours({"host_bytes": 1, "spec_name": "CPUOffloadingSpec"}), "fail", "but BlockyardKVConnector has"),
        (config(POLICY | {"eviction_policy": "Adaptivepolicy"}), "fail", "did you mean 'AdaptivePolicy'?"),
        (config(POLICY | {"eviction_policy": "lru"}), "warn", "'cache_policy_module_path' (needs 'eviction_policy'"),
        (config({"eviction_policy": "LRUPolicy", "cpu_bytes_to_use": 1}), "fail", "without cache_policy_module_path"),
        (config(POLICY | {"cpu_bytes_to_use": None}), "fail", "cpu_bytes_to_use is None"),
        (config(POLICY | {"store_treshold": 2}), "warn", "did you mean 'store_threshold'?"),
        (config(POLICY | {"self_describing_kv_events": 7}), "fail", "self_describing_kv_events is 7"),
        (config(SPEC, kv_rol="kv_both"), "fail", "'kv_rol' (did you mean 'kv_role'?)"),
        (config(SPEC, kv_role="both"), "fail", "Unsupported kv_role: both"),
        (config({"connectors": [config(SPEC | {"policy": "fifo"})]}, "MultiConnector"), "fail", "policy is 'fifo'"),
        (config({}), "warn", "Blockyard is not named"),
        (config({"spec_name": "CacheSpec", "spec_module_path": "theirs"}), "warn", "Blockyard is not named"),
        (config({"eviction_policy": "LRUPolicy", "cache_policy_module_path": "theirs"}), "warn", "is not named"),
    ],
)
def test_an_option_that_is_wrong_or_unused_is_named(given: object, status: str, said: str, checked: Any):
    found = checked(given)
    assert found[0].status == "ok"
    assert (found[1].name, found[1].status) == ("engine_options", status)
    assert said in f"{found[1].found} {found[1].advice}"


def test_each_documented_configuration_is_right():
    blocks = re.findall(r"```json\n(.*?)```", (ROOT / "docs/engines/vllm.md").read_text(), re.DOTALL)
    assert len(blocks) == 5
    with vllm_modules.loaded("stand-in 0.33"):
        for block in blocks:
            found = VllmConfig(json.loads(block))
            assert (found.wrong, found.unused) == ([], [])
            assert found.ours


@pytest.mark.parametrize("source", vllm_modules.SOURCES or [pytest.param("", marks=pytest.mark.skip("no VLLM_SOURCE"))])
def test_the_tables_have_the_options_that_vllm_reads(source: str):
    offload = Path(source, "vllm/v1/kv_offload")
    connector = Path(source, "vllm/distributed/kv_transfer/kv_connector/v1/offloading/config.py")
    files = [offload / name for name in ("base.py", "factory.py", "cpu/spec.py", "tiering/spec.py")]
    text = "".join(file.read_text() for file in (*files, connector))
    with vllm_modules.loaded(source) as vllm:
        options = vllm.ours.spec.OPTIONS
        stand_in = {field.name for field in dataclasses.fields(vllm.current.KVTransferConfig)}
    known = {*options["CPUOffloadingSpec"], *options["TieringOffloadingSpec"]}
    assert set(re.findall(r'extra_config\.get\(\s*"(\w+)"', text)) == known
    fields = Path(source, "vllm/config/kv_transfer.py").read_text()
    assert stand_in == set(re.findall(r"^    (\w+): [^=\n]+ = ", fields, re.MULTILINE))
    places = {"factory.py": _SPEC, "tiering/factory.py": _TIER, "cpu/policies/factory.py": _POLICY}
    for file, place in places.items():
        registered = re.findall(r'^\w+\.register_\w+\(\s*"(\w+)"', (offload / file).read_text(), re.MULTILINE)
        assert tuple(registered) == place.builtin


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def check(engine: str, config: object) -> list[Check]:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        return list(setup_checks.check_engine(engine, path))

    monkeypatch.setattr(setup_checks, "_version", lambda package: "1" if package in {"sglang", "lmcache"} else "")
    with engine_drivers.sglang(), engine_drivers.lmcache():
        importlib.import_module("blockyard.integrations.sglang.linker")
        yield check


HICACHE = {
    "backend_name": "blockyard",
    "module_path": "blockyard.integrations.sglang",
    "class_name": "BlockyardHiCache",
    "interface_v1": 1,
}
LINKER = {"linker": "BlockyardLinker", "linker_module_path": "blockyard.integrations.sglang.linker"}
PLUGIN = {
    "type": "native_plugin",
    "module_path": "blockyard.integrations.lmcache",
    "class_name": "BlockyardConnector",
}
PARAMS = {"kv_dtype": "bfloat16", "revision": "1", "url": "memory://x?size=1MiB"}


@pytest.mark.parametrize("engine", ["sglang", "lmcache"])
def test_each_documented_configuration_of_another_engine_is_right(engine: str, other: Any, tmp_path: Path):
    blocks = re.findall(r"```json\n(.*?)```", (ROOT / f"docs/engines/{engine}.md").read_text(), re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        given = block.replace("/var/cache/blockyard", str(tmp_path / "new" / "kv")).replace("500GiB", "1MiB")
        given = re.sub(r"redis://[^?]*\?size=\w+", "memory://x?size=1MiB", given)
        found = other(engine, json.loads(given))
        assert {check.status for check in found if check.name != "engine"} == {"ok"}
        assert [check.name for check in found][1:3] == ["engine_options", "store"]
    assert not (tmp_path / "new").exists(), "nothing stays behind"


@pytest.mark.parametrize(
    ("engine", "given", "status", "said"),
    [
        ("sglang", HICACHE | {"root_dir": "/x", "sise": 1}, "fail", "'sise' (did you mean 'size'?)"),
        ("sglang", HICACHE | {"root_dir": "/x", "class_name": "BlockyardHicach"}, "fail", "'BlockyardHiCache'?"),
        ("sglang", HICACHE | {"root_dir": "/x", "module_path": "blockyard.integration.sglang"}, "fail", "sglang'?"),
        ("sglang", HICACHE | {"root_dir": "/x", "interface_v1": "0"}, "fail", "interface_v1 is '0'"),
        ("sglang", HICACHE | {"root_dir": "/x", "prefetch_threshold": "9"}, "fail", "'9', must be int"),
        ("sglang", {"class_name": "BlockyardHiCache", "module_path": HICACHE["module_path"]}, "fail", "backend_name"),
        ("sglang", {"backend_name": "x", "class_name": "Theirs", "module_path": "theirs"}, "warn", "is not named"),
        ("sglang", LINKER | {"linker_extra_config": {"url": "memory://x?size=1", "stagin": 1}}, "fail", "'staging'?"),
        ("sglang", LINKER | {"linker": "BlockyardLinkr"}, "fail", "'BlockyardLinker'?"),
        ("sglang", LINKER | {"linker_extra": {}}, "fail", "'linker_extra_config'?"),
        ("lmcache", PLUGIN | {"adapter_params": PARAMS | {"kv_dtype": "bf16"}}, "fail", "kv_dtype is 'bf16'"),
        ("lmcache", PLUGIN | {"adapter_params": PARAMS | {"revison": "1"}}, "fail", "'revision'?"),
        ("lmcache", PLUGIN | {"adapter_params": PARAMS, "type": "nativ"}, "fail", "must be 'native_plugin'"),
        ("lmcache", PLUGIN | {"adapter_params": PARAMS, "class_name": "BlockyardConector"}, "fail", "Connector'?"),
        ("lmcache", PLUGIN | {"adapter_params": PARAMS, "max_capacity_gb": 1}, "warn", "'max_capacity_gb' (leave"),
        ("lmcache", {"type": "fs"}, "warn", "is not named"),
    ],
)
def test_a_wrong_name_or_value_for_another_engine_is_named(
    engine: str, given: object, status: str, said: str, other: Any
):
    found = other(engine, given)[1]
    assert (found.name, found.status) == ("engine_options", status)
    assert said in f"{found.found} {found.advice}"
    assert f"docs/engines/{engine}.md" in found.advice or status == "warn"


def test_every_wrong_name_is_said_at_once(checked: Any):
    found = checked(config(SPEC | {"spec_name": "BlockyardSpecc", "policy": "fifo", "polcy": "lru"}, kv_role="x"))[1]
    for said in ("'BlockyardSpecc'", "policy is 'fifo'", "Unsupported kv_role"):
        assert said in found.found


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_file_that_is_no_object_is_named(text: str, checked: Any, tmp_path: Path):
    assert checked(text)[1].status == "fail"
    assert str(tmp_path / "config.json") in checked(text)[1].found


def test_an_untested_version_is_a_warning_and_a_foreign_one_a_failure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(setup_checks, "_version", lambda package: "9.9" if package == "vllm" else "")
    (check,) = setup_checks.check_engine("vllm", None)
    assert check.status == "fail"
    assert "needs vLLM 0.32 or 0.33" in check.found
