"""Events of the prefix cache for routers, in vLLM's format and over the same kind of ZMQ stream (`kv-events`).

    publisher = EventPublisher("tcp://*:5557", block_size=16)
    publisher.know(prompt, salt=b"tenant-a")          # before its events, so that they carry its tokens and salt
    publisher.publish(manager.prefix.take_events())   # once per step

A message has three frames: topic, number (8 bytes, big-endian), and a MessagePack array of time, events and
data-parallel rank. `BlockStored` and `BlockRemoved` name the medium: `GPU`, `CPU` or `STORAGE`. A router that tracks
the media of each block knows that a block that left the device is still on the host.

Requires `pip install "blockyard[events]"`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from blockyard.errors import InvalidArgumentError
from blockyard.events import EventBatch, export_keys
from blockyard.workers.extras import missing

try:
    import msgspec
    import zmq
except ModuleNotFoundError as error:
    raise missing("blockyard.integrations.router_events", error) from None

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["AllBlocksCleared", "BlockRemoved", "BlockStored", "EventPublisher", "Message"]

MEDIA: Final = {"device": "GPU", "host": "CPU", "external": "STORAGE"}
_POLL_MS: Final = 100
_MAX_UNSTORED: Final = 1 << 16
_END: Final = (-1).to_bytes(8, "big", signed=True)
_NO_PARENT: Final = bytes(32)


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks that can now be found in a medium, each the child of the one before.

    Attributes:
        block_hashes: exported keys, see `blockyard.events.export_keys`.
        parent_block_hash: key of the block before the first.
        token_ids: token ids of all blocks; empty if `know` was not called for them.
        block_size: tokens in a block.
        lora_id: adapter, None for none.
        medium: `"GPU"`, `"CPU"` or `"STORAGE"`.
        lora_name: name of the adapter.
        extra_keys: for each block, what its key covers besides tokens: the adapter, and the salt for the first.
        group_idx: cache group.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks that can no longer be found in a medium.

    Attributes:
        block_hashes: exported keys.
        medium: as in `BlockStored`.
        group_idx: cache group.
        remaining: copies of the bytes in other media; not a field of vLLM's format, whose readers ignore it.
    """

    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None
    remaining: int = 0


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Nothing can be found: the cache was cleared, or events were lost."""


class Message(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One message: time in seconds, events in order, rank."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


@dataclass(slots=True)
class _Known:
    """What a block's key covers, and the number of media that it is in."""

    tokens: list[int]
    extra: tuple[Any, ...] | None
    lora_name: str | None
    media: int = 0


class EventPublisher:
    """Publishes the events of one manager. Thread-safe.

    Args:
        endpoint: where routers subscribe: `tcp://*:5557` binds, `tcp://router:5557` connects.
        block_size: tokens in a block of the manager.
        topic: first frame of each message.
        replay_endpoint: where routers request missed messages from a number on; None to disable.
        buffer_steps: number of messages kept for replay.
        data_parallel_rank: data-parallel rank of this engine.

    Raises:
        InvalidArgumentError: an endpoint cannot be bound or connected, or a number is too small.

    Example:
        >>> from blockyard import BlockManager, PrefixCaching
        >>> from blockyard.integrations.router_events import EventPublisher
        >>> manager = BlockManager(block_size=2, device_blocks=8, prefix_caching=PrefixCaching(max_events=100))
        >>> sequence = manager.allocate([1, 2, 3, 4, 5])
        >>> _ = manager.complete(manager.take_decision().ticket)
        >>> manager.mark_computed(sequence)
        >>> with EventPublisher("inproc://example", block_size=2) as publisher:
        ...     publisher.know([1, 2, 3, 4, 5])
        ...     publisher.publish(manager.prefix.take_events())
        1
    """

    def __init__(
        self,
        endpoint: str,
        *,
        block_size: int,
        topic: str = "",
        replay_endpoint: str | None = None,
        buffer_steps: int = 10_000,
        data_parallel_rank: int = 0,
    ) -> None:
        if block_size < 1 or buffer_steps < 1:
            raise InvalidArgumentError(f"block_size is {block_size}, buffer_steps {buffer_steps}, must be at least 1")
        self._block_size, self._rank, self._topic = block_size, data_parallel_rank, topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()
        self._number = 0
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._unstored: dict[tuple[int, bytes], _Known] = {}  # blocks that are in no medium yet
        self._known: dict[tuple[int, bytes], _Known] = {}
        self._present: dict[str, dict[tuple[int, bytes], None]] = {medium: {} for medium in MEDIA.values()}
        self._context: Any = zmq.Context.instance()
        self._closed = threading.Event()
        self._socket = self._open(zmq.PUB, endpoint)
        self._thread: threading.Thread | None = None
        if replay_endpoint is not None:
            try:
                replay = self._open(zmq.ROUTER, replay_endpoint)
            except InvalidArgumentError:
                self._socket.close(linger=0)
                raise
            self._thread = threading.Thread(
                target=self._serve_replay, args=(replay,), name="blockyard-events", daemon=True
            )
            self._thread.start()

    def know(
        self,
        tokens: Sequence[int],
        *,
        salt: bytes | None = None,
        lora_id: int = 0,
        lora_name: str | None = None,
        cache_group: int = 0,
    ) -> None:
        """Remember what the keys of a sequence's full blocks cover, until the blocks have left all media.

        Args:
            tokens: tokens of the sequence so far.
            salt: the tenant's salt.
            lora_id: adapter; 0 for none.
            lora_name: name of the adapter, for the events.
            cache_group: number of the cache group.
        """
        size, adapter = self._block_size, (lora_name,) if lora_name else ()
        keys = export_keys(list(tokens), block_size=size, salt=salt, lora_id=lora_id, cache_group=cache_group)
        with self._lock:
            for place, key in enumerate(keys):
                if (cache_group, key) not in self._known and (cache_group, key) not in self._unstored:
                    extra = adapter + ((_text(salt),) if salt and place == 0 else ())
                    mine = [int(token) for token in tokens[place * size : (place + 1) * size]]
                    self._unstored[cache_group, key] = _Known(mine, extra or None, lora_name)
            while len(self._unstored) > _MAX_UNSTORED:
                del self._unstored[next(iter(self._unstored))]

    def publish(self, batch: EventBatch) -> int:
        """Send events in order. Never waits; a slow router misses messages, and detects that by their numbers.

        Args:
            batch: from `manager.prefix.take_events()`.

        Returns:
            Number of messages sent: 0 if there are no events.

        Raises:
            InvalidArgumentError: the publisher is closed.
        """
        with self._lock:
            if self._closed.is_set():
                raise InvalidArgumentError("the publisher is closed")
            events = list(self._translate(batch))
            if not events:
                return 0
            payload = self._encoder.encode(Message(time.time(), events, self._rank))
            self._socket.send_multipart((self._topic, self._number.to_bytes(8, "big"), payload))
            self._sent.append((self._number, payload))
            self._number += 1
        return 1

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        with self._lock:
            self._closed.set()
            self._socket.close(linger=1000)
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _translate(self, batch: EventBatch) -> Iterable[BlockStored | BlockRemoved | AllBlocksCleared]:
        if batch.dropped:
            self._forget_all()
            yield AllBlocksCleared()
        open_event: BlockStored | BlockRemoved | None = None
        for at, (kind, tier, group, raw) in enumerate(
            zip(batch.kinds, batch.tiers, batch.groups, batch.keys, strict=True)
        ):
            name, medium = batch.KINDS[kind], MEDIA[batch.TIERS[tier]]
            place = (int(group), raw.tobytes())
            if name == "stored":
                event: Any = self._stored(batch, at, place, medium)
            elif name == "removed":
                self._leave(place, medium)
                event = BlockRemoved([place[1]], medium, place[0] or None, int(batch.remaining[at]))
            else:
                gone = list(self._present[medium])
                for other in gone:
                    self._leave(other, medium)
                event = BlockRemoved([key for _, key in gone], medium) if gone else None
            if open_event is not None and not _joined(open_event, event):
                yield open_event
                open_event = None
            open_event = open_event or event
        if open_event is not None:
            yield open_event

    def _stored(self, batch: EventBatch, at: int, place: tuple[int, bytes], medium: str) -> BlockStored:
        if place not in self._known:
            self._known[place] = self._unstored.pop(place, _Known([], None, None))
        known = self._known[place]
        if place not in self._present[medium]:
            self._present[medium][place] = None
            known.media += 1
        parent, lora = batch.parents[at].tobytes(), int(batch.lora_ids[at])
        return BlockStored(
            [place[1]],
            None if parent == _NO_PARENT else parent,
            list(known.tokens),
            self._block_size,
            lora or None,
            medium,
            known.lora_name,
            [known.extra] if known.extra else None,
            place[0] or None,
        )

    def _leave(self, place: tuple[int, bytes], medium: str) -> None:
        if place not in self._present[medium]:
            return
        del self._present[medium][place]
        known = self._known[place]
        known.media -= 1
        if not known.media:
            del self._known[place]

    def _forget_all(self) -> None:
        for medium, present in self._present.items():
            for place in list(present):
                self._leave(place, medium)

    def _open(self, kind: int, endpoint: str) -> Any:
        socket = self._context.socket(kind)
        try:
            if "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise InvalidArgumentError(f"endpoint is {endpoint!r}: {error}") from None
        return socket

    def _serve_replay(self, socket: Any) -> None:
        while not self._closed.is_set():
            if not socket.poll(_POLL_MS):
                continue
            frames = socket.recv_multipart()
            if len(frames) == 3:
                first = int.from_bytes(frames[2], "big")
                with self._lock:
                    found = [entry for entry in self._sent if entry[0] >= first]
                for number, payload in found:
                    socket.send_multipart((frames[0], b"", self._topic, number.to_bytes(8, "big"), payload))
                socket.send_multipart((frames[0], b"", b"", _END, b""))
        socket.close(linger=0)


def _joined(event: BlockStored | BlockRemoved, other: Any) -> bool:
    """Append the blocks of the next event to this one, if it continues where this one ends."""
    if isinstance(event, BlockStored) and isinstance(other, BlockStored):
        alike = (event.medium, event.lora_id, event.lora_name, event.group_idx) == (
            other.medium,
            other.lora_id,
            other.lora_name,
            other.group_idx,
        )
        if not alike or other.parent_block_hash != event.block_hashes[-1] or not event.token_ids or not other.token_ids:
            return False
        if event.extra_keys or other.extra_keys:
            before = event.extra_keys or [None] * len(event.block_hashes)
            event.extra_keys = before + (other.extra_keys or [None])
        event.token_ids += other.token_ids
    elif not (
        isinstance(event, BlockRemoved)
        and isinstance(other, BlockRemoved)
        and (event.medium, event.group_idx, event.remaining) == (other.medium, other.group_idx, other.remaining)
    ):
        return False
    event.block_hashes += other.block_hashes
    return True


def _text(salt: bytes) -> str | bytes:
    """Return the salt as text, or as bytes if it is not UTF-8."""
    try:
        return salt.decode()
    except UnicodeDecodeError:
        return salt
