"""Each option of each engine's adapter, with each value that JSON can hold: used, refused by its name, or said once."""

import itertools
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_drivers
import numpy as np
import pytest
import vllm_modules
from engine_drivers import FaultyStore

from blockyard.errors import BlockyardError, InvalidArgumentError
from blockyard.integrations.options import sglang as sglang_options
from blockyard.integrations.options import vllm as vllm_options
from blockyard.offload import OffloadManager
from blockyard.stores import register
from blockyard.stores.adapters import objects

register("faulty")(FaultyStore)
BLOCK = 4096
VALUES: list[Any] = [
    *(True, False, 0, 1, 7, -1, 0.5, 1.5, 1048576.0, 1e300, float("nan"), 1 << 20, 10**30),
    *(
        "",
        "x",
        "7",
        "1.5",
        "true",
        "auto",
        "LRU",
        "bf16",
        "64G",
        "1MiB",
        "1 MiB",
        "~/cache",
        "file:///tmp/x",
        "file:/x",
    ),
    *([], ["x"], {}, {"a": 1}),
]
SIZES: list[Any] = [1048576.0, 1 << 20, "1MiB", "1 MiB"]
TEXTS = [value for value in VALUES if isinstance(value, str)]
NAMES = [text for text in TEXTS if text]
FOLDERS = [text for text in TEXTS if text and ":" not in text and "~" not in text]


class Adapter:
    """How an engine opens an adapter, and which of `VALUES` each option takes."""

    engine = "vllm"

    def __init__(self, stack: ExitStack, root: Path) -> None:
        self.base: dict[str, Any] = {"root_dir": str(root / "folder"), "size": "1MiB", "revision": "1"}
        self.taken: dict[str, list[Any]] = {"root_dir": FOLDERS, "url": [], "size": SIZES, "revision": NAMES}
        self.enter(stack)

    def enter(self, stack: ExitStack) -> None:
        stack.enter_context(engine_drivers.sglang())

    def open(self, options: dict[str, Any]) -> Callable[[], object]:
        """Open it with these options besides those it needs; return how to close it."""
        raise NotImplementedError

    def place(self, options: dict[str, Any]) -> dict[str, Any]:
        """Join options; a `url` takes the place of the folder."""
        hidden = {"root_dir", "size"} - set(options) if "url" in options else set()
        return {name: value for name, value in {**self.base, **options}.items() if name not in hidden}


class Spec(Adapter):
    """`BlockyardSpec` and its manager."""

    number = itertools.count()

    def enter(self, stack: ExitStack) -> None:
        self.vllm = stack.enter_context(vllm_modules.loaded("stand-in 0.32"))
        self.base = {"host_bytes": "1MiB", "prefix_store": "faulty://one", "revision": "1"}
        flags = [0, 1, True, False]
        self.taken = {
            **dict.fromkeys(("host_bytes", "cpu_bytes_to_use"), SIZES),
            "policy": [],
            "prefix_store": [],
            "revision": NAMES,
            "prefetch_timeout_base": [0.5, 1, 1.5, 7],
            "prefix_writes": [],
            **dict.fromkeys(("weights_fixed", "offload_prompt_only", "self_describing_kv_events"), flags),
            # vLLM reads them, with int(): they must be what it has read, here 1 block of 16 tokens.
            "blocks_per_chunk": [1],
            "block_size": [],
        }

    def open(self, options: dict[str, Any]) -> Callable[[], object]:
        given = {**self.base, **options}
        if "cpu_bytes_to_use" in options:
            given.pop("host_bytes")
        if given["prefix_store"] is None and "revision" not in options:
            given.pop("revision")
        config = vllm_modules.config(self.vllm, {}, block_bytes=BLOCK, engine_id=f"options-{next(self.number)}")
        config.extra_config = given
        return self.vllm.ours.BlockyardSpec(config).get_manager().shutdown  # type: ignore[no-any-return]


class Tier(Adapter):
    """`BlockyardTier`, in vLLM's `secondary_tiers`."""

    def enter(self, stack: ExitStack) -> None:
        self.vllm = stack.enter_context(vllm_modules.loaded("stand-in 0.32"))

    def open(self, options: dict[str, Any]) -> Callable[[], object]:
        spec = SimpleNamespace(config=vllm_modules.config(self.vllm, {}))
        view = memoryview(np.zeros((2, BLOCK), np.int8))
        return self.vllm.ours.BlockyardTier(spec, view, "BlockyardTier", **self.place(options)).shutdown  # type: ignore[no-any-return]


class LMCache(Adapter):
    """`BlockyardConnector`, in LMCache's `adapter_params`."""

    engine = "lmcache"

    def enter(self, stack: ExitStack) -> None:
        self.module = stack.enter_context(engine_drivers.lmcache())
        self.base |= {"kv_dtype": "bfloat16", "part": "4KiB", "size": "8MiB"}
        self.taken |= {"kv_dtype": [], "part": SIZES}

    def open(self, options: dict[str, Any]) -> Callable[[], object]:
        return self.module.BlockyardConnector(**self.place(options)).close  # type: ignore[no-any-return]


class HiCache(Adapter):
    """`BlockyardHiCache`, in SGLang's `extra_config`."""

    engine = "sglang"

    def enter(self, stack: ExitStack) -> None:
        super().enter(stack)
        self.taken |= {"kv_dtype": [], "interface_v1": [0, 1, True, False]}

    def open(self, options: dict[str, Any]) -> Callable[[], object]:
        return engine_drivers.SGLang(self.place(options)).close


class Linker(Adapter):
    """`BlockyardLinker`, in SGLang's `linker_extra_config`: how it reads its options, for pools need SGLang itself."""

    engine = "sglang"

    def enter(self, stack: ExitStack) -> None:
        super().enter(stack)
        self.read = sglang_options.read_linker
        # What needs a revision is known with the pools.
        self.taken |= {
            "revision": TEXTS,
            "staging": [*SIZES, 1, 7, 1.5, "7", "1.5"],
            "lookup_seconds": [0, 0.5, 1, 1.5, 7],
        }

    def open(self, options: dict[str, Any]) -> Callable[[], object]:
        found = self.read(self.place(options))
        url = objects.store_url(found.root_dir, found.url, found.size)
        return objects.PrefixObjects(url, sizes=[BLOCK], fields={}).close


ADAPTERS = [Spec, Tier, LMCache, HiCache, Linker]


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    monkeypatch.chdir(tmp_path)  # a folder such as "x" is made there
    FaultyStore.media.clear()
    FaultyStore.fault = ""
    with ExitStack() as entered:
        yield entered


@pytest.fixture(params=ADAPTERS, ids=lambda made: made.__name__)
def adapter(request: pytest.FixtureRequest, stack: ExitStack, tmp_path: Path) -> Any:
    return request.param(stack, tmp_path)


def outcome(adapter: Any, options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> tuple[str, str]:
    """Whether the adapter takes options, refuses them or says something; and its words."""
    caplog.clear()
    try:
        with caplog.at_level(logging.INFO):
            close = adapter.open(options)
    except BlockyardError as error:
        return "refused", str(error)
    close()
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) <= 1, said
    return ("said", said[0]) if said else ("taken", "")


def test_each_value_of_each_option_is_used_or_refused_by_its_name(adapter: Any, caplog: pytest.LogCaptureFixture):
    wrong = []
    for option, taken in adapter.taken.items():
        for value in VALUES:
            found, words = outcome(adapter, {option: value}, caplog)
            is_right = any(type(value) is type(one) and value == one for one in taken)
            # A refusal names the option, or shows the URL or size that it is.
            is_named = option in words or (isinstance(value, str) and value in words)
            if found != ("taken" if is_right else "refused") or (found == "refused" and not is_named):
                wrong.append((option, value, found, words))
    assert not wrong


def test_null_counts_as_not_given(adapter: Any, caplog: pytest.LogCaptureFixture):
    # Without those that are required, or that vLLM reads: its `bool(None)` is false.
    left_out = {"root_dir", "host_bytes", "cpu_bytes_to_use", "offload_prompt_only", "self_describing_kv_events"}
    left_out |= {"revision"}
    for option in adapter.taken.keys() - left_out - {"url", "kv_dtype"}:
        assert outcome(adapter, {option: None}, caplog) == ("taken", "")


def test_a_misspelt_option_is_named_with_the_right_one(adapter: Any, caplog: pytest.LogCaptureFixture):
    wanted = "said" if isinstance(adapter, Spec) else "refused"
    for option in adapter.taken.keys() - {"offload_prompt_only", "self_describing_kv_events", "block_size"}:
        for misspelt in (option[:-1], option[0] + option[2:], f"{option.replace('_', '-')}x"):
            found, words = outcome(adapter, {misspelt: 1}, caplog)
            assert (found, repr(misspelt) in words, repr(option) in words) == (wanted, True, True), words
    found, words = outcome(adapter, {"others": 1, "more": 2}, caplog)
    assert (found, "'others', 'more'" in words) == (wanted, True), words


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"eviction_policy": "arc", "store_threshold": 2}, "'eviction_policy' (use 'policy'), 'store_threshold'"),
        ({"secondary_tiers": [{"type": "fs"}]}, "'secondary_tiers' (use 'prefix_store')"),
        ({"prefix_store": None, "canonical_layout": True}, "'canonical_layout' (needs 'prefix_store')"),
        ({"prefix_store": None, "revision": "a"}, "'revision' (needs 'prefix_store')"),
        ({"prefix_store": None, "weights_fixed": True}, "'weights_fixed' (needs 'prefix_store')"),
        ({"prefix_store": None, "prefix_writes": "second_use"}, "'prefix_writes' (needs 'prefix_store')"),
        ({"prefix_store": None, "prefetch_timeout_base": 1}, "'prefetch_timeout_base' (needs 'prefix_store')"),
    ],
)
def test_options_of_vllms_own_specs_and_those_without_a_store_are_said_once(
    stack: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], words: str
):
    said = f"kv_connector_extra_config has options without effect: {words}"
    assert outcome(Spec(stack, tmp_path), options, caplog) == ("said", said)


def test_the_policies_are_those_of_the_offload_manager(
    stack: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    adapter = Spec(stack, tmp_path)
    known = vllm_options.POLICIES
    with pytest.raises(InvalidArgumentError, match=f"must be one of {', '.join(known)}$"):
        OffloadManager(1, eviction="other")
    for policy in known:
        assert outcome(adapter, {"policy": policy}, caplog) == ("taken", "")


@pytest.mark.parametrize("kind", ADAPTERS[1:])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"root_dir": "file:///var/cache"}, "give a URL as url, 'file:///var/cache?size="),
        ({"root_dir": "redis://u:secret@host"}, "give a URL as url, 'redis://***@host?size="),
        (
            {"url": "faulty://one", "size": "2GiB"},
            "size is '2GiB', but url has its own: write 'faulty://one?size=2GiB'",
        ),
        ({"url": "redis://h?size=1GiB", "size": 5}, "size is 5, but url has its own: write 'redis://h?size=1GiB'"),
        ({"revision": 7}, "revision is 7, must be text in quotes"),
        ({"root_dir": None}, "must give exactly one of them"),
    ],
)
def test_a_refusal_has_the_remedy_and_creates_nothing(
    stack: ExitStack,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    kind: Any,
    options: dict[str, Any],
    message: str,
):
    found, words = outcome(kind(stack, tmp_path), options, caplog)
    assert (found, message in words) == ("refused", True), words
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ADAPTERS[:4])
def test_the_start_is_one_line_below_the_engines_own_logger(
    stack: ExitStack, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Any
):
    adapter = kind(stack, tmp_path)
    assert outcome(adapter, {}, caplog) == ("taken", "")
    (line,) = caplog.records
    assert (line.name, line.levelname) == (f"{adapter.engine}.blockyard", "INFO")
    said = line.getMessage()
    assert re.match(r"Blockyard.* (192|4096) bytes.*, store .*, namespace [0-9a-f]{8}", said), said
    assert said.endswith(", 0 blocks found") == ("file://" in said)
    outcome(adapter, {"revision": "other"}, caplog)
    (line,) = caplog.records
    assert line.getMessage() != said
