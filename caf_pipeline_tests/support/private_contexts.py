"""Run contexts of a source whose chunks are encrypted, with and without an identity."""

import hashlib
import os
from pathlib import Path

from caf_pipeline.formats import age
from caf_pipeline.run_context import RunContext
from caf_pipeline_tests.support.run_contexts import a_run_context

IDENTITY = age.new_identity()
RECIPIENT = str(IDENTITY.recipient)


def encrypt(path: Path, *recipients: age.Recipient) -> bytes:
    """Encrypt a file in place, to `IDENTITY` by default. Return the SHA-256 of header and nonce."""
    key, nonce = os.urandom(age.FILE_KEY_BYTES), os.urandom(age.NONCE_BYTES)
    begin = age.make_header(recipients or [IDENTITY.recipient], key) + nonce
    sealed = age.Payload(key, nonce).seal(0, path.read_bytes(), is_end=True)
    path.write_bytes(begin + sealed)
    return hashlib.sha256(begin).digest()


def sealed_again(stored: bytes, content: bytes, identity: age.HybridIdentity = IDENTITY) -> bytes:
    """Seal other content under the header and nonce of a file, as a thief of the identity can."""
    header = age.parse_header(stored)
    begin = stored[: len(header.raw) + age.NONCE_BYTES]
    payload = age.Payload(age.open_header(header, [identity]), begin[-age.NONCE_BYTES :])
    return begin + bytes(payload.seal(0, content, is_end=True))


def a_private_context(
    folder: Path,
    source,
    ledger,
    *,
    identity: age.HybridIdentity | age.X25519Identity | None = None,
    **settings,
) -> RunContext:
    """Return a context that encrypts to `IDENTITY`. It decrypts only if it gets an `identity`."""
    encryption = {"recipients": [RECIPIENT]}
    if identity:
        encryption["identity"] = identity.reveal()
    return a_run_context(folder, source, ledger, public=False, encryption=encryption, **settings)
