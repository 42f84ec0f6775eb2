"""Counters of the books, read in one call."""

from prompts import allocate_prompts

from blockyard import BlockManager, Pairs


def step(books: BlockManager) -> None:
    books.complete(books.take_decision().ticket)


def manager() -> BlockManager:
    return BlockManager(
        block_size=4, device_blocks=8, host_blocks=8, external_blocks=8, watermark=0.0, prefix_caching=True
    )


def test_a_new_manager_has_counted_nothing() -> None:
    assert set(manager().stats().as_dict().values()) == {0}
    assert manager().stats() == manager().stats()


def test_hits_misses_merges_and_evictions_are_counted() -> None:
    books = manager()
    for _ in range(2):
        handles, _ = allocate_prompts(books, [list(range(9))])
        step(books)
        books.mark_computed(handles)
        books.free(handles)
    handles, _ = allocate_prompts(books, [list(range(50, 82))])
    stats = books.stats()
    assert (stats.prompts, stats.hit_blocks, stats.missed_blocks) == (3, 2, 10)
    assert (stats.hit_tokens, stats.missed_tokens, stats.merged_blocks) == (8, 42, 0)
    assert stats.evicted_blocks == {"device": 2, "host": 0, "external": 0}
    assert (stats.cached_blocks["device"], stats.used_blocks["device"]) == (0, 8)
    assert stats.hit_rate == 2 / 12


def test_transfers_are_counted_by_kind_when_they_are_decided() -> None:
    books = manager()
    (handle,) = books.allocate(counts=[6])
    step(books)
    fork = books.fork(handle)
    books.append([fork])
    assert books.stats().copied_blocks == 0
    step(books)
    assert books.stats().copied_blocks == 1
    for tier in ("host", "external"):
        books.swap_out([handle], to=tier)
        step(books)
        books.swap_in([handle])
        step(books)
    stats = books.stats()
    assert (stats.swapped_out_blocks, stats.swapped_in_blocks) == (2, 1), "the shared block stayed on the device"
    assert (stats.spilled_blocks, stats.fetched_blocks, stats.steps) == (2, 1, 6)


def test_open_tickets_hold_blocks_until_they_end() -> None:
    books = manager()
    handles = books.allocate(counts=[8])
    step(books)
    books.swap_out(handles)
    decision = books.take_decision()
    stats = books.stats()
    assert (stats.open_tickets, stats.leased_blocks) == ([decision.ticket], {"device": 2, "host": 2, "external": 0})
    assert stats.used_blocks == {"device": 2, "host": 2, "external": 0}
    books.fail(decision.ticket, [Pairs("device", "host", decision.swap_out[0].ids)])
    stats = books.stats()
    assert (stats.open_tickets, sum(stats.leased_blocks.values())) == ([], 0)
    assert stats.used_blocks == {"device": 0, "host": 2, "external": 0}


def test_the_peak_stays_when_the_blocks_have_gone() -> None:
    books = manager()
    handles = books.allocate(counts=[20, 4])
    books.free(handles)
    books.allocate(counts=[4])
    stats = books.stats()
    assert (stats.used_blocks["device"], stats.peak_blocks["device"], stats.sequences) == (1, 6, 1)
    assert stats.as_dict()["peak_blocks_device"] == 6
    assert repr(stats).startswith("ManagerStats({'sequences': 1, ")
