"""A plain model of a Redis store's lists: `blockyard.stores.redis.lists` with sets and sorting, without a server."""

from __future__ import annotations

NEVER = (0, 0)


class ListedBlocks:
    """Blocks by their last use, and tenants with quotas."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.uses: dict[bytes, tuple[int, int]] = {}
        self.parents: dict[bytes, bytes] = {}  # the preceding block of each, if it has one
        self.quotas: dict[bytes, int] = {}
        self.was_set = False  # whether a quota was ever set
        self.owners: dict[bytes, tuple[bytes, bytes]] = {}  # of blocks that count: tenant and preceding block
        self.late: set[bytes] = set()  # leaves that were new when their preceding block was missing
        self._batch = 0

    def order(self) -> list[bytes]:
        """All blocks, in eviction order."""
        parents = set(self.parents.values())
        return sorted(self.uses, key=lambda name: (name in parents, self.uses[name], name))

    def held(self, tenant: bytes) -> set[bytes]:
        """Blocks that count towards a tenant's quota."""
        return {name for name, owner in self.owners.items() if owner[0] == tenant}

    def leaves(self, tenant: bytes) -> list[bytes]:
        """A tenant's blocks without a successor, in eviction order."""
        parents = {parent for of, parent in self.owners.values() if of == tenant}
        use = lambda name: (NEVER if name in self.late else self.uses[name], name)  # noqa: E731
        return sorted(self.held(tenant) - parents, key=use)

    def settle(self, names: list[bytes], owners: list[tuple[bytes, bytes]] | None) -> list[int]:
        """Put a batch of blocks. Returns the ones that were not kept."""
        late = self._follow(names, owners or [])
        self._use(names)
        self.uses.update(dict.fromkeys(late, NEVER))
        for name, (tenant, parent) in zip(names, owners or (), strict=False):
            if tenant in self.quotas and name in self.uses:  # an earlier block of the batch may have evicted it
                self._own(name, tenant, parent)
        self._drop_beyond()
        return [index for index, name in enumerate(names) if name not in self.uses]

    def touch(self, names: list[bytes]) -> None:
        """Mark blocks as used; missing ones stay missing."""
        known = set(self.uses)
        self._use(names)
        for name in set(names) - known:
            self.uses.pop(name)

    def drop(self, name: bytes) -> None:
        """Delete a block."""
        self.uses.pop(name, None)
        self.late.discard(name)
        self.owners.pop(name, None)
        self.parents.pop(name, None)

    def set_quota(self, tenant: bytes, quota: int | None) -> None:
        """Set a tenant's quota."""
        self.was_set = True
        self.quotas.pop(tenant, None)
        if quota is not None:
            self.quotas[tenant] = quota
            self._enforce(tenant)

    def adopt(self, names: list[bytes]) -> None:
        """List blocks that no list had."""
        for name in names:
            self.uses.setdefault(name, NEVER)
        self._drop_beyond()

    def _follow(self, names: list[bytes], owners: list[tuple[bytes, bytes]]) -> list[bytes]:
        """Record the blocks before these. Returns new blocks whose preceding block is missing."""
        late, there = [], set(self.uses)
        if not there:
            self.parents.clear()
        for name, (_, parent) in zip(names, owners, strict=False):
            if parent and parent not in there and name not in there:
                late.append(name)
            if parent:
                self.parents.setdefault(name, parent)
            there.add(name)
        return late

    def _use(self, names: list[bytes]) -> None:
        self._batch += 1
        self.uses.update((name, (self._batch, -index)) for index, name in enumerate(names))
        self.late.difference_update(names)

    def _own(self, name: bytes, tenant: bytes, parent: bytes) -> None:
        if name not in self.owners:
            self.owners[name] = (tenant, parent)
            self.late -= {parent} & self.held(tenant)  # no longer a leaf
            if parent and parent not in self.uses and name in self.leaves(tenant):
                self.late.add(name)
        elif self.owners[name][0] != tenant:
            return
        self._enforce(tenant)

    def _enforce(self, tenant: bytes) -> None:
        while len(self.held(tenant)) > self.quotas[tenant]:
            self.drop(self.leaves(tenant)[0])

    def _drop_beyond(self) -> None:
        while len(self.uses) > self.capacity:
            self.drop(self.order()[0])
