"""Messages of errors."""

import pytest

from caf_pipeline.errors import SettingsError, with_hint


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
