"""Names on the chain and at providers: coins, transactions, roots, jobs, notes. No I/O."""

import base64
import hashlib
import json
import re
from typing import Final

DENOM: Final = "ujkl"
NOTE_MEMBER: Final = "caf_pipeline"
"""The member of a post's note that holds the archive's id."""

HEADER_MEMBER: Final = "header_sha256"
MAC_MEMBER: Final = "mac"
_SHA256: Final = re.compile("[0-9a-f]{64}")


def transaction_hash(body: bytes) -> str:
    """Return the chain's name of a transaction."""
    return hashlib.sha256(body).hexdigest().upper()


def root_in_path(merkle_root: bytes) -> str:
    """Return a root in URL-safe base64 with padding.

    The chain refuses hex and percent-encoded ordinary base64.
    """
    return base64.urlsafe_b64encode(merkle_root).decode()


def job_id(merkle_root: bytes, sender: str, start: int) -> str:
    """Return a provider's name for an upload job. It is known before the provider answers."""
    return hashlib.sha256(merkle_root + sender.encode() + str(start).encode()).hexdigest()


def archive_note(
    archive_id: str, header_sha256: bytes | None = None, mac: bytes | None = None
) -> str:
    """Return a post's note: JSON with the archive's id, the hash of an encrypted header, a MAC."""
    note = {NOTE_MEMBER: archive_id}
    if header_sha256:
        note[HEADER_MEMBER] = header_sha256.hex()
    if mac:
        note[MAC_MEMBER] = mac.hex()
    return json.dumps(note, separators=(",", ":"))


def header_of(note: str) -> bytes | None:
    """Return the SHA-256 of the header that a note names; None if the chunk is plain."""
    return _bytes_of(note, HEADER_MEMBER)


def mac_of(note: str) -> bytes | None:
    """Return the MAC in a note. It may be forged."""
    return _bytes_of(note, MAC_MEMBER)


def _bytes_of(note: str, name: str) -> bytes | None:
    value = _member_of(note, name)
    return bytes.fromhex(value) if value and _SHA256.fullmatch(value) else None


def archive_of(note: str) -> str | None:
    """Return the archive that a note names."""
    return _member_of(note, NOTE_MEMBER)


def _member_of(note: str, name: str) -> str | None:
    try:
        value = json.loads(note)
    except (ValueError, RecursionError):
        return None
    member = value.get(name) if isinstance(value, dict) else None
    return member if isinstance(member, str) else None


def is_ours(note: str) -> bool:
    """Return whether `archive_note` may have written the note.

    Only a JSON object without our member is certainly from another program.
    """
    try:
        value = json.loads(note)
    except (ValueError, RecursionError):
        return True
    return not isinstance(value, dict) or NOTE_MEMBER in value
