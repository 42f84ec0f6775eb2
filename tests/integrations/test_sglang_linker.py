"""What the SGLang linker looks up and stages: costs and bounds, over stand-ins or SGLang itself."""

import importlib
import random
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import engine_drivers
import numpy as np
import pytest
import sglang_stand_in
import torch

PAGE = 8
LAYERS = 2


@pytest.fixture
def make() -> Iterator[Callable[[int], Any]]:
    made = []

    def one(staging_bytes: int, device: str = "cpu") -> Any:
        made.append(sglang_stand_in.linker(PAGE, staging_bytes, device))
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
    linker._objects.page_of = lambda index: None
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


# ---- two devices: rank 1's pools are on the second ----

DEVICES = [torch.device("cuda", 0), torch.device("cuda", 1)]


class Stream:
    """A stream whose work runs when somebody waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.queue: list[Callable[[], object]] = []
        self.ran = 0

    def run(self, end: int) -> None:
        while self.ran < end:
            self.queue[self.ran]()
            self.ran += 1


class Event:
    def record(self) -> None:
        self.stream = Devices.current_stream()
        self.end = len(self.stream.queue)

    def synchronize(self) -> None:
        self.stream.run(self.end)


class Devices:
    """Two devices with a default stream each; as in torch, device 0 is current in a new thread."""

    Stream, Event = Stream, Event
    _here = threading.local()
    default: list[Stream]
    used: set[int]  # devices on which an event was recorded: each has a context now

    @classmethod
    def current(cls) -> int:
        return getattr(cls._here, "device", 0)

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        cls._here.device = device.index

    @classmethod
    def set_stream(cls, stream: Stream) -> None:
        cls.set_device(stream.device)
        cls._here.streams = {**cls._streams(), stream.device.index: stream}

    @classmethod
    def current_stream(cls, device: int | None = None) -> Stream:
        device = cls.current() if device is None else device
        cls.used.add(device)
        return cls._streams().get(device, cls.default[device])

    @classmethod
    def _streams(cls) -> dict[int, Stream]:
        return getattr(cls._here, "streams", {})


class Buffer(torch.Tensor):
    """Memory of the second device: torch queues its work on the stream that is current there."""

    device = DEVICES[1]  # type: ignore[assignment]
    selected_from: ClassVar[set[int]]  # the devices that were current

    def index_copy_(self, dim: int, rows: torch.Tensor, source: torch.Tensor) -> None:  # type: ignore[override]
        memory = self.as_subclass(torch.Tensor)
        Devices.current_stream(1).queue.append(lambda: memory.index_copy_(dim, rows, source.clone()))

    def index_select(self, dim: int, rows: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        Buffer.selected_from.add(Devices.current())
        stream = Devices.current_stream(1)
        stream.run(len(stream.queue))  # the copy to the host that comes next waits for it
        return self.as_subclass(torch.Tensor).index_select(dim, rows)


class Pool:
    """Keys and values of each layer, in pages of one slot."""

    name, layer_mapping = "kv", {layer: (layer, layer) for layer in range(LAYERS)}
    indices_from_pool = "kv"
    buffer_meta: ClassVar = [[(0, 0, PAGE)] * LAYERS] * 2

    def __init__(self) -> None:
        memory = torch.zeros(2, LAYERS, 16, PAGE, dtype=torch.uint8)
        self.components = [[buffer.as_subclass(Buffer) for buffer in component] for component in memory]

    def layer(self, layer: int, first: int) -> np.ndarray:
        return np.stack([component[layer].numpy()[first : first + 2] for component in self.components], 1)

    def prepare_locations(self, slots: torch.Tensor) -> list[int]:
        return slots.tolist()


@pytest.fixture
def ranked(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The linker of rank 1, whose store has random pages."""
    module = importlib.import_module("blockyard.integrations.sglang.linker")
    Devices.default, Devices.used, Devices._here = [Stream(device) for device in DEVICES], set(), threading.local()
    monkeypatch.setattr(module, "get_device_module", lambda: Devices)
    Buffer.selected_from = set()
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, _: tensor)
    linker = make(1 << 20, "cuda:1")
    linker._sizes, linker._spans = {"kv": 2 * LAYERS * PAGE}, {"kv": {"kv": slice(0, 2 * LAYERS * PAGE)}}
    linker._group.num_layers, linker.pools = LAYERS, {"kv": Pool()}
    linker._owner, linker._ranks = True, 1
    data = np.random.default_rng(1).integers(1, 256, (2, 2 * LAYERS * PAGE), np.uint8)
    linker._objects.page_of = data.__getitem__
    linker.pages = data.reshape(2, 2, LAYERS, PAGE)  # page, keys or values, layer
    Devices.set_device(DEVICES[1])  # SGLang's own thread
    return linker


def test_a_layer_on_a_second_device_is_done_when_its_bytes_are_there(ranked: Any):
    landed: list[bool] = []
    ranked.layer_done_counter = SimpleNamespace(
        update_producer=lambda: 0,
        complete=lambda _, layer: landed.append(
            np.array_equal(ranked.pools["kv"].layer(layer, 3), ranked.pages[:, :, layer])
        ),
        fail=lambda _, error: landed.append(error),
    )
    compute: list[int] = []
    Devices.default[1].queue.append(lambda: compute.append(1))
    wanted = transfers(["a", "b"])
    wanted[0].host_indices = torch.tensor([3, 4])
    assert ranked.lookup("one", wanted) == [1, 2]
    assert ranked.load("one", wanted)
    Devices.set_stream(Stream(DEVICES[1]))
    assert ranked.start_layer_wise_loading() == 0
    ranked._copies[0].result(30)
    assert landed == [True] * LAYERS
    # Nothing was recorded on the first device, and no load waits for compute on the default stream.
    assert (Devices.used, compute) == ({1}, [])


def test_pages_of_a_second_device_are_stored_without_the_first(ranked: Any):
    stored: list[np.ndarray] = []
    ranked._objects.put = lambda names, sizes, page: [stored.append(page(n).copy()) is None for n in range(len(names))]
    ranked.record_offload_ready = list
    for part, component in enumerate(ranked.pools["kv"].components):
        for layer, buffer in enumerate(component):
            buffer.as_subclass(torch.Tensor)[3:5] = torch.from_numpy(ranked.pages[:, part, layer].copy())
    compute: list[int] = []
    Devices.default[1].queue.append(lambda: compute.append(1))
    wanted = transfers(["a", "b"])
    wanted[0].host_indices = torch.tensor([3, 4])
    assert ranked.offload(wanted)
    assert ranked._offloads[0].result(30)
    assert np.array_equal(np.stack(stored).reshape(ranked.pages.shape), ranked.pages)
    assert (Buffer.selected_from, compute) == ({1}, [])
