"""`StepDecision` and `Pairs` as the scheduler and the executor see them."""

import numpy as np
import pytest

from blockyard import Pairs, StepDecision
from blockyard.errors import InvalidArgumentError, MappingError

ORDER = ["swap_out", "swap_in", "copy", "move", "exchange"]
TIERS = {"swap_out": ("device", "host"), "swap_in": ("host", "device")}


def pairs(kind: str, *ids: tuple[int, int]) -> Pairs:
    src, dst = TIERS.get(kind, ("device", "device"))
    return Pairs(src, dst, np.array(ids or [(0, 1)], dtype=np.int64))


def test_transfers_come_out_in_the_order_in_which_they_are_safe_to_run():
    decision = StepDecision(3, [(kind, pairs(kind)) for kind in reversed(ORDER)], after=[1, 3])
    assert [kind for kind, _ in decision.transfers()] == ORDER
    assert (decision.ticket, decision.after, len(decision)) == (3, (1, 3), len(ORDER))


@pytest.mark.parametrize("kind", ORDER)
def test_each_kind_is_a_tuple_that_is_empty_if_there_is_nothing_to_do(kind: str):
    assert getattr(StepDecision(1, []), kind) == ()
    (found,) = getattr(StepDecision(1, [(kind, pairs(kind, (2, 5), (7, 1)))]), kind)
    assert found.ids.tolist() == [[2, 5], [7, 1]]
    assert (found.src, found.dst) == TIERS.get(kind, ("device", "device"))
    assert len(found) == 2


@pytest.mark.parametrize("kind", ["swap_in", "swap_out", "copy"])
def test_the_names_that_engines_know_are_arrays_of_pairs(kind: str):
    name = f"blocks_to_{kind}"
    assert getattr(StepDecision(1, []), name).shape == (0, 2)
    stored = {"swap_out": [Pairs("device", "external", [(1, 1)])], "swap_in": [Pairs("external", "device", [(1, 1)])]}
    given = [*stored.get(kind, []), pairs(kind, (2, 5))]
    found = getattr(StepDecision(1, [(kind, each) for each in given]), name)
    assert (found.tolist(), found.dtype) == ([[2, 5]], np.int64)


def test_an_empty_decision_has_no_pairs_and_nothing_to_wait_for():
    decision = StepDecision(1, [])
    assert (len(decision), decision.transfers(), decision.after) == (0, [], ())


def test_an_unknown_kind_is_refused_by_name():
    with pytest.raises(InvalidArgumentError, match="'teleport'"):
        StepDecision(1, [("teleport", pairs("copy"))])


def test_pairs_keep_a_copy_of_their_array():
    ids = np.array([[0, 1]], dtype=np.int64)
    kept = Pairs("device", "host", ids)
    ids[:] = 9
    assert kept.ids.tolist() == [[0, 1]]
    assert kept.ids.flags.c_contiguous


def test_pairs_of_any_stride_are_taken():
    ids = np.arange(12, dtype=np.int64).reshape(6, 2)[::2, ::-1]
    assert Pairs("device", "host", ids).ids.tolist() == [[1, 0], [5, 4], [9, 8]]


@pytest.mark.parametrize(
    "ids",
    [np.zeros((1, 2), np.float32), np.zeros((1, 3), np.int64), np.zeros(2, np.int64), np.array([[0, -1]]), [[0]]],
)
def test_pairs_of_a_wrong_shape_or_dtype_are_refused(ids: object):
    with pytest.raises(MappingError):
        Pairs("device", "host", ids)


def same(one: StepDecision, other: StepDecision) -> bool:
    def described(decision: StepDecision) -> list:
        return [(kind, moved.src, moved.dst, moved.ids.tolist()) for kind, moved in decision.transfers()]

    return (one.ticket, one.after, described(one)) == (other.ticket, other.after, described(other))


def test_a_decision_goes_to_bytes_and_back():
    decision = StepDecision(3, [(kind, pairs(kind, (2, 5), (7, 1))) for kind in reversed(ORDER)], after=[1, 3])
    data = decision.to_bytes()
    assert same(StepDecision.from_bytes(data), decision)
    assert (data[:8], len(data) < StepDecision.MAX_BYTES) == (b"BLKYSTEP", True)


def test_entries_without_pairs_are_left_out_of_the_bytes():
    decision = StepDecision(3, [("copy", Pairs("device", "device", np.zeros((0, 2), np.int64)))])
    assert StepDecision.from_bytes(decision.to_bytes()).transfers() == []


def test_damaged_bytes_are_refused_and_say_why():
    data = StepDecision(3, [("copy", pairs("copy"))]).to_bytes()
    for damaged, message in [
        (data[:-1], "its payload is"),
        (data + b"\0", "its payload is"),
        (data[:25] + bytes([data[25] ^ 1]) + data[26:], "its checksum does not match"),
        (data[:8] + b"\x09" + data[9:], "its version is 9"),
        (b"\x80\x04" + data, "it does not begin with BLKYSTEP"),
        (b"", "0 bytes are too few"),
    ]:
        with pytest.raises(MappingError, match=f"the decision is refused: .*{message}"):
            StepDecision.from_bytes(damaged)


def test_a_decision_that_cannot_be_carried_out_is_not_written():
    twice = StepDecision(3, [("swap_in", pairs("swap_in", (1, 4), (2, 4)))])
    with pytest.raises(MappingError, match="device block 4 is written twice by swap_in"):
        twice.to_bytes()
    with pytest.raises(MappingError, match="pairs of kind swap_in go from device to device"):
        StepDecision(3, [("swap_in", pairs("copy"))]).to_bytes()
