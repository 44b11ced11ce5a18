"""Samples: taken when a chunk is sealed, then compared with each stored copy.

Source: promise 1 in docs/explanation/design.md.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from caf_pipeline.caf.archive import RangeSource
from caf_pipeline.errors import CafError, IntegrityError, NotProven, PrivateAddress, StoreError
from caf_pipeline.reading.chunk_reader import StagedSource
from caf_pipeline.records import Chunk, Copy, PostRecord, Sample
from caf_pipeline.store.protocol import ChunkReader
from caf_pipeline.system.quantities import counted

SAMPLE_COUNT: Final = 16
"""A chunk's first and last bytes and 14 others."""

SAMPLE_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class CopyFinding:
    """The result of reading samples from one copy.

    Attributes:
        fault: what is wrong with its bytes, or "".
        unanswered: why the provider could not be asked, or "".
        private: whether that is because the settings forbid its address.
        whole: whether the whole copy was read.
        contradiction: how the ledger contradicts bytes that have the right Merkle root, or "".
    """

    copy: Copy
    fault: str = ""
    unanswered: str = ""
    private: bool = False
    samples: int = 0
    whole: bool = False
    contradiction: str = ""

    @property
    def good(self) -> bool:
        return not self.fault and not self.unanswered and not self.contradiction


class SampleCheck:
    """Compares samples, which may overlap, with a file that is read from its first byte on."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples
        self._digests = [hashlib.sha256() for _ in samples]
        self._position = 0

    def update(self, piece: bytes) -> None:
        view = memoryview(piece)
        for sample, digest in zip(self._samples, self._digests, strict=True):
            start = max(sample.offset - self._position, 0)
            digest.update(view[start : max(sample.offset + sample.length - self._position, 0)])
        self._position += len(piece)

    def matches(self) -> bool:
        return all(
            digest.digest() == sample.sha256
            for sample, digest in zip(self._samples, self._digests, strict=True)
        )


def samples_of(source: RangeSource, size_bytes: int, merkle_root: bytes) -> list[Sample]:
    """Read samples at positions that depend only on root and size."""
    length = min(SAMPLE_BYTES, size_bytes)
    offsets = {0, size_bytes - length}
    for number in range(SAMPLE_COUNT - len(offsets)):
        seed = hashlib.sha256(merkle_root + number.to_bytes(4, "big")).digest()
        offsets.add(int.from_bytes(seed[:8], "big") % (size_bytes - length + 1))
    return [
        Sample(offset, length, hashlib.sha256(source.read(offset, offset + length)).digest())
        for offset in sorted(offsets)
    ]


def staged_matches(path: Path, samples: Sequence[Sample]) -> bool:
    """Return whether a file has these samples; raises FileNotFoundError."""
    source = StagedSource(path)
    return all(
        hashlib.sha256(source.read(sample.offset, sample.offset + sample.length)).digest()
        == sample.sha256
        for sample in samples
    )


def check_copy(
    store: ChunkReader, posting: PostRecord, copy: Copy, samples: Sequence[Sample]
) -> CopyFinding:
    """Compare samples up to the first that differs."""
    for number, sample in enumerate(samples):
        end = sample.offset + sample.length
        try:
            digest = hashlib.sha256()
            for piece in store.read(posting, sample.offset, end, provider=copy.provider):
                digest.update(piece)
        except (StoreError, IntegrityError) as error:
            if error.permanent:
                return CopyFinding(copy, fault=str(error), samples=number)
            if lost := lost_range(store, posting, copy.provider, sample.offset, end):
                return CopyFinding(copy, fault=lost, samples=number)
            private = isinstance(error, PrivateAddress)
            return CopyFinding(copy, unanswered=str(error), private=private, samples=number)
        if digest.digest() != sample.sha256:
            return CopyFinding(
                copy, fault=f"differs at bytes {sample.offset} to {end}", samples=number + 1
            )
    return CopyFinding(copy, samples=len(samples))


def lost_range(
    store: ChunkReader, posting: PostRecord, provider: str, start_byte: int, end_byte: int
) -> str:
    """Explain that a provider has lost a range that it failed to send, else ""."""
    if not store.has_lost(posting, start_byte, end_byte, provider=provider):
        return ""
    return f"it answers other requests, but sends nothing of bytes {start_byte} to {end_byte}"


def described(findings: Sequence[CopyFinding]) -> str:
    """Summarize findings in a sentence."""
    right = [finding.copy.provider for finding in findings if finding.good]
    parts = [f"right at {', '.join(right)}"] if right else []
    parts += [f"{finding.copy.provider}: {finding.fault}" for finding in findings if finding.fault]
    parts += [
        f"{finding.copy.provider} does not answer: {finding.unanswered}"
        for finding in findings
        if finding.unanswered
    ]
    return "; ".join(parts) or "no copy is listed"


def too_few_copies(chunk: Chunk, findings: Sequence[CopyFinding], required: int) -> CafError:
    """Return the error for too few correct copies."""
    right = sum(1 for finding in findings if finding.good)
    copies = f"{right} of {counted(required, 'copy', 'copies')}"
    message = (
        f"chunk {chunk.name} has only {copies} that are listed and correct ({described(findings)})"
    )
    again = "run the partition or 'caf repair' again"
    if any(finding.fault for finding in findings):
        return IntegrityError(
            message, hint=f"do not use the copies that differ; {again} to upload the chunk again"
        )
    return NotProven(message, hint=f"{again} to upload the chunk to the providers that lack it")
