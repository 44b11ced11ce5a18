"""Names on the chain and at providers: coins, transactions, roots, jobs, notes. No I/O."""

import base64
import hashlib
import json
from typing import Final

DENOM: Final = "ujkl"
NOTE_MEMBER: Final = "caf_pipeline"
"""The member of a post's note that holds the archive's id."""


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


def archive_note(archive_id: str) -> str:
    """Return a post's note: JSON that names the archive and nothing else."""
    return json.dumps({NOTE_MEMBER: archive_id}, separators=(",", ":"))


def archive_of(note: str) -> str | None:
    """Return the archive that a note names."""
    try:
        value = json.loads(note)
    except (ValueError, RecursionError):
        return None
    archive_id = value.get(NOTE_MEMBER) if isinstance(value, dict) else None
    return archive_id if isinstance(archive_id, str) else None


def is_ours(note: str) -> bool:
    """Return whether `archive_note` may have written the note.

    Only a JSON object without our member is certainly from another program.
    """
    try:
        value = json.loads(note)
    except (ValueError, RecursionError):
        return True
    return not isinstance(value, dict) or NOTE_MEMBER in value
