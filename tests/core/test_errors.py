"""The exception classes: one base, usable across processes, and known to the Rust core by the same names."""

import inspect
import pickle

import pytest

from blockyard import errors

CLASSES = [item for _, item in inspect.getmembers(errors, inspect.isclass) if item.__module__ == "blockyard.errors"]


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_every_error_has_the_one_base(error: type[Exception]):
    assert issubclass(error, errors.BlockyardError)


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_every_error_survives_pickling(error: type[Exception]):
    raised = error("asked for 9 blocks, 3 of 128 are free")
    copy = pickle.loads(pickle.dumps(raised))
    assert type(copy) is error
    assert copy.args == raised.args
    assert vars(copy) == vars(raised)


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_every_error_can_be_made_without_its_constructor_as_dask_does(error: type[Exception]):
    assert error.__new__(error, "asked for 9 blocks").args == ("asked for 9 blocks",)


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_the_message_is_shown_as_it_was_written(error: type[Exception]):
    assert str(error("asked for 9 blocks")) == "asked for 9 blocks"


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_every_error_says_what_it_means(error: type[Exception]):
    assert error.__doc__
