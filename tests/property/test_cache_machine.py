"""Random programs over whole caches, with every byte that compute reads compared with a plain model."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from cache_machine import Op
from cache_rig import Config, random_config
from hypothesis import settings
from random_cache_programs import Program, config_with_groups, failure, on_device, random_program, shrink

LENGTH = 300
PARTS = 10  # a test may take ten minutes


@pytest.fixture(scope="module")
def programs() -> int:
    """How many to run: as many as have BLOCKYARD_OPERATIONS lines, or 1,000,000 under a thorough profile, or few."""
    thorough = settings().max_examples >= 1000
    return int(os.environ.get("BLOCKYARD_OPERATIONS") or (1_000_000 if thorough else 24_000)) // LENGTH


def no_byte_is_wrong(programs: Iterable[Program]) -> None:
    for program in programs:
        error = failure(program)
        if error is not None:
            small = shrink(program)
            raise AssertionError(f"a program fails, and so does\n{small}") from (failure(small) or error)


@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_features_work_together_no_byte_is_wrong_and_no_block_is_lost(programs: int, part: int):
    no_byte_is_wrong(random_program(seed, LENGTH) for seed in range(part, programs, PARTS))


@pytest.mark.parametrize("part", range(PARTS))
def test_points_on_the_host_and_in_stores_have_their_bytes(programs: int, part: int):
    """Of models with windows, states and drafters: whole, late, lost or partial, and after restarts."""
    configs = ((seed, config_with_groups(seed, stored=True)) for seed in range(part, programs, PARTS))
    no_byte_is_wrong(random_program(seed, LENGTH, config) for seed, config in configs)


LAST_EXTENTS = (
    Op("note", 4706, 26881, 28975, 61722, 574367565, -1),
    Op("load", 44398, 12973, 33535, 39052, 390762739, -1),
    Op("write", 11401, 49302, 24266, 30397, 108703000, -1),
    Op("append", 2056, 34073, 32472, 12092, 503006719, -1),
    Op("step", 35758, 62186, 10826, 36668, 386952308, -1),
    Op("step", 47071, 40473, 59790, 2015, 5631439, -1),
    Op("swap", 58993, 56789, 8242, 14081, 995186186, -1),
    Op("allocate", 36717, 64405, 43517, 64485, 950063155, -1),
    Op("append", 35617, 23521, 27171, 8561, 518737909, -1),
    Op("step", 7262, 23953, 39338, 52591, 300001050, -1),
    Op("step", 1996, 4199, 9044, 34741, 247739991, -1),
    Op("swap", 49161, 5813, 14690, 6086, 734932326, -1),
    Op("step", 36975, 54769, 32745, 51181, 462019842, -1),
    Op("swap", 13106, 8779, 56007, 47772, 603377412, -1),
    Op("step", 30496, 3659, 5747, 58527, 538583559, -1),
    Op("step", 46746, 35006, 42384, 16467, 113796844, -1),
    Op("step", 6993, 18713, 46383, 11592, 147979552, -1),
)


@pytest.mark.parametrize("external", [0, 11])
def test_a_prompt_that_fits_by_blocks_but_not_by_bytes_is_admitted(external: int):
    """Its blocks lie in extents that are filled in part, which no count of bytes sees: it waited for ever."""
    config = Config(
        block_size=4,
        device=8,
        most=8,
        host=3,
        external=external,
        room=6,
        max_recorded=1048577,
        eviction="priority",
        reuse="lru",
        staging=6,
        chunk=64,
        outstanding=4,
        swap_cost=1e9,
        groups="full window",
        classes=True,
        store="back",
        scheduler=True,
        mode="recompute",
    )
    assert failure(Program(config, LAST_EXTENTS)) is None


NO_EXTENT_LEFT = (
    Op("truncate", 60985, 0, 0, 14768, 376785515, -1),
    Op("load", 0, 0, 0, 53452, 848837290, -1),
    Op("swap", 0, 0, 17127, 0, 373363590, -1),
    Op("step", 0, 0, 63269, 0, 573444855, -1),
    Op("swap", 0, 0, 52301, 0, 958806193, -1),
    Op("append", 0, 0, 1444, 0, 740801122, -1),
    Op("resize", 0, 0, 0, 0, 733048057, -1),
)


def test_a_swapped_request_is_recomputed_if_nothing_else_can_make_room():
    """What it has cached leaves no extent to its states once the arena has shrunk: it waited for ever."""
    sizes: dict[str, Any] = {"block_size": 1, "device": 8, "external": 0, "room": 6, "staging": 6, "chunk": 64}
    more: dict[str, Any] = {"store": "through", "groups": "full state", "classes": True, "reuse": "fifo"}
    config = Config(**sizes, **more, max_recorded=1 << 20, scheduler=True, mode="swap", swap_cost=0.0)
    assert failure(Program(config, NO_EXTENT_LEFT)) is None


SLIDING_OVER_EXTENTS = (
    Op("allocate", 57314, 0, 0, 35004, 1009030668, -1),
    Op("allocate", 42005, 0, 0, 0, 53578384, -1),
    Op("step", 0, 0, 0, 0, 813306532, -1),
    Op("step", 0, 0, 17893, 0, 785814805, -1),
    Op("write", 36092, 0, 0, 0, 300895592, -1),
    Op("truncate", 0, 0, 0, 13785, 153458692, -1),
    Op("append", 0, 0, 0, 0, 106207764, -1),
    Op("swap", 0, 0, 23833, 0, 660606515, -1),
    Op("resize", 0, 0, 0, 0, 917872889, -1),
    Op("truncate", 0, 0, 0, 32952, 924296614, -1),
    Op("swap", 0, 0, 0, 57997, 469184393, -1),
    Op("allocate", 30485, 31845, 60769, 25988, 575713471, -1),
)


def test_a_window_takes_no_more_extents_than_it_fills():
    """It slid over three extents of four and needed two, so its own answer never got a block."""
    sizes: dict[str, Any] = {
        "device": 24,
        "most": 32,
        "host": 23,
        "external": 3,
        "prefix": "",
        "staging": 6,
        "chunk": 1,
    }
    more: dict[str, Any] = {"groups": "full window", "classes": True, "reuse": "lru", "outstanding": 1, "room": 6}
    config = Config(**sizes, **more, scheduler=True, mode="swap", swap_cost=1e9)
    assert failure(Program(config, SLIDING_OVER_EXTENTS)) is None


def test_a_quota_holds_although_no_block_leads_to_a_point():
    """Blocks beside those of a drafter hung on these, which no longer led to a point, and stayed beyond the quota."""
    sizes: dict[str, Any] = {"block_size": 3, "host": 24, "external": 6, "prefix": "device", "staging": 2, "chunk": 1}
    config = Config(**sizes, groups="all", classes=True, scheduler=True, mode="recompute", swap_cost=0.0)
    ops = (Op("quota", b=35938, seed=936556885), Op("allocate", d=41757, seed=429400330))
    assert failure(Program(config, ops)) is None


def test_states_without_a_prefix_cache_are_marked():
    """Those that are passed over count as published, and have no keys."""
    config = Config(device=12, most=20, host=0, external=5, prefix="", groups="state", lookahead=1)
    ops = (
        Op("allocate", seed=724446819),
        Op("step", c=11577, seed=409806223),
        Op("append", b=64554, seed=452266839),
        Op("step", c=16194, seed=788527699),
    )
    assert failure(Program(config, ops)) is None


HELD_BY_A_COPY = (
    Op("fork", 2504, 29851, 0, 36032, 933910445, -1),
    Op("write", 0, 0, 0, 0, 347590787, -1),
    Op("allocate", 62979, 0, 28536, 21828, 784362293, -1),
    Op("resize", 32336, 0, 0, 0, 730087577, -1),
    Op("free", 48316, 0, 0, 0, 311012213, -1),
    Op("mark", 0, 0, 7176, 0, 44646430, -1),
    Op("swap", 0, 0, 54280, 0, 494742823, -1),
    Op("step", 0, 0, 6699, 0, 55125060, -1),
    Op("append", 0, 0, 41705, 0, 867219022, -1),
    Op("step", 0, 0, 19867, 0, 112859299, -1),
    Op("step", 0, 0, 23277, 0, 826838346, -1),
    Op("step", 0, 0, 23330, 0, 736162641, -1),
    Op("swap", 0, 0, 22256, 0, 10907764, -1),
    Op("swap", 0, 0, 59694, 0, 670813529, -1),
    Op("append", 0, 0, 32739, 0, 177082753, -1),
    Op("allocate", 46706, 0, 0, 51781, 527784457, -1),
    Op("append", 0, 0, 43032, 0, 912081056, -1),
)


def test_a_prompt_waits_for_its_own_blocks_that_are_copied_to_the_store():
    """No step had work meanwhile, and three such steps were an error, however long the copy took."""
    sizes: dict[str, Any] = {
        "block_size": 4,
        "device": 10,
        "most": 10,
        "host": 2,
        "external": 11,
        "room": 6,
        "outstanding": 4,
        "chunk": 64,
    }
    more: dict[str, Any] = {
        "store": "second_use",
        "faulty_stores": True,
        "groups": "window",
        "classes": True,
        "reuse": "lru",
    }
    config = Config(**sizes, **more, scheduler=True, swap_cost=1e9, max_recorded=(1 << 20) + 1, scraped=True)
    assert failure(Program(config, HELD_BY_A_COPY)) is None


LATE_DEATH = (
    Op("fork", 62519, 0, 44309, 21612, 134657827, -1),
    Op("step", 0, 0, 29972, 0, 19885361, -1),
    Op("append", 0, 0, 56055, 0, 662415900, -1),
    Op("step", 0, 0, 60688, 0, 559364857, -1),
    Op("allocate", 63108, 0, 0, 38837, 516928151, -1),
    Op("poll", 0, 0, 0, 0, 564982804, -1),
    Op("step", 0, 0, 46545, 0, 768733560, -1),
    Op("write", 60291, 0, 0, 27097, 711132072, -1),
    Op("note", 37411, 0, 53800, 7805, 162878277, -1),
    Op("swap", 0, 0, 46196, 0, 743673275, -1),
    Op("drain", 2075, 0, 0, 0, 1044417332, -1),
    Op("swap", 0, 0, 35933, 0, 331128516, -1),
    Op("append", 0, 0, 7622, 0, 101065207, -1),
    Op("step", 0, 0, 34174, 0, 272703199, -1),
    Op("quota", 7718, 5626, 0, 0, 904472447, -1),
    Op("step", 0, 0, 0, 0, 484634466, -1),
    Op("allocate", 62281, 0, 7878, 29816, 857244219, -1),
    Op("swap", 0, 0, 2936, 0, 1018222645, -1),
    Op("step", 0, 0, 50413, 0, 398302492, -1),
    Op("load", 527, 0, 0, 25837, 1025019539, -1),
    Op("append", 0, 0, 41737, 0, 799675970, -1),
    Op("step", 0, 0, 408, 0, 903778208, -1),
    Op("step", 0, 0, 50674, 0, 881782760, -1),
    Op("swap", 322, 0, 26504, 41475, 907997223, -1),
    Op("append", 0, 0, 54119, 0, 37486811, -1),
    Op("free", 0, 0, 0, 0, 637833848, -1),
)


def test_what_was_cached_before_a_quota_does_not_count_once_a_later_point_needs_it_too():
    """A window's block stayed with the point before the quota, and counted for the tenant of the one after it."""
    config = Config(
        device=24,
        most=24,
        host=24,
        external=7,
        store="second_use",
        groups="full window",
        reuse="lru",
        staging=6,
        chunk=1,
        scheduler=True,
        max_pinned=0.9,
        lookahead=3,
        max_recorded=25,
        scraped=True,
        outstanding=4,
        room=6,
    )
    ops = (
        Op("allocate", 20722, 49696, 0, 42697, 541240476),
        Op("swap", c=35764, seed=191156105),
        Op("quota", b=20288, seed=624633258),
        Op("load", 21143, 473, 2701, seed=1054383870),
        Op("append", c=8822, seed=461136310),
        Op("free", seed=200349766),
    )
    assert failure(Program(config, ops)) is None


def test_what_hangs_on_a_block_that_dies_late_goes_if_its_tenant_is_beyond_its_quota():
    """It was looked for only while the block was still in use, and stayed for good."""
    config = Config(
        block_size=3,
        device=8,
        host=9,
        external=20,
        store="through",
        groups="all",
        eviction="priority",
        reuse="fifo",
        staging=2,
        chunk=2,
        fail=0.02,
        scheduler=True,
        max_pinned=0.9,
        swap_cost=3.0,
        scraped=True,
        outstanding=1,
        classes=True,
    )
    assert failure(Program(config, LATE_DEATH)) is None


# Python itself swallows an interrupt that arrives in a weak reference's callback.
@pytest.mark.filterwarnings("ignore:Exception ignored in.*:pytest.PytestUnraisableExceptionWarning")
def test_after_real_signals_no_byte_is_wrong_and_nothing_is_stuck(programs: int):
    for seed in range(programs // 8):
        config = replace(random_config(Random(seed)), interrupts=0.5, signals=True)
        error = failure(on_device(random_program(seed, LENGTH, config), "cpu"))
        if error is not None:
            raise AssertionError(f"the program of seed {seed} fails") from error


@pytest.mark.parametrize("chunk", [0, 4096], ids=["simulated memory", "pages"])
def test_no_byte_is_wrong_on_the_threads_of_a_cpu(programs: int, chunk: int):
    """With pages, each block fills whole pages, and a cache that shrinks returns them."""
    for seed in range(programs // 8):
        error = failure(on_device(random_program(seed, LENGTH), "cpu", chunk))
        if error is not None:
            raise AssertionError(f"the program of seed {seed} fails") from error


BATCH_OF_LEASES = (
    Op("truncate", 36425, 43844, 0, 35144, 139943600, -1),
    Op("drain", 39015, 0, 0, 0, 553051704, -1),
    Op("allocate", 9932, 46665, 0, 4321, 983463594, -1),
    Op("load", 62651, 0, 0, 0, 1033652243, -1),
)


def test_a_batch_of_prompts_takes_what_is_leased_for_its_first_before_the_lease_ends():
    """It was counted as free for the second, too: the manager refused the batch, and the step raised."""
    sizes: dict[str, Any] = {"block_size": 1, "device": 8, "host": 24, "external": 24, "chunk": 2, "outstanding": 4}
    more: dict[str, Any] = {"jobs": "through", "eviction": "adaptive", "faulty_stores": True, "interrupts": 0.1}
    config = Config(
        **sizes, **more, scheduler=True, mode="swap", swap_cost=0.0, lookahead=3, max_recorded=25, scraped=True
    )
    assert failure(Program(config, BATCH_OF_LEASES)) is None


SHRUNK_CLASSES = (
    Op("allocate", 0, 0, 0, 0, 976287800, -1),
    Op("step", 0, 0, 6478, 0, 1022809781, -1),
    Op("swap", 0, 0, 0, 0, 864455877, -1),
    Op("step", 0, 0, 0, 0, 56137406, -1),
    Op("allocate", 50953, 0, 0, 34723, 709140367, -1),
    Op("resize", 10226, 0, 0, 0, 721200309, -1),
    Op("step", 0, 0, 55731, 0, 1008898688, -1),
    Op("swap", 0, 0, 0, 31367, 425415773, -1),
    Op("allocate", 51746, 0, 0, 15364, 692994177, -1),
    Op("allocate", 14029, 0, 0, 50646, 99576514, -1),
    Op("allocate", 0, 0, 0, 0, 2330821, -1),
    Op("allocate", 47956, 0, 0, 50595, 87248017, -1),
    Op("append", 47448, 13744, 0, 0, 596881815, -1),
    Op("free", 4533, 0, 0, 0, 873413842, -1),
    Op("step", 0, 0, 43204, 0, 276541666, -1),
    Op("allocate", 30939, 0, 0, 61224, 969617494, -1),
    Op("free", 26579, 0, 0, 0, 1025662699, -1),
    Op("resize", 38290, 0, 0, 0, 465589492, -1),
    Op("append", 16903, 43930, 0, 0, 578359567, -1),
    Op("swap", 0, 18308, 0, 0, 976053590, -1),
)


def test_a_swap_in_leaves_room_for_the_next_token_while_an_arena_shrinks():
    """Blocks in use beyond the end count for their class: it needs an extent that another class took."""
    config = Config(
        block_size=3,
        device=24,
        most=24,
        host=20,
        external=24,
        store="back",
        groups="all",
        reuse="lru",
        staging=2,
        chunk=2,
        faulty_stores=True,
        interrupts=0.1,
        max_pinned=0.9,
        mode="recompute",
        swap_cost=0.0,
        max_recorded=25,
        outstanding=1,
        classes=True,
    )
    assert failure(Program(config, SHRUNK_CLASSES)) is None
