"""The wallet: a key derived from its mnemonic, its address, and its signatures.

The words and the key appear in no repr and no error. Source: BIP-39, BIP-32, SLIP-44 coin type 118;
"Transactions" in the notes on Jackal's protocol.
"""

import hashlib
import hmac
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Final

import bech32
from Crypto.Hash import RIPEMD160
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from mnemonic import Mnemonic

from caf_pipeline.errors import MnemonicRefused, SettingsError, UsageError
from caf_pipeline.system.quantities import counted
from caf_pipeline.system.secret_files import read_secret

KEY_PATH: Final = "m/44'/118'/0'/0/0"
CURVE_ORDER: Final = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141
"""secp256k1's n. Source: SEC 2."""

HARDENED: Final = 1 << 31
ADDRESS_PREFIX: Final = "jkl"
ADDRESS_SIZE_BYTES: Final = 20  # a RIPEMD-160
MNEMONIC_VARIABLE: Final = "JACKAL_MNEMONIC"
SETTING_VARIABLE: Final = "CAF_JACKAL__MNEMONIC"  # read by the settings; takes precedence


class Wallet:
    """An account's key."""

    def __init__(self, mnemonic: str | Callable[[], str]) -> None:
        """A function is called when the key is first used.

        Raises:
            MnemonicRefused: the mnemonic is invalid.
        """
        self._mnemonic = mnemonic
        if isinstance(mnemonic, str):
            self.address  # noqa: B018 - derives it

    def __repr__(self) -> str:
        return "Wallet(…)" if callable(self._mnemonic) else f"Wallet({self.address})"

    @cached_property
    def _key(self) -> ec.EllipticCurvePrivateKey:
        mnemonic = self._mnemonic() if callable(self._mnemonic) else self._mnemonic
        words = " ".join(mnemonic.split())
        if not Mnemonic("english").check(words):
            raise MnemonicRefused(
                f"the mnemonic is not valid: {_mnemonic_fault(words)}",
                hint="enter the wallet's 12 to 24 English words in their order",
            )
        try:
            _ecdsa()
            return _on_curve(derive_key(Mnemonic.to_seed(words), KEY_PATH))
        except UnsupportedAlgorithm as error:
            raise SettingsError(
                "the OpenSSL of the package cryptography cannot sign with secp256k1 by RFC 6979",
                hint="install cryptography's wheel from PyPI, which contains OpenSSL",
            ) from error

    @cached_property
    def public_key(self) -> bytes:
        """33 bytes, compressed."""
        return _compressed(self._key)

    @cached_property
    def address(self) -> str:
        """`jkl1…`."""
        return address_of(self.public_key)

    def sign(self, message: bytes) -> bytes:
        """Return r and a low s of the message's SHA-256, 32 bytes each; RFC 6979."""
        r, s = decode_dss_signature(self._key.sign(message, _ecdsa()))
        return r.to_bytes(32) + min(s, CURVE_ORDER - s).to_bytes(32)


def derive_key(seed: bytes, path: str) -> int:
    """Return the private key of a path such as `m/44'/118'/0'/0/0`, by BIP-32.

    Raises:
        MnemonicRefused: BIP-32 defines no key here, a chance below 1 in 2**127.
    """
    key, chain_code = _next_key(0, b"Bitcoin seed", seed)
    for step in path.split("/")[1:]:
        index = int(step.rstrip("'"))
        if step.endswith("'"):
            data = key.to_bytes(33) + (HARDENED + index).to_bytes(4)
        else:
            data = _compressed(_on_curve(key)) + index.to_bytes(4)
        key, chain_code = _next_key(key, chain_code, data)
    return key


def _next_key(parent: int, chain_code: bytes, data: bytes) -> tuple[int, bytes]:
    digest = hmac.digest(chain_code, data, "sha512")
    tweak = int.from_bytes(digest[:32])
    key = (parent + tweak) % CURVE_ORDER
    if tweak >= CURVE_ORDER or key == 0:
        raise MnemonicRefused("BIP-32 defines no key for the mnemonic", hint="use another wallet")
    return key, digest[32:]


def _on_curve(key: int) -> ec.EllipticCurvePrivateKey:
    return ec.derive_private_key(key, ec.SECP256K1())


def _ecdsa() -> ec.ECDSA:
    return ec.ECDSA(hashes.SHA256(), deterministic_signing=True)


def _compressed(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def address_of(public_key: bytes) -> str:
    """Return the address of a compressed public key."""
    digest = RIPEMD160.new(hashlib.sha256(public_key).digest()).digest()
    return str(bech32.bech32_encode(ADDRESS_PREFIX, bech32.convertbits(digest, 8, 5) or []))


def require_address(text: str) -> str:
    """Return the text if it is a valid account address, `jkl1…`. Raises UsageError.

    The checksum detects typing errors.
    """
    prefix, words = bech32.bech32_decode(text)
    digest = bech32.convertbits(words, 5, 8, False) if words else None
    if (
        prefix != ADDRESS_PREFIX
        or digest is None
        or len(digest) != ADDRESS_SIZE_BYTES
        or text != text.lower()
    ):
        raise UsageError(
            f"{text!r} is not the address of a wallet.",
            hint=f"Enter {ADDRESS_PREFIX}1…, as 'caf jackal wallet' shows it.",
        )
    return text


def mnemonic_sources(setting: str | None, file: Path | None) -> Sequence[str]:
    """Return every configured source of the words. `read_mnemonic` uses the first one."""
    variables = {SETTING_VARIABLE: setting, MNEMONIC_VARIABLE: os.environ.get(MNEMONIC_VARIABLE)}
    return [*(name for name, words in variables.items() if words), *([str(file)] if file else [])]


def read_mnemonic(setting: str | None, file: Path | None) -> str:
    """Return the words from the setting, the environment, or the file, in this order.

    Raises:
        MnemonicRefused: there are none, or the file is unreadable or open to other users.
    """
    if words := setting or os.environ.get(MNEMONIC_VARIABLE):
        return words
    if file is None:
        raise MnemonicRefused(
            "no wallet is configured",
            hint=f"set {MNEMONIC_VARIABLE}, or jackal.mnemonic_file to a file of mode 600 that "
            "holds the words",
        )
    hint = "set jackal.mnemonic_file to a text file with the wallet's words"
    try:
        return read_secret(file, MnemonicRefused, hint=hint).decode()
    except UnicodeDecodeError:
        raise MnemonicRefused(f"{file} cannot be read: it is not text", hint=hint) from None


def _mnemonic_fault(text: str) -> str:
    words = text.split()
    if len(words) not in (12, 15, 18, 21, 24):
        return f"it has {counted(len(words), 'word')}"
    english = set(Mnemonic("english").wordlist)
    unknown = [str(number) for number, word in enumerate(words, 1) if word not in english]
    if unknown:
        return f"word {', '.join(unknown)} is not in the English list"
    return "its checksum is wrong: a word is misplaced or replaced by another"
