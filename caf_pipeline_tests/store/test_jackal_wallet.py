"""The wallet: known vectors, low signatures, and secret words."""

import hashlib
import itertools

import pytest
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from hypothesis import given
from hypothesis import strategies as st

from caf_pipeline.errors import MnemonicRefused, SettingsError
from caf_pipeline.store.jackal import wallet as wallet_module
from caf_pipeline.store.jackal.wallet import (
    CURVE_ORDER,
    MNEMONIC_VARIABLE,
    Wallet,
    address_of,
    derive_key,
    mnemonic_sources,
    read_mnemonic,
)

WORDS = "abandon " * 11 + "about"
PRIVATE_KEY = "c4a48e2fce1481cd3294b4490f6678090ea98d3d0e5cd984558ab0968741b104"
SIGNATURE = (  # of b"caf"
    "4ea3977392b37bb0369b65a5e0e8b01b9a40abc5fb4485ef47864a342df048e2"
    "19a59fa4240078011796965eb1038e2837b008f5a7fa47be614b4ab2193ab4d2"
)
ADDRESS = "jkl19rl4cm2hmr8afy4kldpxz3fka4jguq0a97rvx2"

BIP_32_VECTORS = {
    "000102030405060708090a0b0c0d0e0f": {
        "m": "e8f32e723decf4051aefac8e2c93c9c5b214313817cdb01a1494b917c8436b35",
        "m/0'": "edb2e14f9ee77d26dd93b4ecede8d16ed408ce149b6cd80b0715a2d911a0afea",
        "m/0'/1": "3c6cb8d0f6a264c91ea8b5030fadaa8e538b020f0a387421a12de9319dc93368",
        "m/0'/1/2'": "cbce0d719ecf7431d88e6a89fa1483e02e35092af60c042b1df2ff59fa424dca",
        "m/0'/1/2'/2": "0f479245fb19a38a1954c5c7c0ebab2f9bdfd96a17563ef28a6a4b1a2a764ef4",
        "m/0'/1/2'/2/1000000000": (
            "471b76e389e528d6de6d816857e012c5455051cad6660850e58372a6c3e6e7c8"
        ),
    },
    "fffcf9f6f3f0edeae7e4e1dedbd8d5d2cfccc9c6c3c0bdbab7b4b1aeaba8a5a2"
    "9f9c999693908d8a8784817e7b7875726f6c696663605d5a5754514e4b484542": {
        "m": "4b03d6fc340455b363f51020ad3ecca4f0850280cf436c70c727923f6db46c3e",
        "m/0": "abe74a98f6c7eabee0428f53798f0ab8aa1bd37873999041703c742f15ac7e1e",
        "m/0/2147483647'": "877c779ad9687164e9c2f4f0f4ff0340814392330693ce95a58fe18fd52e6e93",
        "m/0/2147483647'/1": "704addf544a06e5ee4bea37098463c23613da32020d604506da8c0518e1da4b7",
        "m/0/2147483647'/1/2147483646'": (
            "f1c7c871a54a804afe328b4c83a1c33b8e5ff48f5087273f04efa83b247d6a2d"
        ),
        "m/0/2147483647'/1/2147483646'/2": (
            "bb7d39bdb83ecf58f2fd82b6d918341cbef428661ef01ab97c28a4842125ac23"
        ),
    },
    "4b381541583be4423346c643850da4b320e46a87ae3d2a4e6da11eba819cd4ac"
    "ba45d239319ac14f863b8d5ab5a0d0c64d2e8a1e7d1457df2e5a3c51c73235be": {
        "m": "00ddb80b067e0d4993197fe10f2657a844a384589847602d56f0c629c81aae32",
        "m/0'": "491f7a2eebc7b57028e0d3faa0acda02e75c33b03c48fb288c41e2ea44e1daef",
    },
    "3ddd5602285899a946114506157c7997e5444528f3003f6134712147db19b678": {
        "m": "12c0d59c7aa3a10973dbd3f478b65f2516627e3fe61e00c345be9a477ad2e215",
        "m/0'": "00d948e9261e41362a688b916f297121ba6bfb2274a3575ac0e456551dfd7f7e",
        "m/0'/1'": "3a2086edd7d9df86c3487a5905a1712a9aa664bce8cc268141e07549eaa8661d",
    },
}
"""Private keys by seed and path: BIP-32's test vectors 1 to 4. 3 and 4 have leading zeros."""


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
    key = wallet._key.private_numbers().private_value
    assert f"{key:064x}" == PRIVATE_KEY  # the same as from mospy-wallet 0.6.0
    assert (
        wallet.public_key.hex()
        == "024f4e2ad99c34d60b9ba6283c9431a8418af8673212961f97a77b6377fcd05b62"
    )
    assert wallet.address == address_of(wallet.public_key) == ADDRESS


def test_spaces_and_lines_between_the_words_do_not_matter():
    assert Wallet("\n " + WORDS.replace(" ", "  \n") + "\n").address == ADDRESS


@pytest.mark.parametrize(
    "seed", BIP_32_VECTORS, ids=["vector 1", "vector 2", "vector 3", "vector 4"]
)
def test_derived_keys_are_those_of_bip_32(seed):
    keys = BIP_32_VECTORS[seed]
    assert {path: f"{derive_key(bytes.fromhex(seed), path):064x}" for path in keys} == keys


@pytest.mark.parametrize(
    ("tweak", "parent"), [(CURVE_ORDER, 1), (2**256 - 1, 1), (CURVE_ORDER - 5, 5), (0, 0)]
)
def test_undefined_bip_32_key_is_refused(monkeypatch, tweak, parent):
    monkeypatch.setattr(wallet_module.hmac, "digest", lambda *_: tweak.to_bytes(32) + bytes(32))
    with pytest.raises(MnemonicRefused, match="BIP-32"):
        wallet_module._next_key(parent, bytes(32), b"")


@given(st.binary(max_size=300))
def test_signature_is_valid_low_and_deterministic(message):
    wallet = Wallet(WORDS)
    signature = wallet.sign(message)
    r, s = int.from_bytes(signature[:32]), int.from_bytes(signature[32:])
    assert len(signature) == 64
    assert 0 < s <= CURVE_ORDER // 2
    public_key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256K1(), wallet.public_key)
    public_key.verify(encode_dss_signature(r, s), message, ec.ECDSA(hashes.SHA256()))
    assert wallet.sign(message) == signature


def test_rfc_6979_signature_equals_that_of_libsecp256k1():
    assert Wallet(WORDS).sign(b"caf").hex() == SIGNATURE


def test_openssl_without_secp256k1_is_a_settings_error(monkeypatch):
    def unsupported(*_args):
        raise UnsupportedAlgorithm("secp256k1")

    monkeypatch.setattr(ec, "derive_private_key", unsupported)
    with pytest.raises(SettingsError, match="OpenSSL"):
        Wallet(WORDS)


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
