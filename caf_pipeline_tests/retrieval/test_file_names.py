"""Every key has a valid path below the folder, which maps back to the key."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caf_pipeline.retrieval.file_names import key_of, path_of

pieces = st.sampled_from(
    ["a", "/", ".", "..", ".caf", ".caf~", ".caf+", "é", "🗄", "x" * 199, "%"]
) | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=5)


@given(
    key=st.lists(pieces, min_size=1, max_size=8).map("".join),
    escaped=st.dictionaries(st.integers(0, 8), st.integers(0, 4)),
)
def test_every_path_maps_back_to_its_key(key, escaped):
    names = path_of(key, escaped)
    assert key_of(names) == key
    assert all(
        name not in ("", ".", "..") and "/" not in name and len(name.encode()) <= 255
        for name in names
    )


@pytest.mark.parametrize("key", ["a", "a/b.txt", "2024/.hidden/ü", "a b/%2F~"])
def test_ordinary_key_is_used_as_path(key):
    assert "/".join(path_of(key)) == key
