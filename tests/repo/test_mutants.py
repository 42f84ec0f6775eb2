"""Which mutants `make mutants` chooses, and what it remembers of them."""

from collections import Counter
from pathlib import Path

import pytest

from mutants import run


def mutants(sizes: dict[str, int]) -> list[run.Mutant]:
    titles = [(file, f"{file}: replace + with - in f{n}: a") for file, size in sizes.items() for n in range(size)]
    return [
        run.Mutant(f"{file}:{n}:1: replace + with - in f{n}", file, title) for n, (file, title) in enumerate(titles)
    ]


def test_each_file_has_its_share_of_a_sample():
    chosen = run.sample(mutants({"a.rs": 600, "b.rs": 300, "c.rs": 100}), 100, seed=1)
    shares = Counter(mutant.file for mutant in chosen)
    assert all(abs(shares[file] - wanted) <= 1 for file, wanted in (("a.rs", 60), ("b.rs", 30), ("c.rs", 10)))


def test_a_larger_sample_holds_the_smaller_one_and_another_seed_chooses_others():
    found = mutants({"a.rs": 600, "b.rs": 300})
    assert run.sample(found, 200, seed=1)[:40] == run.sample(found, 40, seed=1)
    assert run.sample(found, 40, seed=1) != run.sample(found, 40, seed=2)


def test_an_explanation_of_no_mutant_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = mutants({"a.rs": 2})
    monkeypatch.setattr(run, "EXPLAINED", tmp_path / "explained.txt")
    run.EXPLAINED.write_text(f"A reason.\n    {found[1].title}\n")
    assert run.explained(found) == {found[1].title}
    with pytest.raises(SystemExit, match="no such mutant"):
        run.explained(found[:1])


def test_an_outcome_is_kept_until_its_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run, "COPY", tmp_path)
    monkeypatch.setattr(run, "KEPT", tmp_path / "outcomes.json")
    (tmp_path / "a.rs").write_text("a + b")
    (tmp_path / "b.rs").write_text("a + b")
    titles = [mutant.title for mutant in mutants({"a.rs": 1, "b.rs": 1})]
    run.keep({titles[0]: "CaughtMutant"})
    run.keep({titles[1]: "CaughtMutant"})
    (tmp_path / "a.rs").write_text("a + b + c")
    assert run.kept() == {titles[1]: "CaughtMutant"}
