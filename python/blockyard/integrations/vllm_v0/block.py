"""The blocks of a sequence: token ids, and the id of the physical block with their bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeAlias

from blockyard._core import chain_keys
from blockyard.integrations.vllm_v0.interfaces import Block, require

Keyed: TypeAlias = tuple[bytes, int]
"""A full block's key, and the number of tokens up to the block's end."""

_KEY_BYTES: Final = 32
_UNKNOWN: Final = 1 << 31
"""Real token ids are below. Engines use negative ids for tokens that are not known yet; they count on from here."""


def key_bytes(content_hash: int) -> bytes:
    """Return a content hash as a key. Hashes of other origin are reduced modulo 2^256."""
    return (content_hash % (1 << 8 * _KEY_BYTES)).to_bytes(_KEY_BYTES, "big")


def chain(parent: bytes | None, token_ids: list[int], block_size: int, extra_hash: int | None) -> list[bytes]:
    """Return the keys of the full blocks of `token_ids`, which follow `parent`."""
    known = [token if token >= 0 else _UNKNOWN - token for token in token_ids]
    extra = None if extra_hash is None else str(extra_hash).encode()
    return chain_keys(known, block_size=block_size, parent=parent, extra=extra)


def hash_blocks(parent: int | None, token_ids: list[int], block_size: int, extra_hash: int | None) -> list[int]:
    """Return the content hashes of the full blocks of `token_ids`, which follow `parent`."""
    keys = chain(None if parent is None else key_bytes(parent), token_ids, block_size, extra_hash)
    return [int.from_bytes(key, "big") for key in keys]


class NaiveBlock(Block):
    """A block of token ids without a key."""

    __slots__ = ("_allocator", "_cow_target", "_tokens", "block_id", "block_size", "extra_hash", "prev_block")

    def __init__(
        self,
        prev_block: Block | None,
        token_ids: Iterable[int],
        block_size: int,
        allocator: Any,
        block_id: int | None = None,
        _cow_target: Any = None,
        extra_hash: int | None = None,
    ) -> None:
        self._tokens = list(token_ids)
        require(len(self._tokens) <= block_size, f"{len(self._tokens)} tokens do not fit into a block of {block_size}")
        self.prev_block, self.block_size, self.block_id = prev_block, block_size, block_id
        self.extra_hash: int | None = None  # only keys depend on it
        self._allocator, self._cow_target = allocator, _cow_target

    def append_token_ids(self, token_ids: list[int]) -> None:
        """Append token ids to the block; a shared block is copied first."""
        require(
            len(token_ids) <= self.num_empty_slots,
            f"asked for {len(token_ids)} slots, {self.num_empty_slots} are empty",
        )
        if self.block_id is not None:
            target = self if self._cow_target is None else self._cow_target
            self.block_id = self._allocator.cow_block_if_not_appendable(target)
        self._tokens += token_ids

    @property
    def token_ids(self) -> list[int]:  # type: ignore[override]
        """Token ids in the block."""
        return list(self._tokens)

    @property
    def is_full(self) -> bool:
        """Whether all slots hold tokens."""
        return len(self._tokens) == self.block_size

    @property
    def num_empty_slots(self) -> int:
        """Number of slots without a token."""
        return self.block_size - len(self._tokens)

    @property
    def content_hash(self) -> int | None:
        """Hash of the content; None if there is none."""
        return None

    @property
    def num_tokens_total(self) -> int | None:
        """Number of tokens up to the end of this block."""
        raise NotImplementedError("not used for NaiveBlock")

    @property
    def computed(self) -> bool:
        """Whether the content is computed."""
        raise NotImplementedError("not used for NaiveBlock")

    @computed.setter
    def computed(self, value: bool) -> None:
        raise NotImplementedError("not used for NaiveBlock")

    @property
    def last_accessed(self) -> float:
        """Time of the last access."""
        raise NotImplementedError("not used for NaiveBlock")

    @last_accessed.setter
    def last_accessed(self, last_accessed_ts: float) -> None:
        raise NotImplementedError("not used for NaiveBlock")


class PrefixCachingBlock(NaiveBlock):
    """A block that can be found by its key once it is full."""

    __slots__ = ("_before", "_key", "computed", "last_accessed")

    def __init__(
        self,
        prev_block: Block | None,
        token_ids: Iterable[int],
        block_size: int,
        allocator: Any,
        block_id: int | None = None,
        computed: bool = False,
        extra_hash: int | None = None,
    ) -> None:
        # By what it can do: the allocators' module imports this one.
        require(hasattr(allocator, "is_block_cached"), f"allocator is {allocator!r}, must cache prefixes")
        is_block = prev_block is None or isinstance(prev_block, PrefixCachingBlock)
        require(is_block, f"the previous block is {prev_block!r}, must have a key")
        super().__init__(prev_block, token_ids, block_size, allocator, block_id)
        before = 0 if prev_block is None else prev_block.num_tokens_total
        self._before: int = before if isinstance(before, int) else 0
        self._key: bytes | None = None
        self.extra_hash, self.computed, self.last_accessed = extra_hash, computed, -1.0

    def append_token_ids(self, token_ids: list[int]) -> None:
        """Append token ids. A shared block is copied first, and a block that becomes full can be found from then on."""
        require(self.key() is None and not self.computed, "cannot append to a full block")
        if not token_ids:
            return
        super().append_token_ids(token_ids)
        if self.block_id is not None and self.key() is not None:
            self.block_id = self._allocator.promote_to_immutable_block(self)

    @property
    def content_hash(self) -> int | None:
        """Hash of the content; None until this block and its predecessors are full."""
        key = self.key()
        return None if key is None else int.from_bytes(key, "big")

    @property
    def num_tokens_total(self) -> int:
        """Number of tokens up to the end of this block."""
        return self._before + len(self._tokens)

    def key(self) -> bytes | None:
        """Return the block's key, None until it and its predecessors are full. Each block is hashed once."""
        if self._key is not None:
            return self._key
        block: Any = self
        todo: list[PrefixCachingBlock] = []
        # A loop, as a chain may be longer than the stack.
        while issubclass(type(block), PrefixCachingBlock):
            if block._key is not None or not block.is_full:  # noqa: SLF001 (of this class)
                break
            todo.append(block)
            block = block.prev_block
        parent = None if block is None else _known_key(block)
        if block is not None and parent is None:
            return None
        for follower in reversed(todo):
            tokens = follower.token_ids
            parent = chain(parent, tokens, len(tokens), follower.extra_hash)[0]
            follower.set_key(parent)
        return parent

    def set_key(self, key: bytes) -> None:
        """Set the block's key, which was computed earlier."""
        self._key = key

    @property
    def keyed(self) -> Keyed | None:
        """The block's key with the number of tokens up to the block's end; None if it has no key."""
        key = self.key()
        return None if key is None else (key, self.num_tokens_total)

    @classmethod
    def hash_block_tokens(
        cls,
        is_first_block: bool,
        prev_block_hash: int | None,
        cur_block_token_ids: list[int],
        extra_hash: int | None = None,
    ) -> int:
        """Return the hash of a block from the previous block's hash and its tokens."""
        require(cur_block_token_ids, "a block without tokens has no key")
        parent = None if is_first_block else prev_block_hash
        return hash_blocks(parent, cur_block_token_ids, len(cur_block_token_ids), extra_hash)[0]


def _known_key(block: Any) -> bytes | None:
    """Return the key of a block that needs no hashing here: it has one, is not full, or is of a foreign class."""
    if issubclass(type(block), PrefixCachingBlock):
        key: bytes | None = block._key  # noqa: SLF001
        return key
    content_hash = block.content_hash
    return None if content_hash is None else key_bytes(content_hash)


class NullBlock(Block):
    """Replaces blocks outside a sliding window; wraps a block that is never written."""

    __slots__ = ("_proxy",)

    def __init__(self, proxy: Block) -> None:
        self._proxy = proxy

    def append_token_ids(self, token_ids: list[int]) -> None:
        """Raise: the null block cannot be written."""
        raise ValueError("null block should not be modified")

    @property
    def block_id(self) -> int | None:
        """Id of the null block."""
        found: int | None = self._proxy.block_id
        return found

    @block_id.setter
    def block_id(self, value: int | None) -> None:
        raise ValueError("null block should not be modified")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proxy, name)
