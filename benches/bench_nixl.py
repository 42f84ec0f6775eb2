"""Copies compared with NIXL's: host to file and back with its POSIX plugin, host to host with its UCX plugin.

    pip install --no-deps --target nixl nixl==1.5.1 nixl-cu13==1.5.1
    PYTHONPATH=nixl python benches/bench_nixl.py [--rounds 5] [--sizes 64k,256k,1m,2m] [--folder DIR]

Files: random blocks of a file of 256 MiB on one file system, page-aligned rows, batches of 8 MiB, four in flight;
with O_DIRECT and through the page cache. `nixl_aio` and `nixl_uring` are its POSIX plugin over Linux AIO and io_uring,
with prepared descriptor lists. `slot` and `key` are our swap space (`submit_write`, `submit_read`) and prefix store
(`submit_put`, `submit_get`).

Host: 256 MiB of random blocks to random places. `ours` is the op `swap_blocks`, `one_copy` is torch's `copy_` of all.
`nixl_ucx` uses two agents in one process; `nixl_ucx_process_write` and `_read` access the memory of another process.

All variants take turns. Each figure is the median over the rounds: GB/s, and CPU seconds per GB of all participating
processes. NIXL must be polled for completion; its caller polls every 100 us.

With BENCH_JSON=FILE the figures go to the flat JSON object in FILE: `nixl_file_write_64k_direct_nixl_aio_gb_s` and so
on. Without nixl it says so and does nothing.
"""

import argparse
import logging
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_file_fio import AHEAD, BATCH_BYTES, BYTES, SIZES, THREADS, aligned
from figures import keep
from numpy.typing import NDArray

from blockyard.engine import ops
from blockyard.stores import ExternalStore, open_store

ASK_SECONDS = 1e-4
LOCAL = "NIXL_INIT_AGENT"

Way = Callable[[int], float]  # moves all bytes in an order given by the seed; returns CPU seconds of other processes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns for each figure; one more warms up")
    parser.add_argument("--sizes", default="64k,256k,1m,2m", help=f"of blocks, from {', '.join(SIZES)}")
    parser.add_argument("--folder", help="on the disk to measure; a temporary one if not given")
    arguments = parser.parse_args()
    try:
        import nixl  # noqa: F401, PLC0415 - it may be missing
    except ImportError as error:
        print(f"nixl cannot be imported: {error}; nothing to compare with")
        return
    logging.getLogger("nixl").setLevel(logging.ERROR)
    figures: dict[str, float] = {}
    for name in arguments.sizes.split(","):
        for direct in ("direct", "cached"):
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, ExitStack() as stack:
                ways = files(stack, folder, SIZES[name], direct=direct == "direct")
                for what in ("write", "read"):
                    turns = {way: calls[what] for way, calls in ways.items()}
                    figures |= measured(f"nixl_file_{what}_{name}_{direct}", turns, arguments.rounds)
        with ExitStack() as stack:
            figures |= measured(f"nixl_host_{name}", hosts(stack, SIZES[name]), arguments.rounds)
    keep(figures)


def measured(prefix: str, ways: dict[str, Way], rounds: int) -> dict[str, float]:
    """Let the variants take turns, with a different first one each round; print and return the medians."""
    seen: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        order = [*ways][number % len(ways) :] + [*ways][: number % len(ways)]
        for name in order:
            wall, cpu = time.perf_counter(), time.process_time()
            others = ways[name](number)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu + others
            if number:
                seen.setdefault(f"{prefix}_{name}_gb_s", []).append(BYTES / 1e9 / wall)
                seen.setdefault(f"{prefix}_{name}_cpu_s_per_gb", []).append(cpu / (BYTES / 1e9))
    figures = {name: statistics.median(values) for name, values in seen.items()}
    for name, value in figures.items():
        print(f"{name:56} {value:8.3f}", flush=True)
    return figures


# ---- host and file ----


def files(stack: ExitStack, folder: str, size: int, *, direct: bool) -> dict[str, dict[str, Way]]:
    """Open both sides on separate files; each has a function to write and one to read."""
    ways: dict[str, dict[str, Way]] = {}
    for queue in ("aio", "uring"):
        posix = stack.enter_context(posix_file(f"{folder}/{queue}", size, queue, direct=direct))
        ways[f"nixl_{queue}"] = {what: through_nixl(*posix, what.upper()) for what in ("write", "read")}
        ways[f"nixl_{queue}"]["write"](0)
        require_blocks(f"{folder}/{queue}", posix[3][0][0])
    for name, use, calls in (("slot", "swap", ("write", "read")), ("key", "prefix", ("put", "get"))):
        url = f"file://{folder}/{name}?threads={THREADS}&direct={'on' if direct else 'off'}"
        options: Any = {"bytes_per_block": size, "num_slots": BYTES // size, "use": use}
        store = stack.enter_context(open_store(url, **options))
        ways[name] = {what: through_store(store, call) for what, call in zip(("write", "read"), calls, strict=True)}
    return ways


def require_blocks(path: str, block: NDArray[np.uint8]) -> None:
    """Check that each block of a file equals the block written everywhere."""
    with Path(path).open("rb") as file:
        while read := file.read(len(block)):
            if read != block.tobytes():
                raise SystemExit(f"{path} has other bytes")


@contextmanager
def posix_file(path: str, size: int, queue: str, *, direct: bool) -> Iterator[tuple[Any, Any, Any, list[Any], int]]:
    """Return an agent with the POSIX plugin, descriptors of the rows and file blocks, the rows, and a block's bytes."""
    from nixl._api import nixl_agent, nixl_agent_config  # noqa: PLC0415 - it may be missing

    agent = nixl_agent(f"posix-{queue}", nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("POSIX", {f"use_{queue}": "true"})
    file = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)
    os.posix_fallocate(file, 0, BYTES)
    rows = [aligned(max(1, BATCH_BYTES // size), size) for _ in range(AHEAD)]
    memory = [(row.ctypes.data, row.nbytes, 0, "") for row in rows]
    held = [
        agent.register_memory(memory, "DRAM", backends=["POSIX"]),
        agent.register_memory([(0, BYTES, file, "")], "FILE", backends=["POSIX"]),
    ]
    blocks = [(start + at, size, 0) for start, length, *_ in memory for at in range(0, length, size)]
    local = agent.prep_xfer_dlist(LOCAL, blocks, "DRAM", ["POSIX"])
    places = [(at, size, file) for at in range(0, BYTES, size)]
    remote = agent.prep_xfer_dlist(agent.name, places, "FILE", ["POSIX"])
    try:
        yield agent, local, remote, rows, size
    finally:
        agent.release_dlist_handle(local)
        agent.release_dlist_handle(remote)
        for registered in held:
            agent.deregister_memory(registered)
        os.close(file)


def through_nixl(agent: Any, local: Any, remote: Any, rows: list[NDArray[np.uint8]], size: int, what: str) -> Way:
    count = len(rows[0])

    def run(seed: int) -> float:
        order = np.random.default_rng(seed).permutation(BYTES // size).astype(np.int32)
        open_batches: list[Any] = []
        for number, places in enumerate(np.array_split(order, len(order) // count)):
            if len(open_batches) == AHEAD:
                finish(agent, open_batches.pop(0))
            first = number % AHEAD * count
            mine = np.arange(first, first + len(places), dtype=np.int32)
            open_batches.append(begin(agent, agent.make_prepped_xfer(what, local, mine, remote, places)))
        for batch in open_batches:
            finish(agent, batch)
        return 0.0

    return run


def through_store(store: ExternalStore, call: str) -> Way:
    size = store.bytes_per_block
    count = max(1, BATCH_BYTES // size)
    rows = [aligned(count, size) for _ in range(AHEAD)]
    submit = getattr(store, f"submit_{call}")

    def run(seed: int) -> float:
        keyed = call in {"put", "get"}
        keys = np.random.default_rng(seed).integers(0, 256, (store.num_slots, 32), dtype=np.uint8)
        if keyed and call == "get":  # those of the last put
            keys = np.random.default_rng(LAST["put"]).integers(0, 256, keys.shape, dtype=np.uint8)
        LAST[call] = seed
        order = np.random.default_rng(seed).permutation(store.num_slots)
        tickets: list[int] = []
        for number, batch in enumerate(np.array_split(order, len(order) // count)):
            if len(tickets) == AHEAD:
                collect(store, tickets.pop(0))
            tickets.append(submit(keys[batch] if keyed else batch, rows[number % AHEAD][: len(batch)]))
        for ticket in tickets:
            collect(store, ticket)
        return 0.0

    return run


LAST: dict[str, int] = {}


def collect(store: ExternalStore, ticket: int) -> None:
    done = store.wait(ticket)
    if not done.ok.all():
        raise SystemExit(f"{done.reasons[:4]} {store.stats()}")


# ---- host and host ----


def hosts(stack: ExitStack, size: int) -> dict[str, Way]:
    """Return the ways to copy random blocks of one tensor to random places in another."""
    src, dst = (torch.from_numpy(aligned(BYTES // size, size)) for _ in range(2))
    src.copy_(torch.randint(0, 256, src.shape, dtype=torch.uint8))

    def ours(seed: int) -> float:
        pairs = np.column_stack(places_of(seed, size))
        ops.swap_blocks([src], [dst], torch.from_numpy(pairs))
        return 0.0

    def one_copy(_seed: int) -> float:
        dst.copy_(src)
        return 0.0

    ways: dict[str, Way] = {"one_copy": one_copy, "ours": ours, "nixl_ucx": between_agents(stack, src, dst, size)}
    ways |= {
        f"nixl_ucx_process_{what.lower()}": way
        for what, way in stack.enter_context(between_processes(src, size)).items()
    }
    for name in ("ours", "nixl_ucx"):
        dst.zero_()
        ways[name](7)
        at, to = places_of(7, size)
        if not torch.equal(src[at], dst[to]):
            raise SystemExit(f"{name} copied other bytes")
    return ways


def places_of(seed: int, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    random = np.random.default_rng(seed)
    return random.permutation(BYTES // size), random.permutation(BYTES // size)


def ucx_agent(name: str, memory: torch.Tensor) -> tuple[Any, list[tuple[int, int, int]]]:
    """Return an agent with the UCX plugin and a registered tensor, and the descriptors of its rows."""
    from nixl._api import nixl_agent, nixl_agent_config  # noqa: PLC0415 - it may be missing

    # Its thread would spin during the others' turns.
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    agent.register_memory([(memory.data_ptr(), memory.nbytes, 0, "")], "DRAM")
    size = memory.shape[1]
    return agent, [(memory.data_ptr() + at, size, 0) for at in range(0, memory.nbytes, size)]


def between_agents(stack: ExitStack, src: torch.Tensor, dst: torch.Tensor, size: int) -> Way:
    mine, blocks = ucx_agent(f"src-{size}", src)
    other, places = ucx_agent(f"dst-{size}", dst)
    peer = mine.add_remote_agent(other.get_agent_metadata())
    local = mine.prep_xfer_dlist(LOCAL, blocks, "DRAM")
    remote = mine.prep_xfer_dlist(peer, places, "DRAM")
    stack.callback(lambda: (mine.release_dlist_handle(local), mine.release_dlist_handle(remote)))
    return one_request(mine, local, remote, size, "WRITE", other)


def one_request(agent: Any, local: Any, remote: Any, size: int, what: str, other: Any = None) -> Way:
    def run(seed: int) -> float:
        at, to = places_of(seed, size)
        request = agent.make_prepped_xfer(what, local, at.astype(np.int32), remote, to.astype(np.int32))
        finish(agent, begin(agent, request), other)
        return 0.0

    return run


@contextmanager
def between_processes(src: torch.Tensor, size: int) -> Iterator[dict[str, Way]]:
    """Return the ways to write to and read from the memory of another process, whose CPU time also counts."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=hold_memory, args=(theirs, size), daemon=True)
    process.start()
    metadata, places = pipe.recv()
    agent, blocks = ucx_agent(f"reader-{size}", src)
    peer = agent.add_remote_agent(metadata)
    local = agent.prep_xfer_dlist(LOCAL, blocks, "DRAM")
    remote = agent.prep_xfer_dlist(peer, places, "DRAM")

    def counted(what: str) -> Way:
        run = one_request(agent, local, remote, size, what)

        def both(seed: int) -> float:
            pipe.send("turn")
            run(seed)
            pipe.send("over")
            return float(pipe.recv())

        return both

    before = src.clone()
    ways = {what: counted(what) for what in ("WRITE", "READ")}
    ways["WRITE"](7)
    src.zero_()
    ways["READ"](7)
    if not torch.equal(src, before):
        raise SystemExit("the other process returned other bytes")
    try:
        yield ways
    finally:
        agent.release_dlist_handle(local)
        agent.release_dlist_handle(remote)
        pipe.send("end")
        process.join(30)


def hold_memory(pipe: Any, size: int) -> None:
    """In the other process: register memory, report its address, and help with transfers during the turns."""
    logging.getLogger("nixl").setLevel(logging.ERROR)
    memory = torch.from_numpy(aligned(BYTES // size, size))
    agent, places = ucx_agent(f"holder-{size}", memory)
    pipe.send((agent.get_agent_metadata(), places))
    while pipe.recv() == "turn":
        cpu = time.process_time()
        while not pipe.poll():
            agent.get_new_notifs()
            time.sleep(ASK_SECONDS)
        pipe.recv()
        pipe.send(time.process_time() - cpu)


# ---- NIXL's requests ----


def begin(agent: Any, request: Any) -> Any:
    if agent.transfer(request) == "ERR":
        raise SystemExit("NIXL refuses the transfer")
    return request


def finish(agent: Any, request: Any, other: Any = None) -> None:
    while (state := agent.check_xfer_state(request)) != "DONE":
        if state == "ERR":
            raise SystemExit("a transfer of NIXL failed")
        if other is not None:
            other.get_new_notifs()  # it has no thread
        time.sleep(ASK_SECONDS)
    agent.release_xfer_handle(request)


if __name__ == "__main__":
    main()
