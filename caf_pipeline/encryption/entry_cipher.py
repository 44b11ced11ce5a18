"""Encrypts the journals of private packings under the worker key and a secret of the packing.

The ledger deletes the secret at the seal. Afterwards the worker key alone opens no journal.

An entry of another chunk, journal or position does not open. Entries are no age files: anyone who
knows the recipient could plant one.
"""

import secrets
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SALT_BYTES: Final = 16
_NONCE_BYTES: Final = 12


class EntryCipher:
    """Seals and opens the entries of one journal. `salt` is random, and is not secret."""

    def __init__(self, worker_key: bytes, secret: bytes, chunk: str, salt: bytes = b"") -> None:
        """A new journal has no `salt` yet, and gets a random one. Both keys have 32 bytes."""
        self.salt = salt or secrets.token_bytes(SALT_BYTES)
        self._keys = worker_key, secret
        self._chunk = chunk
        kdf = HKDF(algorithm=SHA256(), length=32, salt=self.salt, info=chunk.encode())
        self._aead = ChaCha20Poly1305(kdf.derive(worker_key + secret))

    def with_salt(self, salt: bytes) -> "EntryCipher":
        return EntryCipher(*self._keys, self._chunk, salt)

    def seal(self, number: int, content: bytes) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._aead.encrypt(nonce, content, self._associated(number))

    def open(self, number: int, sealed: bytes) -> bytes | None:
        """None if the content is not authentic."""
        nonce, ciphertext = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        try:
            return self._aead.decrypt(nonce, ciphertext, self._associated(number))
        except (InvalidTag, ValueError):  # ValueError: shorter than a nonce
            return None

    def _associated(self, number: int) -> bytes:
        return self.salt + number.to_bytes(8, "big") + self._chunk.encode()
