"""Configurations of vLLM, SGLang and LMCache in `blockyard doctor`: what is wrong, misspelt or without effect."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engine_drivers
import pytest
import vllm_modules

from blockyard.integrations.options import vllm as vllm_options
from blockyard.tools import setup_checks
from blockyard.tools.doctor import Check
from blockyard.tools.engine_config import _POLICY, _SPEC, _TIER, VllmConfig
from blockyard.tools.replay.engine import EngineOptions
from blockyard.tools.replay.plan import Prices, make_plan
from blockyard.tools.replay.step_time import LinearStepTime
from blockyard.traces import TraceRequest

ROOT = Path(__file__).parents[2]

SPEC = {"spec_module_path": vllm_modules.OURS, "spec_name": "BlockyardSpec", "host_bytes": 1 << 20}
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
    known = {"kv_connector_module_path": vllm_modules.OURS, "kv_load_failure_policy": "recompute"}
    return config(extra, connector, **known | fields)


def test_a_configuration_of_vllm_is_checked_with_its_store_and_shared_memory(checked: Any, tmp_path: Path):
    extra = SPEC | {"prefix_store": f"file://{tmp_path}/kv?size=1MiB"}
    names = ["engine", "engine_options", "host_memory", "store", "store_room", "shared_memory"]
    found = checked(config(extra))
    assert statuses(found) == [(name, "ok") for name in names]
    assert "1 MiB needed" in found[-1].found
    without = [name for name in names if not name.startswith("store")]
    assert statuses(checked(ours({"host_bytes": 1 << 20}))) == [(name, "ok") for name in without]
    tiers = TIERING | {"secondary_tiers": [TIER | {"root_dir": f"{tmp_path}/new/tier"}]}
    assert statuses(checked(config(tiers))) == [(name, "ok") for name in names]
    assert not (tmp_path / "new").exists(), "the tier creates it, and doctor leaves nothing"
    both = {"connectors": [ours({"host_bytes": 1 << 20}), config({}, "NixlConnector")]}
    multi = config(both, "MultiConnector", kv_load_failure_policy="fail")
    assert statuses(checked(multi)) == [(name, "ok") for name in without]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (config(SPEC | {"policy": "fifo", "blocks_per_chunk": 1.5}), ["policy", "blocks_per_chunk"]),
        (config(SPEC | {"host_bytes": "many", "policy": "fifo"}), ["host_bytes", "policy"]),
        (ours(SPEC | {"policy": "fifo"}, kv_role="kv_all"), ["kv_role", "policy"]),
        (
            config(TIERING | {"store_threshold": -1, "cpu_bytes_to_use": 0, "secondary_tiers": [MEMORY | {"sise": 1}]}),
            ["sise", "cpu_bytes_to_use", "store_threshold"],
        ),
    ],
)
def test_several_wrong_options_are_named_at_once(given: Any, names: list[str], checked: Any):
    said = next(check.found for check in checked(given) if check.name == "engine_options")
    assert [name for name in names if name in said] == names


def test_what_a_plan_prints_is_accepted(checked: Any, tmp_path: Path):
    rows = [TraceRequest(float(at), 33, 2, (at % 3, 5), 16.0) for at in range(6)]
    engine = EngineOptions(device_blocks=20, bytes_per_block=1 << 20)
    for host, store in ((0.03125, 0), (0.03125, 0.0625), (0, 2)):
        found = make_plan(
            rows, engine, LinearStepTime(0.01, 1e-4, 0, 0), Prices(1, 1, 1), host_gib=[host], store_gib=[store]
        )
        given = json.dumps(found.configuration().kv_transfer_config).replace("/var/cache", str(tmp_path))
        assert {status for _, status in statuses(checked(given))} == {"ok"}
        assert "host memory" in next(check.found for check in checked(given) if check.name == "engine_options")


@pytest.mark.parametrize("policy", ["AdaptivePolicy", "LRUPolicy"])
def test_a_policy_in_vllms_own_spec_is_blockyards(policy: str, checked: Any):
    extra = POLICY | {"eviction_policy": policy}
    for spec in ({}, {"spec_name": "CPUOffloadingSpec"}, {"spec_name": "TieringOffloadingSpec"}):
        names = ("engine", "engine_options", "host_memory", "shared_memory")
        assert statuses(checked(config(extra | spec))) == [(name, "ok") for name in names]


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        (config(SPEC | {"polcy": "lru"}), "fail", "without effect: 'polcy' (did you mean 'policy'?)"),
        (config(SPEC | {"revision": "2"}), "warn", "'revision' (needs 'prefix_store')"),
        (config(SPEC | {"policy": "fifo"}), "fail", "policy is 'fifo'"),
        (config(SPEC | {"cpu_bytes_to_use": 64}), "fail", "host_bytes and cpu_bytes_to_use is given"),
        (config(SPEC | {"host_bytes": 20}), "fail", 'host_bytes is 20, 20 B; did you mean "20GiB"?'),
        (config(SPEC | {"host_bytes": "20"}), "fail", 'did you mean "20GiB"?'),
        (ours({"host_bytes": "20MiB"}), "warn", "host_bytes is '20MiB', 20 MiB; did you mean \"20GiB\"?"),
        (config(POLICY | {"cpu_bytes_to_use": 20}), "fail", "cpu_bytes_to_use is 20, 20 B"),
        (config(SPEC | {"blocks_per_chunk": 1.5}), "fail", "blocks_per_chunk is 1.5, must be a whole number"),
        (config(SPEC | {"blocks_per_chunk": 2, "block_size": 32}), "fail", "must be at most one of them"),
        (config(SPEC | {"offload_prompt_only": "false"}), "fail", "offload_prompt_only is 'false'"),
        (config(SPEC | {"blocks_per_chnk": 2}), "fail", "did you mean 'blocks_per_chunk'?"),
        (config(SPEC | {"ofload_prompt_only": True}), "fail", "did you mean 'offload_prompt_only'?"),
        (config(TIERING | {"secondary_tiers": [TIER]}), "fail", "root_dir"),
        (config(TIERING | {"secondary_tiers": [MEMORY | {"sise": 1}]}), "fail", "'sise' (did you mean 'size'?)"),
        (
            config(TIERING | {"secondary_tiers": [MEMORY], "evicton_policy": "AdaptivePolicy"}),
            "fail",
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
        (config(POLICY | {"store_treshold": 2}), "fail", "did you mean 'store_threshold'?"),
        (config(POLICY | {"self_describing_kv_events": 7}), "fail", "self_describing_kv_events is 7"),
        (config(SPEC, kv_rol="kv_both"), "fail", "'kv_rol' (did you mean 'kv_role'?)"),
        (config(SPEC, kv_role="both"), "fail", "Unsupported kv_role: both"),
        (config({"connectors": [config(SPEC | {"policy": "fifo"})]}, "MultiConnector"), "fail", "policy is 'fifo'"),
        (ours({"host_bytes": "1GiB"}, kv_load_failure_policy=None), "warn", '"recompute" computes them again'),
        (ours({"host_bytes": "1GiB", "policy": "adaptive"}), "warn", "with 'policy', the host copies every"),
        (ours({"host_bytes": "1GiB", "blocks_per_chunk": 2}), "warn", "with 'blocks_per_chunk' above 1"),
        (
            ours({"host_bytes": "1GiB", "prefix_writes": "second_use", "prefix_store": "memory://x?size=2GiB"}),
            "warn",
            'with "prefix_writes": "second_use"',
        ),
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
    assert len(blocks) == 6
    with vllm_modules.loaded("stand-in 0.33"):
        for block in blocks:
            found = VllmConfig(json.loads(block))
            assert (found.wrong, found.unused, found.doubts) == ([], [], [])
            assert found.ours


@pytest.mark.parametrize("source", vllm_modules.SOURCES or [pytest.param("", marks=pytest.mark.skip("no VLLM_SOURCE"))])
def test_the_tables_have_the_options_that_vllm_reads(source: str):
    offload = Path(source, "vllm/v1/kv_offload")
    connector = Path(source, "vllm/distributed/kv_transfer/kv_connector/v1/offloading/config.py")
    files = [offload / name for name in ("base.py", "factory.py", "cpu/spec.py", "tiering/spec.py")]
    text = "".join(file.read_text() for file in (*files, connector))
    with vllm_modules.loaded(source) as vllm:
        options = vllm_options.OPTIONS
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
        ("sglang", HICACHE | {"root_dir": "/x", "interface_v1": 2}, "fail", "must be true or false (or 1 or 0)"),
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
        (
            "lmcache",
            PLUGIN | {"adapter_params": PARAMS, "max_capacity_gb": 1, "eviction": {"eviction_policy": "LRU"}},
            "warn",
            "LMCache deletes chunks, too",
        ),
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


def test_the_names_known_without_vllm_are_those_that_it_reads():
    with vllm_modules.loaded("stand-in 0.33") as vllm:
        assert tuple(field.name for field in dataclasses.fields(vllm.current.KVTransferConfig)) == vllm_options.FIELDS


MISSING: list[tuple[dict[str, Any], str, str]] = [
    (config(SPEC | {"polcy": "lru"}), "fail", "'polcy' (did you mean 'policy'?)"),
    (config(SPEC | {"host_bytes": "20GB x"}), "fail", "host_bytes: '20GB x' is not a size"),
    (config(SPEC, kv_rol="kv_both"), "fail", "'kv_rol' (did you mean 'kv_role'?)"),
    (config(SPEC, kv_role="kv_bth"), "fail", "kv_role is 'kv_bth' (did you mean 'kv_both'?)"),
    (ours({"host_bytes": 1 << 20}, kv_load_failure_policy="recomptue"), "fail", "did you mean 'recompute'?"),
    (ours({"host_bytes": 1}, kv_connector_module_path=f"{OURS}.nowhere"), "fail", "kv_connector_module_path is"),
    (config(TIERING | {"secondary_tiers": [TIER | {"sise": 1}]}), "fail", "'sise' (did you mean 'size'?)"),
    (ours({"host_bytes": 1 << 20}, kv_connector_module_path=f"{OURS}.exclusive_host.connector"), "ok", "1 MiB"),
    (HICACHE | {"url": "memory://x?size=1MiB", "sise": 1}, "fail", "'sise' (did you mean 'size'?)"),
    (LINKER | {"linker_extra_config": {"url": "memory://x?size=1MiB", "stagin": 1}}, "fail", "'staging'?"),
    (PLUGIN | {"adapter_params": PARAMS | {"revison": "1"}}, "fail", "'revision'?"),
]


@pytest.mark.parametrize(("given", "status", "said"), MISSING)
def test_a_configuration_is_checked_without_its_engine(
    given: dict[str, Any], status: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(setup_checks, "_version", lambda package: "")
    engine = "vllm" if "kv_connector" in given else "lmcache" if "type" in given else "sglang"
    (tmp_path / "config.json").write_text(json.dumps(given))
    missing, found, *_ = setup_checks.check_engine(engine, tmp_path / "config.json")
    assert (missing.name, missing.status) == ("engine", "warn")
    assert missing.found == (
        f"{engine} is not installed for this Python: what it alone can read of its configuration is not checked"
    )
    assert (found.name, found.status) == ("engine_options", status)
    assert said in f"{found.found} {found.advice}"


def test_a_store_without_its_engine_is_checked(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(ours({"host_bytes": 1 << 20, "prefix_store": "redis://no size"})))
    *_, store, _ = setup_checks.check_engine("vllm", tmp_path / "config.json")
    assert (store.name, store.status) == ("store", "fail")


def test_a_store_smaller_than_the_host_memory_above_it_is_a_warning(checked: Any):
    tier = TIERING | {"secondary_tiers": [MEMORY]}
    for given in (
        config(SPEC | {"prefix_store": "memory://x?size=1000KiB"}),
        config(tier | {"cpu_bytes_to_use": 1 << 21}),
    ):
        small = checked(given)[-2]
        assert (small.name, small.status) == ("store_size", "warn")
        assert "of host memory above it" in small.found
