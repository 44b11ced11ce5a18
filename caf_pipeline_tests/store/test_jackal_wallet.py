"""The wallet: known vectors, low signatures, and secret words."""

import hashlib
import itertools

import pytest
from coincurve import PublicKey
from hypothesis import given
from hypothesis import strategies as st

from caf_pipeline.errors import MnemonicRefused
from caf_pipeline.store.jackal.wallet import (
    MNEMONIC_VARIABLE,
    Wallet,
    address_of,
    mnemonic_sources,
    read_mnemonic,
)

WORDS = "abandon " * 11 + "about"
PRIVATE_KEY = "c4a48e2fce1481cd3294b4490f6678090ea98d3d0e5cd984558ab0968741b104"
ADDRESS = "jkl19rl4cm2hmr8afy4kldpxz3fka4jguq0a97rvx2"
ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141  # of secp256k1, SEC 2


@pytest.fixture(autouse=True)
def _no_mnemonic_of_the_machine(monkeypatch):
    monkeypatch.delenv(MNEMONIC_VARIABLE, raising=False)


@pytest.fixture
def file(tmp_path):
    """A file of mode 600 with the words."""
    file = tmp_path / "words"
    file.write_text(WORDS + "\n")
    file.chmod(0o600)
    return file


def test_the_key_and_the_address_are_those_of_other_wallets():
    wallet = Wallet(WORDS)
    assert wallet._key.to_hex() == PRIVATE_KEY  # the same as from mospy-wallet 0.6.0
    assert (
        wallet.public_key.hex()
        == "024f4e2ad99c34d60b9ba6283c9431a8418af8673212961f97a77b6377fcd05b62"
    )
    assert wallet.address == address_of(wallet.public_key) == ADDRESS


def test_spaces_and_lines_between_the_words_do_not_matter():
    assert Wallet("\n " + WORDS.replace(" ", "  \n") + "\n").address == ADDRESS


@given(st.binary(max_size=300))
def test_a_signature_is_valid_and_its_s_is_low(message):
    wallet = Wallet(WORDS)
    signature = wallet.sign(message)
    r, s = signature[:32], signature[32:]
    assert len(signature) == 64
    assert 0 < int.from_bytes(s, "big") <= ORDER // 2
    assert PublicKey(wallet.public_key).verify(_der(r, s), message)
    assert wallet.sign(message) == signature


def _der(r: bytes, s: bytes) -> bytes:
    numbers = [number.lstrip(b"\0") for number in (r, s)]
    numbers = [b"\0" + number if number[0] & 0x80 else number for number in numbers]
    inner = b"".join(b"\x02" + bytes([len(number)]) + number for number in numbers)
    return b"\x30" + bytes([len(inner)]) + inner


def test_the_wallet_shows_its_address_only():
    shown = f"{Wallet(WORDS)!r} {Wallet(WORDS)}"
    assert ADDRESS in shown
    assert "abandon" not in shown
    assert PRIVATE_KEY not in shown


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("zebra", "it has 1 word"),
        ("zebra " * 13, "it has 13 words"),
        ("", "it has 0 words"),
        ("zebra " * 10 + "zebrra zebra", "word 11 is"),
        ("zebra " * 10 + "x y", "word 11, 12 is"),
        ("zebra " * 11 + "about", "checksum"),
    ],
)
def test_invalid_mnemonic_is_refused_without_showing_a_word(words, fault):
    with pytest.raises(MnemonicRefused) as refused:
        Wallet(words)
    assert fault in str(refused.value)
    shown = f"{refused.value} {refused.value.hint} {refused.value!r}".split()
    assert not set(words.split()) & set(shown)


def test_mnemonic_setting_precedes_environment_and_file(monkeypatch, file):
    assert read_mnemonic(None, file).split() == WORDS.split()
    monkeypatch.setenv(MNEMONIC_VARIABLE, "environment")
    assert read_mnemonic(None, file) == "environment"
    assert read_mnemonic("given", file) == "given"


def test_missing_mnemonic_hint_names_the_variable():
    with pytest.raises(MnemonicRefused) as refused:
        read_mnemonic(None, None)
    assert MNEMONIC_VARIABLE in refused.value.hint


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o666])
def test_a_file_that_others_may_touch_is_refused(file, mode):
    file.chmod(mode)
    with pytest.raises(MnemonicRefused) as refused:
        read_mnemonic(None, file)
    assert f"chmod 600 {file}" in refused.value.hint


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_of_the_owner_alone_is_read(file, mode):
    file.chmod(mode)
    assert Wallet(read_mnemonic(None, file)).address == ADDRESS


def test_a_file_that_is_missing_or_no_text_is_refused(tmp_path, file):
    with pytest.raises(MnemonicRefused, match="No such file"):
        read_mnemonic(None, tmp_path / "none")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(MnemonicRefused, match="not text"):
        read_mnemonic(None, file)


def test_two_wallets_never_share_a_signature():
    signatures = [
        Wallet(words).sign(hashlib.sha256(b"x").digest())
        for words in (WORDS, "zoo " * 11 + "wrong")
    ]
    assert all(a != b for a, b in itertools.combinations(signatures, 2))


def test_a_wallet_is_read_only_when_its_key_is_needed():
    calls = []

    def words():
        calls.append(1)
        return "abandon " * 11 + "about"

    wallet = Wallet(words)
    assert (calls, repr(wallet)) == ([], "Wallet(…)")
    assert wallet.address == wallet.address == "jkl19rl4cm2hmr8afy4kldpxz3fka4jguq0a97rvx2"
    assert calls == [1]


def test_first_configured_mnemonic_source_is_used(monkeypatch, tmp_path):
    file = tmp_path / "words"
    monkeypatch.setenv("JACKAL_MNEMONIC", WORDS)
    assert mnemonic_sources("given", file) == ["CAF_JACKAL__MNEMONIC", "JACKAL_MNEMONIC", str(file)]
    assert read_mnemonic(None, file) == WORDS
    monkeypatch.delenv("JACKAL_MNEMONIC")
    assert mnemonic_sources(None, file) == [str(file)]
    assert mnemonic_sources(None, None) == []
