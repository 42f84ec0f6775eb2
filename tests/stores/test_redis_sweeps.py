"""Sweeps of a Redis store's lists: every order of the steps of sweepers, of puts, deletions, failovers and losses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from state_search import explore
from sweep_model import Bounds, Model, WrongListError

PROTOCOL = Bounds()
SEARCHED = {
    "usual": PROTOCOL,
    "full": replace(PROTOCOL, capacity=2),
    "deletions": replace(PROTOCOL, sweeps=1, deletes=1),
    "failback": replace(PROTOCOL, sweeps=1, failovers=2),
    "replicas": replace(PROTOCOL, sweeps=1, asks_replica=True),
}


@pytest.mark.parametrize("bounds", SEARCHED.values(), ids=SEARCHED)
def test_no_order_leaves_a_block_in_no_list_or_drops_one(bounds: Bounds):
    model = Model(bounds)
    assert explore(model.start(), model.steps, 100_000, WrongListError) > 300
    assert model.ended > 20


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [2, 3])
def test_no_longer_order_leaves_a_block_in_no_list_or_drops_one(capacity: int):
    model = Model(Bounds(capacity=capacity, puts=2, deletes=1, losses=1, asks_replica=True))
    assert explore(model.start(), model.steps, 1_000_000, WrongListError) > 100_000


ON_SWEEP = b"if not last or redis.call('GET', prefix .. 'sweeper') ~= sweeper then return end"
PLANTED = {
    "servers are not distinguished": (PROTOCOL, "all", b"ARGV[1] .. server\n", b"ARGV[1]\n"),
    "processes are not told apart": (SEARCHED["replicas"], "all", b"id('server', 'run_id') .. ", b""),
    "histories are not told apart": (SEARCHED["failback"], "all", b" .. id('replication', 'master_replid')", b""),
    "any server gives a page": (SEARCHED["replicas"], "scan", ON_SWEEP, b""),
    "a step goes on with a lost list": (PROTOCOL, "adopt", b"not last or ", b""),
    "a step goes on whoever sweeps": (PROTOCOL, "adopt", ON_SWEEP, b""),
    "a sweep ends whatever was lost": (PROTOCOL, "end_sweep", ON_SWEEP, b""),
    "an empty list counts as whole": (PROTOCOL, "settle", b"prefix .. 'listed', ", b""),
    "a sweep goes on in a new list": (PROTOCOL, "settle", b", prefix .. 'sweeper'", b""),
    "listed blocks are listed again": (SEARCHED["full"], "adopt", b"'NX', 0", b"0"),
    "unlisted blocks count as just used": (SEARCHED["full"], "adopt", b"'NX', 0", b"'NX', 9e9"),
    "deleted blocks are listed": (SEARCHED["deletions"], "adopt", b"EXISTS', prefix .. ARGV[i]", b"EXISTS', order"),
    "a sweep drops nothing": (SEARCHED["full"], "adopt", b"drop_beyond(tonumber(ARGV[2]), #ARGV)", b""),
}


@pytest.mark.parametrize("name", PLANTED)
def test_each_rule_is_needed(name: str):
    bounds, script, old, new = PLANTED[name]
    scripts = ("begin_sweep", "scan", "adopt", "end_sweep") if script == "all" else (script,)
    model = Model(replace(bounds, plant=tuple((script, old, new) for script in scripts)))
    with pytest.raises(WrongListError, match="after: "):
        explore(model.start(), model.steps, 100_000, WrongListError)
