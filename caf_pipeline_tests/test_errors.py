"""What errors say to people."""

import pytest

from caf_pipeline.errors import SettingsError, with_hint


@pytest.mark.parametrize(
    ("error", "said"),
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
def test_an_error_and_its_hint_are_one_sentence_and_nothing_is_left_where_there_is_no_hint(
    error, said
):
    assert with_hint(error) == said
