"""A clock that a program sets, what is due at which time, and copies that take time."""

from __future__ import annotations

from math import inf

from blockyard.stores.threaded.runtime import runtime, use_runtime
from blockyard.tools.virtual_time import Agenda, CopyLink, VirtualTime


def test_time_passes_only_when_someone_sets_it_or_sleeps():
    time = VirtualTime(5.0)
    with use_runtime(time):
        clock = runtime().monotonic
    assert clock() == clock() == 5.0
    time.sleep(2.0)
    time.wait_readable(-1, 0.5)
    assert clock() == 7.5
    time.now = 3.0
    assert clock() == 3.0


def test_an_agenda_gives_what_is_due_in_order_of_time_and_then_of_size():
    agenda = Agenda[int]()
    assert (len(agenda), agenda.next_at, agenda.take(1e9)) == (0, inf, [])
    for at, what in ((2.0, 7), (1.0, 9), (2.0, 3), (4.0, 1)):
        agenda.add(at, what)
    assert (len(agenda), agenda.next_at) == (4, 1.0)
    assert agenda.take(0.5) == []
    assert agenda.take(2.0) == [(1.0, 9), (2.0, 3), (2.0, 7)]
    assert agenda.next_at == 4.0
    assert agenda.pop() == (4.0, 1)
    assert not len(agenda)


def test_a_link_carries_one_batch_after_the_other():
    link = CopyLink(bandwidth=100.0, latency=0.5)
    assert link.send(1.0, 50) == 2.0
    assert link.send(1.0, 100) == 3.5  # behind the first
    assert link.send(10.0, 0) == link.free_at == 10.5
