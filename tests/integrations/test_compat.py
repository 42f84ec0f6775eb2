"""What is said where an engine's interfaces are not those we were written for."""

import importlib
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import engine_drivers
import pytest
import vllm_modules

from blockyard.integrations.compat import (
    engine_log,
    log_through,
    require_bases,
    require_fields,
    require_fit,
    warn_version,
)


class Theirs(ABC):
    @abstractmethod
    def get(self, key: str, place: int = 0) -> None: ...

    def clear(self) -> bool:
        return False


class Ours(Theirs):
    def get(self, key: str, place: int = 0, *, more: bool = False) -> None: ...


class Older(Theirs):
    def get(self, key: str) -> None: ...  # type: ignore[override]


class Reordered(Theirs):
    def get(self, place: int, key: str) -> None: ...  # type: ignore[override]


class Demanding(Theirs):
    def get(self, key: str, place: int, more: bool) -> None: ...  # type: ignore[override]


class Unfinished(Theirs):
    pass


def test_a_class_that_takes_what_is_passed_fits():
    require_fit(Ours, Theirs, "Engine 9")


@pytest.mark.parametrize(
    ("ours", "problem"),
    [
        (Older, ": Theirs.get passes place, which Blockyard's does not take"),
        (Reordered, ": Theirs.get passes key as argument 1, Blockyard takes it as 2"),
        (Demanding, ": Theirs.get does not pass more, which Blockyard's needs"),
        (Unfinished, " wants Unfinished to have get"),
    ],
)
def test_other_arguments_and_missing_methods_are_import_errors(ours: type, problem: str):
    with pytest.raises(ImportError, match=f"^Engine 9{problem}$"):
        require_fit(ours, Theirs, "Engine 9")


def test_a_constructor_is_compared_where_the_engine_calls_it():
    class Base:
        def __init__(self, size: int) -> None: ...

    class Other(Base):
        def __init__(self) -> None: ...

    require_fit(Other, Base, "Engine 9")
    with pytest.raises(ImportError, match=r"__init__ passes size"):
        require_fit(Other, Base, "Engine 9", constructor=True)


def test_a_class_is_compared_with_those_of_its_bases_that_are_the_engines(monkeypatch: pytest.MonkeyPatch):
    require_bases(Older, "engine", "Engine 9")
    monkeypatch.setattr(Theirs, "__module__", "engine.cache")
    with pytest.raises(ImportError, match=r"^Engine 9: Theirs\.get passes place"):
        require_bases(Older, "engine", "Engine 9")


def test_a_record_without_a_field_is_an_import_error():
    @dataclass
    class Result:
        key: str

    require_fields(Result, "Engine 9", "key")
    with pytest.raises(ImportError, match=r"^Engine 9: Result has no bytes, seconds$"):
        require_fields(Result, "Engine 9", "key", "seconds", "bytes")


@pytest.mark.parametrize(("version", "warns"), [("5.23", False), ("5.23.1", False), ("5.230", True), ("6", True)])
def test_a_version_that_was_not_tested_is_a_warning(caplog: pytest.LogCaptureFixture, version: str, warns: bool):
    with caplog.at_level(logging.WARNING):
        warn_version("Engine", version, "5.23")
    assert bool(caplog.messages) == warns
    assert not warns or caplog.messages == [f"Engine is {version}, Blockyard was tested with 5.23"]
    caplog.clear()
    warn_version("Engine", version, "4", "5.23")
    assert bool(caplog.messages) == warns


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.names.append(record.name)


@contextmanager
def lines_of(log: logging.Logger) -> Iterator[list[str]]:
    """Collect the names of the loggers whose lines arrive at one; none goes further."""
    ours, handler, passes = logging.getLogger("blockyard"), Lines(), log.propagate
    before = (ours.handlers[:], ours.propagate)
    log.addHandler(handler)
    log.propagate = False
    try:
        yield handler.names
    finally:
        log.removeHandler(handler)
        log.propagate = passes
        ours.handlers[:], ours.propagate = before


def test_every_line_arrives_once_where_the_engine_writes_its_own(caplog: pytest.LogCaptureFixture):
    with lines_of(engine_log("Engine")) as of_engine, lines_of(engine_log("Other")) as of_other:
        log_through("Engine")
        log_through("Other")
        logging.getLogger("blockyard.stores").warning("a store fails")
        engine_log("Other").propagate = True  # as of an engine that sets up the root
        logging.getLogger("blockyard.prefix_store").warning("a block is lost")
        assert (of_engine, of_other) == ([], ["blockyard.stores", "blockyard.prefix_store"])
        assert caplog.messages == ["a block is lost"]


@pytest.mark.parametrize(
    ("engine", "module", "modules"),
    [
        ("vLLM", "vllm", lambda: vllm_modules.loaded("stand-in 0.33")),
        ("SGLang", "sglang", engine_drivers.sglang),
        ("LMCache", "lmcache", engine_drivers.lmcache),
    ],
)
def test_lines_of_stores_go_to_the_engine_of_each_adapter(engine: str, module: str, modules):  # type: ignore[no-untyped-def]
    with lines_of(engine_log(engine)) as lines, modules():
        adapter = importlib.import_module(f"blockyard.integrations.{module}")
        compat = sys.modules.pop("blockyard.integrations.compat")
        importlib.reload(adapter)  # another test may have imported it, and our module is loaded anew
        sys.modules["blockyard.integrations.compat"] = compat
        logging.getLogger("blockyard.stores").warning("a store fails")
        assert lines == ["blockyard.stores"]
