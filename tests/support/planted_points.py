"""Faults planted in what groups need and in resume points, and the machines that find them.

`python tests/support/planted_points.py [SEEDS] [WORD]` prints a table of the faults whose name has the word.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 10.0
"""CPU time of a search."""

# A file of `rust/core/src`, a text that it has once, an expression in it, and its faulty replacement. One build has
# all faults, and enables the one whose number it is given.
FAULTS = {
    "a window is a token short": ("group.rs", "computed.saturating_add(1).saturating_sub(window)", "1", "2"),
    "a chunk forgets its first blocks": (
        "group.rs",
        "Self::Chunked { chunk } => computed - computed % chunk",
        "computed % chunk",
        "0",
    ),
    "a state of the wrong position is kept (SGLang #33450)": (
        "group.rs",
        "Self::Recurrent => computed.saturating_sub(1),",
        "computed.saturating_sub(1)",
        "computed",
    ),
    "a prompt continues where nothing is kept": (
        "sequence/points.rs",
        "rposition(|&block| points.has_point(block))",
        "points.has_point(block)",
        "points.tail(block).len() < 1000",
    ),
    "tails are read in units of another group (vLLM #55600)": (
        "sequence/points.rs",
        "let (own, rest) = tail.split_at(needed.len());\n                tail = rest;",
        "tail = rest",
        "tail = if own.len() * 2 <= tail.len() { tail } else { rest }",
    ),
    "one block inside the last window is gone (SGLang #35515)": (
        "prefix/points/mod.rs",
        "if self.owners[block.index()] == 0 && self.outside.remove_idle(block) {",
        "self.owners[block.index()] == 0 && self.outside.remove_idle(block)",
        "self.outside.remove_idle(block)",
    ),
    "a point survives a lost block": (
        "prefix/points/mod.rs",
        "if points.is_owned(block) {\n                self.drop_owners(block);",
        "points.is_owned(block)",
        "false",
    ),
    "half a point is left": (
        "prefix/points/mod.rs",
        "            self.drop_point(anchor);\n        }\n    }\n\n    /// The bytes of a block are gone.",
        "self.drop_point(anchor)",
        "()",
    ),
    "anchors before a point are not counted": (
        "prefix/points/mod.rs",
        "if *reasons != 1 {\n                        return;",
        "*reasons != 1",
        "true",
    ),
    "a dead anchor is still counted": (
        "prefix/points/mod.rs",
        "            *reasons -= 1;\n            anchor = parent;",
        "1",
        "0",
    ),
    "a lost anchor cuts off nothing": (
        "prefix/points/sweep.rs",
        "if !std::mem::take(&mut self.points.is_broken) ||",
        "!std::mem::take(&mut self.points.is_broken)",
        "std::mem::take(&mut self.points.is_broken)",
    ),
    "a moved block stays in its tails": (
        "prefix/points/mod.rs",
        "named.filter(|block| **block == from)",
        "**block == from",
        "false",
    ),
    "a moved anchor loses its point": (
        "prefix/points/mod.rs",
        "            points.bundles.insert(to, bundle);",
        "points.bundles.insert(to, bundle)",
        "points.bundles.insert(to, Bundle { tail: None, ..bundle })",
    ),
    "a lost companion is not noticed": (
        "prefix/points/mod.rs",
        "let companions = std::mem::take(&mut bundle.companions);",
        "std::mem::take(&mut bundle.companions)",
        "bundle.companions.clone()",
    ),
    "dead blocks wait for their turn": (
        "prefix/points/mod.rs",
        "let belongs = self.keyless.contains(block) || !self.is_live(block);",
        "!self.is_live(block)",
        "false",
    ),
    "a point survives its anchor": (
        "prefix/points/mod.rs",
        "self.drop_point(block);\n        if self.points.reasons(block) > 0 {",
        "self.drop_point(block)",
        "()",
    ),
    "a point keeps no tail": (
        "prefix/points/mod.rs",
        "(bundle.tail, bundle.is_junction) = (Some(tail.into()), is_junction);",
        "Some(tail.into())",
        "Some(tail[..tail.len() / 2].into())",
    ),
    "a state in the middle of a block is kept": (
        "sequence/points.rs",
        "row.published as usize >= at",
        "row.published as usize >= at",
        "false",
    ),
    "a point is made before its last token": (
        "sequence/points.rs",
        "let end = self.groups.whole(computed, self.block_size).min(u32",
        "self.groups.whole(computed, self.block_size)",
        "computed.div_ceil(self.block_size)",
    ),
    "a point is used at another position": (
        "sequence/points.rs",
        ".map_or(0, |last| last + 1);",
        "last + 1",
        "last.div_ceil(2)",
    ),
    "a block without a key is written in place": (
        "pool/cached.rs",
        "self.blocks[block.index()].set_tag(NO_KEY)",
        "NO_KEY",
        "0",
    ),
    "a merged block is not counted": (
        "sequence/points.rs",
        "        step.tiers.claim((Tier::Device, canonical));\n        row.table.replace",
        "step.tiers.claim((Tier::Device, canonical))",
        "()",
    ),
    "a shared block counts as free": (
        "sequence/append/mod.rs",
        "now.refs() == 1 && !now.is_leased()",
        "now.refs() == 1",
        "true",
    ),
    "a companion of another place": (
        "sequence/points.rs",
        "points.companions(*block).unwrap_or_default()[places.clone()]",
        "places.clone()",
        "0..places.len()",
    ),
    "the state after a rejected draft is used (vLLM #53912)": (
        "sequence/truncate.rs",
        "self.pick_draft(id, tokens);",
        "self.pick_draft(id, tokens)",
        "()",
    ),
    "the state of another draft is used": (
        "sequence/append/drafts.rs",
        "checked_sub(1).and_then(|token| self.drafted(id.sequence).place(token))",
        "self.drafted(id.sequence).place(token)",
        "self.drafted(id.sequence).place(token).map(|place| place / 2)",
    ),
    "the state after a block's last token is sought among the others": (
        "sequence/append/drafts.rs",
        "(token + 1) % self.block_size != 0).then(",
        "(token + 1) % self.block_size != 0",
        "true",
    ),
    "forks share the states after drafts": (
        "sequence/fork.rs",
        "(self.entries(id).to_vec(), parent.null_prefix, parent.published)",
        "self.entries(id).to_vec()",
        "parent.table.to_vec()",
    ),
    "the states after drafts outlive a swap": (
        "sequence/relocate.rs",
        "self.drafts.set(sequence, 0);",
        "self.drafts.set(sequence, 0)",
        "()",
    ),
    "a shared state is overwritten": (
        "sequence/append/mod.rs",
        "if step.tiers.device().block(block).is_exclusive() {\n                write_in_place",
        "step.tiers.device().block(block).is_exclusive()",
        "self.is_recurrent(id) || step.tiers.device().block(block).is_exclusive()",
    ),
    "a drafter's block is found before another token": (
        "sequence/table/mod.rs",
        "self.keys[at].before(next)",
        "next",
        "0",
    ),
    "a drafter's block is published before its next token": (
        "group.rs",
        "tokens.saturating_sub(self.ahead) / block_size",
        "self.ahead",
        "0",
    ),
    "a drafter writes into a block that others have": (
        "group.rs",
        "{ len.saturating_sub(self.ahead) } else { len }",
        "len.saturating_sub(self.ahead)",
        "len",
    ),
    "a windowed drafter's window is a token short": (
        "group.rs",
        "Self::WindowedDrafter { window } => computed.saturating_sub(window),",
        "computed.saturating_sub(window)",
        "computed.saturating_add(1).saturating_sub(window)",
    ),
    "a windowed drafter writes into a block that others have": (
        "group.rs",
        "if of.is_drafter() || !of.leaves_nulls()",
        "of.is_drafter()",
        "false",
    ),
    "what lies behind lost companions is found": (
        "sequence/points.rs",
        "take_while(|&&block| points.companions(block).is_some())",
        "points.companions(block).is_some()",
        "true",
    ),
    "a point is made behind tokens that are not computed": (
        "sequence/points.rs",
        "keys.computed.min(self.groups.whole(row.len, self.block_size))",
        "keys.computed",
        "u32::MAX",
    ),
    "a copy goes to a block of another class": (
        "host_cache.rs",
        "self.take((Tier::Host, class), 1",
        "(Tier::Host, class)",
        "(Tier::Host, 0)",
    ),
    "a copy is read into a block of another class": (
        "host_cache.rs",
        "next[self.tiers.host().class_of(copy)].next()",
        "self.tiers.host().class_of(copy)",
        "0",
    ),
    "blocks to load count in the first class": (
        "host_cache.rs",
        "PerClass::of(self.tiers.host().class_of(copy), 1)",
        "self.tiers.host().class_of(copy)",
        "0",
    ),
    "no extents are taken for loads": (
        "sequence/prompt/mod.rs",
        "step.prepare(Tier::Device, new + loads, true);",
        "new + loads",
        "new",
    ),
    "blocks to load need no room": (
        "sequence/admission.rs",
        "Request::device(new + loads + found)",
        "new + loads + found",
        "new + found",
    ),
    "an extent goes to another class while a copy is on its way": (
        "pool/extents.rs",
        "matches!(set, Membership::Neither | Membership::Overlappable)",
        "matches!(set, Membership::Neither | Membership::Overlappable)",
        "set == Membership::Neither",
    ),
    "a host block that was passed stays cached": (
        "pool/cached.rs",
        "while let Some(block) = self.host_order().and_then(HostOrder::take_passed) {",
        "self.host_order().and_then(HostOrder::take_passed)",
        "None",
    ),
    "room on the host counts in the first class": (
        "host_cache.rs",
        "self.tiers.has_host_room(self.tiers.device().class_of(block), rank)",
        "self.tiers.device().class_of(block)",
        "0",
    ),
    "the host evicts whatever its class": (
        "prefix/evict/host.rs",
        "            if self.classes.of(block) == class {",
        "self.classes.of(block) == class",
        "true",
    ),
    "the copies of blocks of one key have one key": (
        "group.rs",
        "else { entry % per_key };",
        "entry % per_key",
        "0",
    ),
    "a drafter's entry before a new block is written unseen": (
        "sequence/append/mod.rs",
        "&& self.groups.ahead() == 0",
        "self.groups.ahead() == 0",
        "true",
    ),
    "a window is left in units of another group (vLLM #55600)": (
        "sequence/append/window.rs",
        "needs(computed, self.groups.tokens(id.group)).start",
        "self.groups.tokens(id.group)",
        "self.groups.tokens(0)",
    ),
    "a fork lacks the first block of its window": (
        "sequence/fork.rs",
        "if settled { group.needs(shared, size).start }",
        "group.needs(shared, size).start",
        "group.needs(shared + size, size).start",
    ),
    "a sequence is cut back to where its window is gone": (
        "sequence/truncate.rs",
        "!group.needs(tokens, self.groups.tokens(number)).any(|i| self.is_null(table[i]))",
        "group.needs(tokens, self.groups.tokens(number)).any(|i| self.is_null(table[i]))",
        "false",
    ),
    "points hang on a window's blocks instead of a drafter's": (
        "group.rs",
        "copied().or(drafter).unwrap_or(0)",
        "drafter",
        "None",
    ),
    "a sequence is cut back to where no state is kept": (
        "sequence/truncate.rs",
        "                return self.keeps_draft(id, tokens);\n",
        "self.keeps_draft(id, tokens)",
        "true",
    ),
    "a sequence is cut back to a state inside a block": (
        "sequence/append/drafts.rs",
        "drafted.contains(token) && (drafted.place",
        "drafted.contains(token)",
        "true",
    ),
    "states after drafts are those a token before": (
        "sequence/append/drafts.rs",
        "let (drafted, class) = (Drafted::new(len + count, drafts",
        "len + count",
        "len + count - 1",
    ),
    "a begun state that is passed over is kept": (
        "group.rs",
        "saturating_sub(usize::from(begun))",
        "usize::from(begun)",
        "0",
    ),
    "the anchor of windows alone is in its tail, too": (
        "group.rs",
        "needed.end.saturating_sub(usize::from(group == self.anchor))",
        "usize::from(group == self.anchor)",
        "0",
    ),
    "windows alone continue where nothing is kept": (
        "sequence/points.rs",
        "find(&keys[at - 1]).filter(|&block| points.has_point(block)).map",
        "points.has_point(block)",
        "true",
    ),
    "a tail on the host is of another position": (
        "sequence/points.rs",
        "self.tail_places(end).map(part).collect()",
        "(end)",
        "(end - 1)",
    ),
    "a point is made where its window is gone": (
        "sequence/points.rs",
        "let lacks = |&block: &BlockId| self.is_null(block)",
        "self.is_null(block)",
        "false",
    ),
    "the place of a moved anchor still leads to a point": (
        "prefix/points/mod.rs",
        "points.reasons[to_at] = std::mem::take(&mut points.reasons[from_at])",
        "std::mem::take(&mut points.reasons[from_at])",
        "points.reasons[from_at]",
    ),
    "a moved anchor forgets the one before it": (
        "prefix/points/mod.rs",
        "points.parents[to_at] = std::mem::take(&mut points.parents[from_at])",
        "std::mem::take(&mut points.parents[from_at])",
        "0",
    ),
    "after a loss anchors are not counted again": (
        "prefix/points/sweep.rs",
        "        self.recount();",
        "self.recount()",
        "()",
    ),
}


def plant(folder: Path) -> None:
    """Copy the sources, with all faults."""
    for name in ("Cargo.toml", "Cargo.lock"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "rust", folder / "rust", ignore=shutil.ignore_patterns("*.proptest-regressions", "fuzz"))
    source = folder / "rust" / "core" / "src"
    for number, (name, text, right, wrong) in enumerate(FAULTS.values()):
        before = (source / name).read_text()
        assert (before.count(text), text.count(right)) == (1, 1), (name, text)
        planted = text.replace(right, f"(if crate::planted({number}) {{ {wrong} }} else {{ {right} }})")
        (source / name).write_text(before.replace(text, planted))
    library = source / "lib.rs"
    library.write_text(
        library.read_text()
        + "pub(crate) fn planted(number: usize) -> bool {\n"
        + "    static PLANTED: std::sync::OnceLock<usize> = std::sync::OnceLock::new();\n"
        + '    let read = || std::env::var("PLANTED").ok().and_then(|n| n.parse().ok()).unwrap_or(usize::MAX);\n'
        + "    *PLANTED.get_or_init(read) == number\n}\n"
    )


def build(folder: Path, *command: str) -> list[str]:
    """Run Cargo over the copy. Returns the paths of what it built."""
    target = {"CARGO_TARGET_DIR": str(ROOT / "target" / "planted"), "RUSTFLAGS": "-Awarnings"}
    run = subprocess.run(
        ["cargo", *command, "--offline", "--message-format=json"],
        cwd=folder,
        env=os.environ | target | {"PYO3_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    built = [json.loads(line) for line in run.stdout.splitlines()]
    return [name for item in built for name in (item.get("filenames") or ())]


def build_core_machine(folder: Path) -> Path:
    """Build the core's random programs over the copy."""
    built = build(folder, "test", "-p", "blockyard-core", "--test", "manager", "--no-run")
    return Path(shutil.copy(next(name for name in built if "/deps/manager-" in name), folder))


def build_cache_machine(folder: Path) -> Path:
    """Build the extension over the copy. Returns where Python finds the package with it."""
    quick = ("--config", "profile.dev.package.blockyard-binding.opt-level=0")
    built = build(folder, "build", "-p", "blockyard-binding", *quick)
    sources = folder / "python"
    shutil.copytree(ROOT / "python", sources, ignore=shutil.ignore_patterns("__pycache__", "_core*.so"))
    shutil.copy(next(name for name in built if name.endswith("lib_core.so")), sources / "blockyard" / "_core.abi3.so")
    return sources


def search_core(machine: Path, number: int, seed: int, cases: int = 1 << 24, **limits: float) -> float | None:
    """Let the core's random programs search for a fault."""
    settings = {"PROPTEST_CASES": str(cases), "PROPTEST_RNG_SEED": str(seed), "PROPTEST_MAX_SHRINK_ITERS": "0"}
    # Else it would note programs that fail beside the sources, and begin with those that found other faults.
    settings["PROPTEST_DISABLE_FAILURE_PERSISTENCE"] = "true"
    return search([str(machine), "every_token"], machine.parent, number, settings, **limits)


def search_caches(sources: Path, number: int, seed: int, **limits: float) -> float | None:
    """Let random programs over whole caches search for a fault."""
    code = f"import planted_points\nplanted_points.run_programs({seed})"
    path = {"PYTHONPATH": os.pathsep.join([str(sources), str(Path(__file__).parent)])}
    return search([sys.executable, "-c", code], sources, number, path, **limits)


def run_programs(seed: int) -> None:
    """Run programs over whole caches of models with several groups until one fails."""
    from random_cache_programs import config_with_groups, failure, random_program

    print("running", flush=True)
    for at in range(seed << 20, (seed + 1) << 20):
        config = config_with_groups(at, stored=at % 2 == 1)
        if error := failure(random_program(at, 300, config)):
            print(f"FAILED: {error}", flush=True)
            return


def search(
    command: list[str], folder: Path, number: int, settings: dict[str, str], seconds: float | None = None
) -> float | None:
    """Run a machine until it fails, at most for some seconds. Returns after how many that was: all are CPU seconds."""
    environment = os.environ | settings | {"PLANTED": str(number)}
    with subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as run:
        assert run.stdout is not None
        lines = iter(run.stdout.readline, "")
        assert any("running" in line for line in lines), command
        start = cpu_seconds(run.pid)
        if seconds is not None:
            resource.prlimit(run.pid, resource.RLIMIT_CPU, (round(start + seconds), resource.RLIM_INFINITY))
        found = next((cpu_seconds(run.pid) - start for line in lines if "FAILED" in line), None)
        run.kill()
        return found


def cpu_seconds(process: int) -> float:
    """Return the CPU time of a process."""
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def describe(found: list[float | None]) -> str:
    """Return how often a fault was found, and the seconds."""
    times = [seconds for seconds in found if seconds is not None]
    if not times:
        return f"0 of {len(found)} | |"
    return f"{len(times)} of {len(found)} | {statistics.median(times):.1f} | {max(times):.1f}"


def main(seeds: int = 5, word: str = "") -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor() as pool:
        folder = Path(name)
        plant(folder)
        machines = ((search_core, build_core_machine(folder)), (search_caches, build_cache_machine(folder)))
        print("| fault | core's programs | median, s | longest, s | caches' programs | median, s | longest, s |")
        print("|---|---|---|---|---|---|---|")
        chosen = [("none", -1), *((fault, number) for number, fault in enumerate(FAULTS) if word in fault)]
        for fault, number in chosen:
            found = [
                list(pool.map(partial(search, seconds=SECONDS), repeat(machine), repeat(number), range(seeds)))
                for search, machine in machines
            ]
            print(f"| {fault} | {describe(found[0])} | {describe(found[1])} |", flush=True)


if __name__ == "__main__":
    main(*(int(word) if word.isdigit() else word for word in sys.argv[1:3]))
