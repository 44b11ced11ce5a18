"""Reads an earlier run's encrypted part, to seal it again under a new file key.

The files stay as they are until the new ones replace them.

Source: docs/decisions/0010-the-packing-journal.md.
"""

from collections.abc import Callable
from pathlib import Path

from caf_pipeline.encryption.entry_cipher import EntryCipher
from caf_pipeline.encryption.sealing import read_at, read_unfinished, sealed_bytes
from caf_pipeline.errors import DamagedPayload
from caf_pipeline.formats import age
from caf_pipeline.packing.journal.format import Checkpoint, Journal, Opening, SealedPart
from caf_pipeline.packing.sink import PartFile, staging_errors


class EarlierPacking:
    """An encrypted part with its journal. `replaced` is called when new files replace them.

    Attributes:
        size_bytes: of the plaintext up to the last checkpoint.
        stored_bytes: of the part up to there.
    """

    def __init__(
        self, part: PartFile, journal: Journal, sealed: SealedPart, size_bytes: int
    ) -> None:
        self.part = part
        self.journal = journal
        self.size_bytes = size_bytes
        self.stored_bytes = sealed.payload_start + sealed_bytes(size_bytes)
        self.replaced: Callable[[], None] = lambda: None
        self._sealed = sealed
        self._payload = age.Payload(sealed.file_key, sealed.nonce)
        self._segment_start = 0
        self._segment = b""

    @property
    def paths(self) -> tuple[Path, Path]:
        return self.part.path, self.journal.path

    def close(self) -> None:
        self.part.close()
        self.journal.close()

    def read(self, start_byte: int, end_byte: int) -> memoryview:
        """Return plaintext of one segment from `start_byte` on, at most up to `end_byte`.

        Empty at the end, or if the segment is damaged.
        """
        start = start_byte - start_byte % age.SEGMENT_BYTES
        if start != self._segment_start or not self._segment:
            self._segment_start, self._segment = start, self._read_segment(start)
        return memoryview(self._segment)[start_byte - start : end_byte - start]

    def _read_segment(self, start: int) -> bytes:
        position = (
            sealed_bytes(self.size_bytes) // age.SEALED_SEGMENT_BYTES,
            self._sealed.open_segment,
        )
        end = min(start + age.SEGMENT_BYTES, self.size_bytes)
        try:
            return read_unfinished(self._payload, position, self._read_sealed, start, end)
        except (DamagedPayload, OSError):  # resume only what precedes it
            return b""

    def _read_sealed(self, start_byte: int, end_byte: int) -> bytes:
        start = self._sealed.payload_start
        return read_at(self.part.descriptor, start + start_byte, start + end_byte)


def open_earlier(
    path: Path, journal_path: Path, opening: Opening, cipher: EntryCipher
) -> tuple[EarlierPacking | None, str]:
    """Open a part with its journal, or return why it cannot be read."""
    try:
        part = PartFile.open(path)
    except FileNotFoundError:  # its writer is alive and has just renamed it
        return None, ""
    journal = Journal.open(journal_path, opening, cipher)
    try:
        earlier = _newest_of(part, journal)
        if earlier and part.locked:  # free the space that was reserved behind
            with staging_errors(path):
                part.cut(min(earlier.stored_bytes, part.size_bytes))
    except BaseException:
        part.close()
        journal.close()
        raise
    if earlier is None:
        part.close()
        journal.close()
        return None, journal.broken or "its journal is of another part"
    return earlier, ""


def _newest_of(part: PartFile, journal: Journal) -> EarlierPacking | None:
    """Return the part up to the last checkpoint of its nonce.

    The journal of a part that was sealed again also has checkpoints of the part before.
    """
    last: EarlierPacking | None = None
    for position, checkpoint in journal.checkpoints():
        sealed = checkpoint.sealed
        if sealed and _is_consistent(sealed, checkpoint) and _has_nonce(part, sealed):
            last = EarlierPacking(part, journal, sealed, checkpoint.durable_bytes)
            journal_end = position
    if last:
        journal.read_until(journal_end)
    return last


def _has_nonce(part: PartFile, sealed: SealedPart) -> bool:
    end = sealed.payload_start
    with staging_errors(part.path):
        return read_at(part.descriptor, end - len(sealed.nonce), end) == sealed.nonce


def _is_consistent(sealed: SealedPart, checkpoint: Checkpoint) -> bool:
    size_bytes = checkpoint.durable_bytes
    sealed_segments = sealed_bytes(size_bytes) // age.SEALED_SEGMENT_BYTES
    return len(sealed.open_segment) == size_bytes - sealed_segments * age.SEGMENT_BYTES
