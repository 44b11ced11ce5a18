"""Names on the chain and at providers: of coins, transactions, roots, jobs, and of an archive in a
post's note. No I/O.
"""

import base64
import hashlib
import json
from typing import Final

DENOM: Final = "ujkl"
NOTE_MEMBER: Final = "caf_pipeline"
"""The member of a post's note by which an archive's files are found again on the chain."""


def transaction_hash(body: bytes) -> str:
    """Return the name under which the chain will know these bytes."""
    return hashlib.sha256(body).hexdigest().upper()


def root_in_path(merkle_root: bytes) -> str:
    """Return a root as the chain's paths take it: URL-safe base64 with padding.

    Hex and quoted base64 are refused there.
    """
    return base64.urlsafe_b64encode(merkle_root).decode()


def job_id(merkle_root: bytes, sender: str, start: int) -> str:
    """Return the name of an upload job at a provider, known before any answer."""
    return hashlib.sha256(merkle_root + sender.encode() + str(start).encode()).hexdigest()


def archive_note(archive_id: str) -> str:
    """Return the note of a post: JSON that names the archive and says nothing of what is in it."""
    return json.dumps({NOTE_MEMBER: archive_id}, separators=(",", ":"))


def archive_of(note: str) -> str | None:
    """Return the archive that a post's note names; None where it names none.

    The inverse of `archive_note`.
    """
    try:
        value = json.loads(note)
    except (ValueError, RecursionError):
        return None
    named = value.get(NOTE_MEMBER) if isinstance(value, dict) else None
    return named if isinstance(named, str) else None


def is_ours(note: str) -> bool:
    """Whether a note may be one of `archive_note`: only a JSON object without its member is surely
    another program's.
    """
    try:
        value = json.loads(note)
    except (ValueError, RecursionError):
        return True
    return not isinstance(value, dict) or NOTE_MEMBER in value
