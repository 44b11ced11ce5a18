"""age v1 against its vectors, the age tool, pyrage, and by properties."""

import hashlib
import os
import subprocess
import zlib
from pathlib import Path

import pyrage
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from caf_pipeline.errors import (
    DamagedHeader,
    DamagedPayload,
    ForgedHeader,
    KeyRefused,
    NoMatchingIdentity,
)
from caf_pipeline.formats import age
from caf_pipeline.formats.age import SEGMENT_BYTES, Passphrase, Payload

VECTORS = sorted((Path(__file__).parents[1] / "vectors" / "age").iterdir())
ERRORS = {
    "header failure": DamagedHeader,
    "armor failure": DamagedHeader,
    "HMAC failure": ForgedHeader,
    "no match": NoMatchingIdentity,
    "payload failure": DamagedPayload,
}


def read_vector(path):
    head, _, data = path.read_bytes().partition(b"\n\n")
    fields = [line.partition(": ")[::2] for line in head.decode().split("\n")]
    facts = dict(fields)
    if facts.get("compressed") == "zlib":
        data = zlib.decompress(data)
    identities = [age.parse_identity(text) for name, text in fields if name == "identity"]
    identities += [Passphrase(text) for name, text in fields if name == "passphrase"]
    return facts, identities, data


def decrypt(data, identities):
    payload, start = age.open_file(data, identities)
    age.plain_size(len(data) - start)
    return bytes(payload.open(0, data[start:], is_end=True))


def encrypt(plaintext, recipients, *, file_key=bytes(16), nonce=bytes(16)):
    header = age.make_header(recipients, file_key)
    return header + nonce + Payload(file_key, nonce).seal(0, plaintext, is_end=True)


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.name)
def test_vectors_open_or_fail_as_the_test_suite_says(path):
    facts, identities, data = read_vector(path)
    expected = facts["expect"]
    if facts.get("armored") == "yes":
        with pytest.raises(DamagedHeader):
            decrypt(data, identities)
    elif expected == "success":
        assert hashlib.sha256(decrypt(data, identities)).hexdigest() == facts["payload"]
    else:
        with pytest.raises(ERRORS[expected]) as raised:
            decrypt(data, identities)
        assert type(raised.value) is ERRORS[expected]


def test_all_vectors_are_there():
    assert len(VECTORS) == 143


CLASSIC, HYBRID = age.X25519Identity(bytes(31) + b"\1"), age.HybridIdentity(bytes(31) + b"\1")
BOTH_KINDS = pytest.mark.parametrize("identity", [CLASSIC, HYBRID], ids=["X25519", "hybrid"])
sizes = st.integers(0, 3 * SEGMENT_BYTES)


@BOTH_KINDS
@given(size=sizes, ends=st.tuples(sizes, sizes))
@example(size=0, ends=(0, 0))
@example(size=SEGMENT_BYTES, ends=(SEGMENT_BYTES - 1, SEGMENT_BYTES))
@example(size=SEGMENT_BYTES + 1, ends=(SEGMENT_BYTES, SEGMENT_BYTES + 1))
@example(size=2 * SEGMENT_BYTES, ends=(SEGMENT_BYTES - 1, SEGMENT_BYTES + 1))
@settings(deadline=None, max_examples=50)
def test_every_range_of_a_file_opens_alone(identity, size, ends):
    start, end = sorted(min(bound, size) for bound in ends)
    plaintext = bytes(number * 7 & 255 for number in range(size))
    sealed_file = encrypt(plaintext, [identity.recipient])
    payload, offset = age.open_file(sealed_file, [identity])
    assert age.plain_size(len(sealed_file) - offset) == size
    first, last = age.sealed_range(start, end, size)
    part = sealed_file[offset + first : offset + last]
    assert payload.open_range(start, end, size, part) == plaintext[start:end]


@given(size=st.integers(0, 1 << 36))
def test_sizes_of_payloads_and_plaintexts_are_inverse(size):
    assert age.plain_size(age.sealed_size(size)) == size


@given(cut=st.integers(1, 2 * SEGMENT_BYTES), size=st.integers(1, 2 * SEGMENT_BYTES))
@settings(deadline=None, max_examples=50)
def test_truncated_payloads_are_refused(cut, size):
    sealed_file = encrypt(bytes(size), [CLASSIC.recipient])
    payload, start = age.open_file(sealed_file, [CLASSIC])
    kept = sealed_file[start : max(start, len(sealed_file) - cut)]
    with pytest.raises(DamagedPayload):
        payload.open(0, kept, is_end=True)


@given(bit=st.integers(0, 8 * (SEGMENT_BYTES + 100) - 1))
@settings(deadline=None, max_examples=50)
def test_flipped_bits_are_refused_and_no_plaintext_escapes(bit):
    sealed_file = bytearray(encrypt(bytes(SEGMENT_BYTES + 68), [CLASSIC.recipient]))
    payload, start = age.open_file(bytes(sealed_file), [CLASSIC])
    sealed_file[start + bit // 8] ^= 1 << bit % 8
    with pytest.raises(DamagedPayload):
        payload.open(0, sealed_file[start:], is_end=True)


def test_segments_at_another_place_are_refused():
    payload = Payload(bytes(16), bytes(16))
    sealed = payload.seal(0, bytes(2 * SEGMENT_BYTES), is_end=False)
    half = len(sealed) // 2
    for swapped in (sealed[half:] + sealed[:half], sealed[:half] * 2):
        with pytest.raises(DamagedPayload):
            payload.open(0, swapped, is_end=False)
    with pytest.raises(DamagedPayload):
        payload.open(1, sealed[:half], is_end=False)
    with pytest.raises(DamagedPayload):
        payload.open(0, sealed[:half], is_end=True)


def test_a_payload_of_another_file_is_refused():
    other = Payload(bytes(15) + b"\1", bytes(16)).seal(0, b"x", is_end=True)
    with pytest.raises(DamagedPayload):
        Payload(bytes(16), bytes(16)).open(0, other, is_end=True)


@BOTH_KINDS
def test_keys_survive_their_text(identity):
    assert age.parse_identity(identity.reveal()) == identity
    assert str(age.parse_recipient(str(identity.recipient))) == str(identity.recipient)
    assert identity.reveal() not in repr(identity) + str(identity.recipient)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "age1",
        "age1é",
        CLASSIC.reveal(),
        str(CLASSIC.recipient).upper(),
        str(CLASSIC.recipient).title(),
        str(CLASSIC.recipient)[:-1],
        f"{HYBRID.recipient}q",
    ],
)
def test_invalid_recipients_are_refused(text):
    with pytest.raises(KeyRefused) as raised:
        age.parse_recipient(text)
    assert len(text) < 6 or text not in f"{raised.value} {raised.value.hint}"


@pytest.mark.parametrize("text", ["", str(CLASSIC.recipient), CLASSIC.reveal().lower()])
def test_invalid_identities_are_refused(text):
    with pytest.raises(KeyRefused):
        age.parse_identity(text)


@pytest.mark.parametrize(
    "recipients",
    [[], [CLASSIC.recipient, HYBRID.recipient], [Passphrase("x"), CLASSIC.recipient]],
    ids=["none", "hybrid and classic", "passphrase and key"],
)
def test_recipients_that_exclude_each_other_are_refused(recipients):
    with pytest.raises(KeyRefused):
        age.make_header(recipients, bytes(16))


def test_a_header_that_readers_refuse_is_not_written():
    with pytest.raises(KeyRefused):
        age.make_header([HYBRID.recipient] * 680, bytes(16))


def test_any_of_several_identities_opens_a_file():
    others = [age.new_identity(), age.new_identity()]
    sealed_file = encrypt(b"x", [HYBRID.recipient, *(other.recipient for other in others)])
    for identity in (HYBRID, *others):
        assert decrypt(sealed_file, [age.new_identity(hybrid=False), identity]) == b"x"
    with pytest.raises(NoMatchingIdentity):
        decrypt(sealed_file, [age.new_identity(), age.new_identity(hybrid=False)])


@pytest.mark.parametrize("hybrid", [True, False])
def test_a_prefix_is_complete_once_it_has_the_header(hybrid):
    header = age.make_header([age.new_identity(hybrid=hybrid).recipient], bytes(16))
    assert not any(age.is_complete(header[:cut]) for cut in range(0, len(header), 7))
    assert age.is_complete(header)
    assert age.parse_header(header + b"payload").raw == header


SIZES = [0, 1, SEGMENT_BYTES - 1, SEGMENT_BYTES, SEGMENT_BYTES + 1, 10 * SEGMENT_BYTES]


def run(*command, **options):
    return subprocess.run(command, capture_output=True, check=True, timeout=300, **options).stdout


@pytest.mark.thorough
@BOTH_KINDS
@pytest.mark.parametrize("size", SIZES)
def test_files_are_exchanged_with_the_age_tool(age_tool, tmp_path, identity, size):
    plaintext = os.urandom(size)
    key = tmp_path / "key"
    key.write_text(identity.reveal())
    recipients = [age.new_identity(hybrid=identity is HYBRID).recipient, identity.recipient]
    ours = encrypt(plaintext, recipients, file_key=os.urandom(16), nonce=os.urandom(16))
    assert run(age_tool, "-d", "-i", key, input=ours) == plaintext
    options = [word for recipient in recipients for word in ("-r", str(recipient))]
    assert decrypt(run(age_tool, *options, input=plaintext), [identity]) == plaintext


@pytest.mark.parametrize("size", SIZES)
def test_files_are_exchanged_with_pyrage(size):
    plaintext = os.urandom(size)
    theirs = pyrage.x25519.Identity.from_str(CLASSIC.reveal())
    assert str(theirs.to_public()) == str(CLASSIC.recipient)
    ours = encrypt(plaintext, [CLASSIC.recipient], file_key=os.urandom(16), nonce=os.urandom(16))
    assert pyrage.decrypt(ours, [theirs]) == plaintext
    assert decrypt(pyrage.encrypt(plaintext, [theirs.to_public()]), [CLASSIC]) == plaintext


@pytest.mark.thorough  # pyrage hashes with 1 GiB
def test_passphrases_open_files_of_pyrage_and_the_other_way_round():
    passphrase = Passphrase("correct horse", log_n=12)
    assert pyrage.passphrase.decrypt(encrypt(b"x", [passphrase]), "correct horse") == b"x"
    assert decrypt(pyrage.passphrase.encrypt(b"x", "correct horse"), [passphrase]) == b"x"
    with pytest.raises(NoMatchingIdentity):
        decrypt(encrypt(b"x", [passphrase]), [Passphrase("wrong")])


@pytest.mark.skipif(not Path("/usr/bin/age").exists(), reason="Debian's age is not installed")
@pytest.mark.parametrize("size", SIZES)
def test_files_are_exchanged_with_debians_age(tmp_path, size):
    plaintext = os.urandom(size)
    key = tmp_path / "key"
    key.write_text(CLASSIC.reveal())
    encrypted = encrypt(
        plaintext, [CLASSIC.recipient], file_key=os.urandom(16), nonce=os.urandom(16)
    )
    assert run("/usr/bin/age", "-d", "-i", key, input=encrypted) == plaintext
    theirs = run("/usr/bin/age", "-r", str(CLASSIC.recipient), input=plaintext)
    assert decrypt(theirs, [CLASSIC]) == plaintext
