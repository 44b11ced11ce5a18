"""age v1 files: keys, headers, and payloads that can be sealed and opened by segment.

    file      header, 16-byte nonce, payload
    header    a version line, a stanza for each recipient, a line with a MAC
    payload   segments: up to 64 KiB of plaintext and a 16-byte tag, each with its own nonce

Each stanza wraps the same random file key. Any range of the plaintext can be read: each segment is
authenticated. Nothing authenticates the sender: whoever knows a recipient can make a valid file.

Source: C2SP's age.md (format), CCTV's age vectors (what a reader must refuse).
"""

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from bech32 import CHARSET, bech32_encode, bech32_hrp_expand, bech32_polymod, convertbits
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hpke import (
    AEAD,
    KDF,
    KEM,
    MLKEM768X25519PrivateKey,
    MLKEM768X25519PublicKey,
    Suite,
)
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from typing_extensions import Buffer

from caf_pipeline.errors import (
    DamagedHeader,
    DamagedPayload,
    ForgedHeader,
    KeyRefused,
    NoMatchingIdentity,
)

SEGMENT_BYTES: Final = 64 * 1024
TAG_BYTES: Final = 16
SEALED_SEGMENT_BYTES: Final = SEGMENT_BYTES + TAG_BYTES
NONCE_BYTES: Final = 16
FILE_KEY_BYTES: Final = 16

MAX_HEADER_BYTES: Final = 1 << 20
"""Longest header that is read: about 670 hybrid recipients. The format has no limit."""

SCRYPT_LOG_N: Final = 18
"""Work factor of new passphrases: 0.7 s and 256 MiB. The age tool writes the same."""

MAX_SCRYPT_LOG_N: Final = 20
"""Largest work factor that is read: 3 s and 1 GiB. A file could exhaust the memory."""

_VERSION: Final = b"age-encryption.org/v1\n"
_STANZA: Final = re.compile(
    rb"-> ([!-~]+(?: [!-~]+)*)\n((?:[A-Za-z0-9+/]{64}\n)*[A-Za-z0-9+/]{0,63}\n)"
)
_MAC: Final = re.compile(rb"--- ([A-Za-z0-9+/]{43})\n")
_WORK_FACTOR: Final = re.compile(r"[1-9][0-9]?")
_ARMOR: Final = b"-----BEGIN AGE"

_X25519_HRP, _X25519_IDENTITY_HRP = "age", "AGE-SECRET-KEY-"
_HYBRID_HRP, _HYBRID_IDENTITY_HRP = "age1pq", "AGE-SECRET-KEY-PQ-"
_HYBRID_INFO: Final = b"age-encryption.org/mlkem768x25519"
_HYBRID: Final = Suite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
_MLKEM_CIPHERTEXT_BYTES: Final = 1088
_MLKEM_KEY_BYTES: Final = 1184
_ZERO_NONCE: Final = bytes(12)


# --- recipients and identities


@dataclass(frozen=True, slots=True)
class Stanza:
    """A file key, wrapped for one recipient. The first argument is the type."""

    arguments: tuple[str, ...]
    body: bytes


class Recipient(ABC):
    """A public key. Its text begins with `age1`."""

    is_hybrid: bool

    @abstractmethod
    def wrap(self, file_key: bytes) -> Stanza:
        """Return a stanza that only the matching identity can unwrap."""


class Identity(ABC):
    """A secret key. Its text begins with `AGE-SECRET-KEY-`."""

    @abstractmethod
    def unwrap(self, stanza: Stanza) -> bytes | None:
        """Return the file key, or None if the stanza is for another recipient.

        Raises DamagedHeader for a malformed stanza of the identity's type.
        """


@dataclass(frozen=True)
class X25519Recipient(Recipient):
    """A recipient `age1…`. A quantum computer will be able to break it."""

    key: X25519PublicKey
    is_hybrid = False

    def wrap(self, file_key: bytes) -> Stanza:
        """Raises KeyRefused if the key shares no secret."""
        ephemeral = X25519PrivateKey.generate()
        share = ephemeral.public_key().public_bytes_raw()
        try:
            secret = ephemeral.exchange(self.key)
        except ValueError as error:
            raise KeyRefused("the recipient is a point of low order") from error
        wrapping = _x25519_wrapping_key(secret, share, self.key)
        body = ChaCha20Poly1305(wrapping).encrypt(_ZERO_NONCE, file_key, None)
        return Stanza(("X25519", _base64(share)), body)

    def __str__(self) -> str:
        return _bech32(_X25519_HRP, self.key.public_bytes_raw())


@dataclass(frozen=True)
class X25519Identity(Identity):
    """32 secret bytes."""

    seed: bytes

    @cached_property
    def _key(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self.seed)

    @property
    def recipient(self) -> X25519Recipient:
        return X25519Recipient(self._key.public_key())

    def unwrap(self, stanza: Stanza) -> bytes | None:
        if stanza.arguments[0] != "X25519":
            return None
        (share,) = _fields(stanza, 32)
        try:
            secret = self._key.exchange(X25519PublicKey.from_public_bytes(share))
        except ValueError as error:
            raise DamagedHeader("an X25519 share is a point of low order") from error
        wrapping = _x25519_wrapping_key(secret, share, self._key.public_key())
        try:
            return ChaCha20Poly1305(wrapping).decrypt(_ZERO_NONCE, stanza.body, None)
        except InvalidTag:
            return None

    def reveal(self) -> str:
        return _bech32(_X25519_IDENTITY_HRP, self.seed).upper()

    def __repr__(self) -> str:
        return f"X25519Identity({self.recipient})"


@dataclass(frozen=True)
class HybridRecipient(Recipient):
    """A recipient `age1pq…` of ML-KEM-768 and X25519, which resists quantum computers."""

    mlkem: MLKEM768PublicKey
    x25519: X25519PublicKey
    is_hybrid = True

    def wrap(self, file_key: bytes) -> Stanza:
        key = MLKEM768X25519PublicKey(self.mlkem, self.x25519)
        sealed = _HYBRID.encrypt(file_key, key, _HYBRID_INFO)
        length = KEM.MLKEM768_X25519.enc_length()
        return Stanza(("mlkem768x25519", _base64(sealed[:length])), sealed[length:])

    def __str__(self) -> str:
        return _bech32(_HYBRID_HRP, self.mlkem.public_bytes_raw() + self.x25519.public_bytes_raw())


@dataclass(frozen=True)
class HybridIdentity(Identity):
    """32 secret bytes, from which both keys are derived."""

    seed: bytes

    @cached_property
    def _keys(self) -> tuple[MLKEM768PrivateKey, X25519PrivateKey]:
        seeds = hashlib.shake_256(self.seed).digest(96)
        return (
            MLKEM768PrivateKey.from_seed_bytes(seeds[:64]),
            X25519PrivateKey.from_private_bytes(seeds[64:]),
        )

    @property
    def recipient(self) -> HybridRecipient:
        mlkem, x25519 = self._keys
        return HybridRecipient(mlkem.public_key(), x25519.public_key())

    def unwrap(self, stanza: Stanza) -> bytes | None:
        if stanza.arguments[0] != "mlkem768x25519":
            return None
        (encapsulated,) = _fields(stanza, KEM.MLKEM768_X25519.enc_length())
        mlkem, x25519 = self._keys
        try:
            return _HYBRID.decrypt(
                encapsulated + stanza.body, MLKEM768X25519PrivateKey(mlkem, x25519), _HYBRID_INFO
            )
        except InvalidTag:
            # `decrypt` raises this for a point of low order, too, which breaks the format.
            share = X25519PublicKey.from_public_bytes(encapsulated[_MLKEM_CIPHERTEXT_BYTES:])
            try:
                x25519.exchange(share)
            except ValueError as error:
                raise DamagedHeader("a hybrid share is a point of low order") from error
            return None

    def reveal(self) -> str:
        return _bech32(_HYBRID_IDENTITY_HRP, self.seed).upper()

    def __repr__(self) -> str:
        return f"HybridIdentity({str(self.recipient)[:16]}…)"


@dataclass(frozen=True)
class Passphrase(Recipient, Identity):
    """A passphrase, hashed by scrypt: the only recipient of its file."""

    text: str
    log_n: int = SCRYPT_LOG_N
    is_hybrid = False

    def wrap(self, file_key: bytes) -> Stanza:
        salt = secrets.token_bytes(16)
        body = self._aead(salt, self.log_n).encrypt(_ZERO_NONCE, file_key, None)
        return Stanza(("scrypt", _base64(salt), str(self.log_n)), body)

    def unwrap(self, stanza: Stanza) -> bytes | None:
        if stanza.arguments[0] != "scrypt":
            return None
        if len(stanza.arguments) != 3 or not _WORK_FACTOR.fullmatch(stanza.arguments[2]):
            raise DamagedHeader("a scrypt stanza has no valid work factor")
        (salt,) = _fields(Stanza(stanza.arguments[:2], stanza.body), 16)
        log_n = int(stanza.arguments[2])
        if log_n > MAX_SCRYPT_LOG_N:
            raise DamagedHeader(f"the work factor {log_n} is above {MAX_SCRYPT_LOG_N}")
        try:
            return self._aead(salt, log_n).decrypt(_ZERO_NONCE, stanza.body, None)
        except InvalidTag:
            return None

    def _aead(self, salt: bytes, log_n: int) -> ChaCha20Poly1305:
        salt = b"age-encryption.org/v1/scrypt" + salt
        kdf = Scrypt(salt=salt, length=32, n=1 << log_n, r=8, p=1)
        return ChaCha20Poly1305(kdf.derive(self.text.encode()))

    def __repr__(self) -> str:
        return "Passphrase(…)"


def new_identity(*, hybrid: bool = True) -> X25519Identity | HybridIdentity:
    """Return a new random identity."""
    seed = secrets.token_bytes(32)
    return HybridIdentity(seed) if hybrid else X25519Identity(seed)


def parse_recipient(text: str) -> X25519Recipient | HybridRecipient:
    """Parse a recipient, or raise KeyRefused."""
    _refuse_ssh(text)
    hrp, data = _unbech32(text)
    try:
        if hrp == _X25519_HRP:
            return X25519Recipient(X25519PublicKey.from_public_bytes(data))
        if hrp == _HYBRID_HRP:
            mlkem = MLKEM768PublicKey.from_public_bytes(data[:_MLKEM_KEY_BYTES])
            x25519 = X25519PublicKey.from_public_bytes(data[_MLKEM_KEY_BYTES:])
            return HybridRecipient(mlkem, x25519)
    except ValueError as error:
        raise KeyRefused(f"a recipient {hrp}1… has an invalid key") from error
    if hrp in (_X25519_IDENTITY_HRP, _HYBRID_IDENTITY_HRP):
        raise KeyRefused(
            "an identity is not a recipient: its secret must stay on machines that read",
            hint="'caf keys show' prints the recipient",
        )
    if hrp.startswith("age1"):
        raise KeyRefused(
            f"a recipient {hrp}1… belongs to an age plugin, {_UNSUPPORTED}", hint=_NEW_KEY
        )
    raise KeyRefused("a recipient must begin with 'age1' or 'age1pq1'")


def shortened(recipient: str) -> str:
    """Shorten a recipient for people. A hybrid recipient has 1,959 characters."""
    return recipient if len(recipient) <= 80 else f"{recipient[:24]}…{recipient[-8:]}"


def parse_identity(text: str) -> X25519Identity | HybridIdentity:
    """Parse an identity, or raise KeyRefused without its text."""
    _refuse_ssh(text)
    if text.upper().startswith("AGE-PLUGIN-"):
        raise KeyRefused(f"the identity belongs to an age plugin, {_UNSUPPORTED}", hint=_NEW_KEY)
    hrp, data = _unbech32(text)
    if hrp not in (_X25519_IDENTITY_HRP, _HYBRID_IDENTITY_HRP) or len(data) != 32:
        raise KeyRefused("an identity must begin with 'AGE-SECRET-KEY-'")
    return HybridIdentity(data) if hrp == _HYBRID_IDENTITY_HRP else X25519Identity(data)


_UNSUPPORTED: Final = "which is not supported"
_NEW_KEY: Final = "'caf keys new' makes a key"


def _refuse_ssh(text: str) -> None:
    is_private = text.startswith("-----BEGIN ") and "PRIVATE KEY" in text
    if is_private or text.startswith(("ssh-", "ecdsa-", "sk-ssh-", "sk-ecdsa-")):
        raise KeyRefused(f"this is an SSH key, {_UNSUPPORTED}", hint=_NEW_KEY)


# --- headers


@dataclass(frozen=True, slots=True)
class Header:
    """A header; `raw` ends before the payload nonce."""

    stanzas: tuple[Stanza, ...]
    raw: bytes


def make_header(recipients: Sequence[Recipient], file_key: bytes) -> bytes:
    """Return the header of a new file. `file_key` must be random and used for one file only.

    Raises KeyRefused if there are no recipients, or too many, or if they must not share a file: a
    classic recipient would undo the protection of a hybrid one; a passphrase must be alone.
    """
    if not recipients:
        raise KeyRefused("a file needs a recipient", hint="'caf keys new' makes one")
    if len({recipient.is_hybrid for recipient in recipients}) > 1:
        raise KeyRefused(
            "hybrid and classic recipients cannot share a file: a quantum computer that breaks "
            "the classic key would read it",
            hint="use recipients of one kind",
        )
    if len(recipients) > 1 and any(isinstance(recipient, Passphrase) for recipient in recipients):
        raise KeyRefused("a passphrase must be the only recipient")
    parts = [_VERSION]
    for recipient in recipients:
        stanza = recipient.wrap(file_key)
        body = _base64(stanza.body)
        # A full last line must be followed by an empty line.
        lines = [body[at : at + 64] for at in range(0, len(body) + 1, 64)]
        parts.append("\n".join([f"-> {' '.join(stanza.arguments)}", *lines, ""]).encode())
    parts.append(b"---")
    mac = _mac(file_key, b"".join(parts))
    header = b"".join([*parts, b" ", _base64(mac).encode(), b"\n"])
    if len(header) > MAX_HEADER_BYTES:
        raise KeyRefused(
            f"the header of {len(recipients)} recipients has {len(header)} bytes of at most "
            f"{MAX_HEADER_BYTES}",
            hint="use fewer recipients",
        )
    return header


def is_age_file(prefix: bytes) -> bool:
    """Return whether this begins like an age file, armored or not."""
    return prefix.startswith((_VERSION, _ARMOR))


def is_complete(prefix: bytes) -> bool:
    """Return whether there is a whole header, or cannot be one."""
    return len(prefix) >= MAX_HEADER_BYTES or re.search(rb"\n---[^\n]*\n", prefix) is not None


def parse_header(data: bytes) -> Header:
    """Parse a header, or raise DamagedHeader."""
    if data.startswith(_ARMOR):
        raise DamagedHeader(
            "the file has ASCII armor, which is not supported",
            hint="'age -d' reads it; make the file again without '-a'",
        )
    if not data.startswith(_VERSION):
        raise DamagedHeader("the file does not begin with the version line of age v1")
    stanzas = []
    position = len(_VERSION)
    while match := _STANZA.match(data, position):
        stanzas.append(
            Stanza(
                tuple(match[1].decode("ascii").split(" ")),
                _unbase64(match[2].replace(b"\n", b"").decode("ascii")),
            )
        )
        position = match.end()
    mac = _MAC.match(data, position)
    if not stanzas or not mac or mac.end() > MAX_HEADER_BYTES:
        raise DamagedHeader(f"the header breaks the format at byte {position}")
    _unbase64(mac[1].decode("ascii"))
    if len(stanzas) > 1 and any(stanza.arguments[0] == "scrypt" for stanza in stanzas):
        raise DamagedHeader("a passphrase is not the only recipient")
    return Header(tuple(stanzas), data[: mac.end()])


def open_header(header: Header, identities: Sequence[Identity]) -> bytes:
    """Return the file key. The first identity that unwraps a stanza decides.

    Raises DamagedHeader, NoMatchingIdentity, or ForgedHeader (wrong MAC).
    """
    for identity in identities:
        # All stanzas are unwrapped, since one that breaks the format is fatal.
        file_keys = [identity.unwrap(stanza) for stanza in header.stanzas]
        for file_key in filter(None, file_keys):
            covered, _, mac = header.raw.rpartition(b" ")
            if not hmac.compare_digest(
                _mac(file_key, covered), _unbase64(mac[:-1].decode("ascii"))
            ):
                raise ForgedHeader("the header was changed: its MAC is wrong")
            return file_key
    raise NoMatchingIdentity(
        "no identity opens the file",
        hint="it needs the identity of one of its recipients",
    )


# --- payloads


def sealed_size(size_bytes: int) -> int:
    """Return the payload's size for `size_bytes` of plaintext."""
    return size_bytes + TAG_BYTES * _segments(size_bytes)


def plain_size(sealed_bytes: int) -> int:
    """Return the plaintext's size, or raise DamagedPayload."""
    count = -(-sealed_bytes // SEALED_SEGMENT_BYTES)
    size_bytes = sealed_bytes - TAG_BYTES * count
    if size_bytes < 0 or sealed_size(size_bytes) != sealed_bytes:
        raise DamagedPayload(f"no payload has {sealed_bytes} bytes: the file is truncated")
    return size_bytes


def sealed_range(start_byte: int, end_byte: int, size_bytes: int) -> tuple[int, int]:
    """Return the payload range, end exclusive, with the segments of `[start_byte, end_byte)`.

    `size_bytes` is the size of the whole plaintext.
    """
    first = _first_segment(start_byte, size_bytes)
    last = max(first, (end_byte - 1) // SEGMENT_BYTES)
    end = min((last + 1) * SEALED_SEGMENT_BYTES, sealed_size(size_bytes))
    return first * SEALED_SEGMENT_BYTES, end


class Payload:
    """Seals and opens the segments of one file. Thread-safe.

    Never seal two plaintexts under one file key, payload nonce and segment number: their difference
    would be public, and segments could be forged.
    """

    def __init__(self, file_key: bytes, nonce: bytes) -> None:
        self._aead = ChaCha20Poly1305(_hkdf(file_key, nonce, b"payload"))

    def seal(self, first: int, plaintext: Buffer, *, is_end: bool) -> bytearray:
        """Return segments from number `first` on, whole ones unless `is_end`.

        `plaintext` is empty only if the file is.
        """
        plain = memoryview(plaintext).cast("B")
        sealed = bytearray(sealed_size(len(plain)))
        count = _segments(len(plain))
        with memoryview(sealed) as out:
            for index in range(count):
                self._aead.encrypt_into(
                    _segment_nonce(first + index, is_last=is_end and index == count - 1),
                    plain[index * SEGMENT_BYTES : (index + 1) * SEGMENT_BYTES],
                    None,
                    out[index * SEALED_SEGMENT_BYTES : (index + 1) * SEALED_SEGMENT_BYTES],
                )
        return sealed

    def open(self, first: int, sealed: Buffer, *, is_end: bool) -> bytearray:
        """Return the plaintext of segments from number `first` on.

        Raises DamagedPayload if a segment is not authentic, or not at its place.
        """
        source = memoryview(sealed).cast("B")
        plain = bytearray(plain_size(len(source)))
        count = _segments(len(plain))
        with memoryview(plain) as out:
            for index in range(count):
                try:
                    self._aead.decrypt_into(
                        _segment_nonce(first + index, is_last=is_end and index == count - 1),
                        source[index * SEALED_SEGMENT_BYTES : (index + 1) * SEALED_SEGMENT_BYTES],
                        None,
                        out[index * SEGMENT_BYTES : (index + 1) * SEGMENT_BYTES],
                    )
                except InvalidTag as error:
                    # `decrypt_into` leaves plaintext that is not authentic.
                    out[:] = bytes(len(out))
                    raise DamagedPayload(f"segment {first + index} is not authentic") from error
        return plain

    def open_range(
        self, start_byte: int, end_byte: int, size_bytes: int, sealed: Buffer
    ) -> memoryview:
        """Return `[start_byte, end_byte)` of the plaintext. Raises as `open`.

        `sealed` has the bytes of `sealed_range`.
        """
        first = _first_segment(start_byte, size_bytes)
        is_end = sealed_range(start_byte, end_byte, size_bytes)[1] == sealed_size(size_bytes)
        plain = memoryview(self.open(first, sealed, is_end=is_end))
        offset = start_byte - first * SEGMENT_BYTES
        return plain[offset : offset + end_byte - start_byte]


def open_file(prefix: bytes, identities: Sequence[Identity]) -> tuple[Payload, int]:
    """Return the payload and its first byte.

    `prefix` reaches at least up to this byte. Raises DamagedHeader, and as `open_header`.
    """
    header = parse_header(prefix)
    file_key = open_header(header, identities)
    start_byte = len(header.raw) + NONCE_BYTES
    if len(prefix) < start_byte:
        raise DamagedHeader("the file ends before its payload")
    return Payload(file_key, prefix[len(header.raw) : start_byte]), start_byte


# --- primitives


def _segments(size_bytes: int) -> int:
    return max(1, -(-size_bytes // SEGMENT_BYTES))


def _first_segment(start_byte: int, size_bytes: int) -> int:
    return min(start_byte, max(0, size_bytes - 1)) // SEGMENT_BYTES


def _segment_nonce(number: int, *, is_last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([is_last])


def _hkdf(key: bytes, salt: bytes, info: bytes) -> bytes:
    return HKDF(algorithm=SHA256(), length=32, salt=salt, info=info).derive(key)


def _mac(file_key: bytes, header: bytes) -> bytes:
    return hmac.digest(_hkdf(file_key, b"", b"header"), header, "sha256")


def _x25519_wrapping_key(secret: bytes, share: bytes, recipient: X25519PublicKey) -> bytes:
    salt = share + recipient.public_bytes_raw()
    return _hkdf(secret, salt, b"age-encryption.org/v1/X25519")


def _fields(stanza: Stanza, *sizes: int) -> list[bytes]:
    """The size of the body is checked first: one body could otherwise open under several keys."""
    fields = [_unbase64(argument) for argument in stanza.arguments[1:]]
    if tuple(map(len, fields)) != sizes or len(stanza.body) != FILE_KEY_BYTES + TAG_BYTES:
        raise DamagedHeader(f"a stanza {stanza.arguments[0]} has a wrong size")
    return fields


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii").rstrip("=")


def _unbase64(text: str) -> bytes:
    try:
        data = binascii.a2b_base64(text + "=" * (-len(text) % 4), strict_mode=True)
    except binascii.Error as error:
        raise DamagedHeader("the header has invalid base64") from error
    if _base64(data) != text:
        raise DamagedHeader("the header has base64 that is not canonical")
    return data


def _bech32(hrp: str, data: bytes) -> str:
    return bech32_encode(hrp.lower(), convertbits(data, 8, 5) or [])


def _unbech32(text: str) -> tuple[str, bytes]:
    """Unlike BIP 173, the length has no limit."""
    hrp, _, encoded = text.rpartition("1")
    values = [CHARSET.find(character) for character in encoded.lower()]
    is_one_case = text in (text.lower(), text.upper())
    if (
        not (hrp and text.isascii() and is_one_case)
        or -1 in values
        or bech32_polymod([*bech32_hrp_expand(hrp.lower()), *values]) != 1
    ):
        raise KeyRefused("a key of age is incomplete, or has a wrong character")
    data = convertbits(values[:-6], 5, 8, pad=False)
    if data is None:
        raise KeyRefused("a key of age has extra bits")
    return hrp, bytes(data)
