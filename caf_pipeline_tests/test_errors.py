"""Messages of errors, and what is behind them."""

import pytest

from caf_pipeline.errors import SettingsError, interrupt_behind, with_hint


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            SettingsError("'home' is a file", hint="name a folder"),
            "'home' is a file; name a folder",
        ),
        (
            SettingsError("'home' is a file.", hint="Name a folder."),
            "'home' is a file; Name a folder",
        ),
        (SettingsError("'home' is a file"), "'home' is a file"),
        (TimeoutError("no answer"), "no answer"),
    ],
)
def test_error_and_hint_are_joined(error, sentence):
    assert with_hint(error) == sentence


def test_an_error_behind_itself_has_no_interrupt_behind_it():
    first, second = ValueError(), ValueError()
    first.__cause__, second.__context__ = second, first
    assert interrupt_behind(first) is None
