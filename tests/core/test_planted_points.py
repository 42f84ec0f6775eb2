"""Faults planted in what groups need and in resume points: the core's byte model finds each in seconds."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = 20_000
"""Random programs that may be run to find a fault; on an idle machine each was found within ten seconds."""

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


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    plant(folder)
    command = ["cargo", "test", "--offline", "-p", "blockyard-core", "--test", "manager", "--no-run"]
    target = {"CARGO_TARGET_DIR": str(ROOT / "target" / "planted"), "RUSTFLAGS": "-Awarnings"}
    run = subprocess.run(
        [*command, "--message-format=json"],
        cwd=folder,
        env=os.environ | target,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    built = [json.loads(line) for line in run.stdout.splitlines()]
    return Path(shutil.copy(next(item["executable"] for item in built if item.get("executable")), folder))


def find(machine: Path, number: int, cases: int = CASES) -> bool:
    """Return whether random programs find a fault; -1 is none."""
    settings = {"PLANTED": str(number), "PROPTEST_CASES": str(cases)}
    settings |= {"PROPTEST_MAX_SHRINK_ITERS": "0"}
    command = [str(machine), "every_token"]
    # It notes a program that fails beside the sources that it finds from its folder.
    run = subprocess.run(command, cwd=machine.parent, env=os.environ | settings, capture_output=True, check=False)
    return run.returncode != 0


def test_a_fault_changes_one_place(tmp_path: Path):
    plant(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(FAULTS)), ids=list(FAULTS))
def test_a_planted_fault_is_found(machine: Path, number: int):
    assert find(machine, number)


@pytest.mark.slow
def test_without_a_fault_nothing_is_found(machine: Path):
    assert not find(machine, -1, 3000)
