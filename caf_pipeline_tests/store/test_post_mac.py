"""The MAC of a post vouches for one file in one archive, by one key."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caf_pipeline.records import PostedFile, PostRecord
from caf_pipeline.store.jackal.names import archive_note, archive_of, header_of, mac_of
from caf_pipeline.store.protocol import has_right_mac, post_mac

KEY, ARCHIVE = bytes(range(32)), "a" * 32
FACTS = {
    "archive_id": ARCHIVE,
    "merkle_root": b"r" * 32,
    "stored_size_bytes": 1_000,
    "proof_type": 3,
    "header_sha256": b"h" * 32,
}
RIGHT = PostedFile(PostRecord(b"r" * 32, "jkl1", 7, 1_000), 3, b"h" * 32, post_mac(KEY, **FACTS))


def with_post(**changes):
    return dataclasses.replace(RIGHT, posting=dataclasses.replace(RIGHT.posting, **changes))


def test_right_mac_vouches_for_its_file():
    assert has_right_mac(KEY, ARCHIVE, RIGHT)
    assert RIGHT.mac.hex() == "4d75140e4cca6adbd1595af90857f4f1971cbb6f1a593fdd5d3d60254d19a6ff"


@pytest.mark.parametrize(
    "file",
    [
        with_post(merkle_root=b"s" * 32),
        with_post(merkle_root=b"r" * 32 + b"h" * 32),
        with_post(stored_size_bytes=1_001),
        dataclasses.replace(RIGHT, proof_type=0),
        dataclasses.replace(RIGHT, header_sha256=b"i" * 32),
        dataclasses.replace(RIGHT, header_sha256=None),
        dataclasses.replace(RIGHT, mac=None),
        dataclasses.replace(RIGHT, mac=b""),
        dataclasses.replace(RIGHT, mac=RIGHT.mac[:16]),
    ],
)
def test_copied_mac_vouches_for_no_other_file(file):
    assert not has_right_mac(KEY, ARCHIVE, file)


def test_copied_mac_vouches_in_no_other_archive_or_ledger():
    assert not has_right_mac(KEY, "b" * 32, RIGHT)
    assert not has_right_mac(bytes(32), ARCHIVE, RIGHT)
    assert not has_right_mac(None, ARCHIVE, RIGHT)


def test_fields_of_other_lengths_make_another_mac():
    plain = FACTS | {"header_sha256": None, "merkle_root": b"r" * 32 + b"h" * 32}
    assert post_mac(KEY, **plain) != RIGHT.mac


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_note_returns_header_hash_and_mac(header_sha256, mac):
    note = archive_note(ARCHIVE, header_sha256, mac)
    assert (archive_of(note), header_of(note), mac_of(note)) == (ARCHIVE, header_sha256, mac)


@pytest.mark.parametrize("value", ["null", "1", '""', '"ab"', '["x"]', f'"{"A" * 64}"'])
def test_mac_of_another_form_is_none(value):
    assert mac_of(f'{{"caf_pipeline":"{ARCHIVE}","mac":{value}}}') is None
