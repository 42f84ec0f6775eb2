"""Events for routers: vLLM's form, byte for byte, over ZMQ."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import vllm_modules
import zmq

from blockyard import BlockManager, PrefixCaching
from blockyard.errors import InvalidArgumentError
from blockyard.events import export_keys
from blockyard.integrations import router_events
from blockyard.integrations.router_events import AllBlocksCleared, BlockRemoved, BlockStored, EventPublisher, Message

SIZE = 4
PROMPT = list(range(8))
EXAMPLE = Path(__file__).parents[2] / "examples" / "prefix_router.py"


def new_manager(device: int = 8, *, host: int = 0, events: int = 100) -> BlockManager:
    caching = PrefixCaching(max_events=events)
    return BlockManager(block_size=SIZE, device_blocks=device, host_blocks=host, watermark=0.0, prefix_caching=caching)


def run(manager: BlockManager, prompt: list[int], **key: Any) -> int:
    handle = int(manager.allocate(prompt, **key))
    manager.complete(manager.take_decision().ticket)
    manager.mark_computed(handle)
    return handle


@pytest.fixture
def endpoint(request: pytest.FixtureRequest) -> str:
    return f"inproc://{request.node.name}"


class Reader:
    """A router's end of the stream."""

    def __init__(self, endpoint: str) -> None:
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.connect(endpoint)
        self.socket.subscribe("")

    def read(self) -> tuple[int, bytes]:
        assert self.socket.poll(10_000)
        topic, number, payload = self.socket.recv_multipart()
        assert topic == b"kv"
        return int.from_bytes(number, "big"), payload

    def events(self) -> list[Any]:
        return msgspec.msgpack.decode(self.read()[1], type=Message).events


@pytest.fixture
def stream(endpoint: str) -> Iterator[tuple[EventPublisher, Reader]]:
    with EventPublisher(endpoint, block_size=SIZE, topic="kv") as publisher:
        reader = Reader(endpoint)
        yield publisher, reader
        reader.socket.close(linger=0)


def vllm_form(source: str) -> dict[str, Any]:
    """The message classes of vLLM's own source; the rest of that file is not run."""
    path = Path(source) / "vllm" / "distributed" / "kv_events.py"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    text = path.read_text(encoding="utf-8")
    code = text[text.index("class EventBatch(") : text.index("class KVEventAggregator")]
    names: dict[str, Any] = {"msgspec": msgspec, "Any": Any, "ExternalBlockHash": bytes | int}
    exec(compile(code, str(path), "exec"), names)
    return names


GOLDEN = bytes.fromhex(
    "93cb3ff800000000000092"
    "89a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392c401aac401bbb1706172656e745f626c6f636b5f68617368c0"
    "a9746f6b656e5f69647393010203aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0"
    "aa65787472615f6b6579739291a673616c742d61c0"
    "83a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391c401aaa66d656469756da3435055"
    "03"
)
EVENTS: list[Any] = [
    BlockStored([b"\xaa", b"\xbb"], None, [1, 2, 3], 2, None, "GPU", None, [("salt-a",), None]),
    BlockRemoved([b"\xaa"], "CPU"),
]


def test_a_message_has_these_bytes():
    assert msgspec.msgpack.encode(Message(1.5, EVENTS, 3)) == GOLDEN


@pytest.mark.parametrize("source", vllm_modules.SOURCES or [pytest.param("", marks=pytest.mark.skip("no VLLM_SOURCE"))])
def test_bytes_are_those_of_vllm_and_it_reads_ours(source: str):
    theirs = vllm_form(source)
    stored, removed = EVENTS
    same = theirs["EventBatch"](
        ts=1.5,
        events=[
            theirs["BlockStored"](**msgspec.structs.asdict(stored)),
            theirs["BlockRemoved"](block_hashes=removed.block_hashes, medium="CPU"),
        ],
        data_parallel_rank=3,
    )
    payload = msgspec.msgpack.encode(same)
    # 0.33 has so many fields that msgspec writes a wider header for the map; the map is the same.
    assert payload == GOLDEN or len(theirs["BlockStored"].__struct_fields__) > 14
    assert msgspec.msgpack.decode(payload) == msgspec.msgpack.decode(GOLDEN)
    assert msgspec.msgpack.decode(payload, type=Message) == Message(1.5, EVENTS, 3)
    kinds = theirs["BlockStored"] | theirs["BlockRemoved"] | theirs["AllBlocksCleared"]
    ours = [*EVENTS, BlockRemoved([b"\xcc"], "GPU", remaining=1), AllBlocksCleared()]
    for event in ours:
        read = msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=kinds)
        assert type(read).__name__ == type(event).__name__
        if not isinstance(event, AllBlocksCleared):
            assert (read.block_hashes, read.medium) == (event.block_hashes, event.medium)


def test_stored_blocks_have_their_tokens_salt_and_adapter(stream: tuple[EventPublisher, Reader]):
    publisher, reader = stream
    manager = new_manager()
    run(manager, PROMPT, salt=b"tenant", lora_id=7)
    publisher.know(PROMPT, salt=b"tenant", lora_id=7, lora_name="adapter")
    assert publisher.publish(manager.prefix.take_events()) == 1
    keys = export_keys(PROMPT, block_size=SIZE, salt=b"tenant", lora_id=7)
    extra = [("adapter", "tenant"), ("adapter",)]
    assert reader.events() == [BlockStored(keys, None, PROMPT, SIZE, 7, "GPU", "adapter", extra)]
    assert publisher.publish(manager.prefix.take_events()) == 0


def test_a_block_that_leaves_the_device_and_stays_on_the_host_stays_routable(stream: tuple[EventPublisher, Reader]):
    publisher, reader = stream
    text = EXAMPLE.read_text(encoding="utf-8")
    module = ModuleType("prefix_router")
    exec(compile(text[: text.index("endpoints = ")], str(EXAMPLE), "exec"), vars(module))
    router = module.Router([])
    router.blocks = [{}]
    caching = PrefixCaching(max_events=100, host=True)
    manager = BlockManager(block_size=SIZE, device_blocks=3, host_blocks=4, watermark=0.0, prefix_caching=caching)
    handle = run(manager, PROMPT)
    manager.swap_out([handle])
    manager.complete(manager.take_decision().ticket)
    # Another prompt takes the blocks of the device.
    manager.free([handle, run(manager, list(range(100, 110)))])
    publisher.publish(manager.prefix.take_events())
    events = reader.events()
    left = [event for event in events if isinstance(event, BlockRemoved) and event.medium == "GPU"]
    assert sorted(key for event in left for key in event.block_hashes) == sorted(export_keys(PROMPT, block_size=SIZE))
    for event in events:
        router.apply(router.blocks[0], event)
    assert manager.prefix.lookup([*PROMPT, 9]).host_blocks == 2
    assert router.route(PROMPT) == (0, 8)
    manager.prefix.reset()
    publisher.publish(manager.prefix.take_events())
    for event in reader.events():
        router.apply(router.blocks[0], event)
    assert router.route(PROMPT) == (0, 0)


def test_lost_events_clear_what_a_router_knows(stream: tuple[EventPublisher, Reader]):
    publisher, reader = stream
    manager = new_manager(64, events=2)
    for start in (0, 100, 200):
        run(manager, list(range(start, start + 8)))
    publisher.publish(manager.prefix.take_events())
    cleared, *rest = reader.events()
    assert isinstance(cleared, AllBlocksCleared)
    assert all(isinstance(event, BlockStored) for event in rest)


def test_what_a_router_knew_before_events_were_lost_is_not_removed_again(stream: tuple[EventPublisher, Reader]):
    publisher, reader = stream
    manager = new_manager(64, events=2)
    manager.free([run(manager, list(range(8)))])
    publisher.publish(manager.prefix.take_events())
    before = {key for event in reader.events() for key in event.block_hashes}
    for start in (100, 200):
        manager.free([run(manager, list(range(start, start + 8)))])
    publisher.publish(manager.prefix.take_events())
    told = {key for event in reader.events()[1:] for key in event.block_hashes}
    assert len(before) == len(told) == 2
    manager.prefix.reset()
    publisher.publish(manager.prefix.take_events())
    assert {key for event in reader.events() for key in event.block_hashes} <= told


def test_a_cleared_cache_removes_each_block(stream: tuple[EventPublisher, Reader]):
    publisher, reader = stream
    manager = new_manager()
    manager.free([run(manager, PROMPT)])
    publisher.publish(manager.prefix.take_events())
    (stored,) = reader.events()[:1]
    manager.prefix.reset()
    publisher.publish(manager.prefix.take_events())
    gone = [key for event in reader.events() for key in event.block_hashes]
    assert sorted(gone) == sorted(export_keys(PROMPT, block_size=SIZE))
    assert publisher._known == {}
    assert stored.token_ids == []


def test_missed_messages_come_again_on_request(endpoint: str):
    with EventPublisher(endpoint, block_size=SIZE, topic="kv", replay_endpoint=f"{endpoint}-again") as publisher:
        manager = new_manager(64)
        for start in (0, 100, 200):
            run(manager, list(range(start, start + 8)))
            publisher.publish(manager.prefix.take_events())
        dealer = zmq.Context.instance().socket(zmq.DEALER)
        dealer.connect(f"{endpoint}-again")
        dealer.send_multipart((b"", (1).to_bytes(8, "big")))
        numbers = []
        while True:
            assert dealer.poll(10_000)
            _, _, number, payload = dealer.recv_multipart()
            if not payload:
                break
            numbers.append(int.from_bytes(number, "big"))
        assert numbers == [1, 2]
        dealer.close(linger=0)


def test_unstored_blocks_of_announced_sequences_are_bounded(
    stream: tuple[EventPublisher, Reader], monkeypatch: pytest.MonkeyPatch
):
    publisher, _ = stream
    monkeypatch.setattr(router_events, "_MAX_UNSTORED", 10)
    for start in range(20):
        publisher.know(list(range(start, start + 8)))
    assert len(publisher._unstored) == 10


def test_an_endpoint_that_cannot_be_had_is_refused(endpoint: str):
    with pytest.raises(InvalidArgumentError, match="endpoint is 'nowhere'"):
        EventPublisher("nowhere", block_size=SIZE)
    with pytest.raises(InvalidArgumentError, match="must be at least 1"):
        EventPublisher(endpoint, block_size=0)
    publisher = EventPublisher(endpoint, block_size=SIZE)
    publisher.close()
    publisher.close()
    with pytest.raises(InvalidArgumentError, match="closed"):
        publisher.publish(new_manager().prefix.take_events())
