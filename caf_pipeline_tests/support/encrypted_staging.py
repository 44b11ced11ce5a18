"""Private chunks in staging: their settings, copies of their files, and what is sealed in these."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from caf_pipeline.errors import CafError
from caf_pipeline.formats import age
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline_tests.support.steady_source import SteadySource, a_steady_source

IDENTITY = age.X25519Identity(bytes(range(32)))
WORKER_KEY = "5e" * 32
TARGET = "8MiB"


def private_settings(worker_key: str = WORKER_KEY) -> dict:
    """Return the settings of `a_run_context` for a machine with public keys and a worker key."""
    return {
        "public": False,
        "target": TARGET,
        "encryption": {"recipients": [str(IDENTITY.recipient)]},
        "worker_key": worker_key,
    }


def packing_secrets(ledger: Ledger) -> list[bytes]:
    """Return the secrets of packings that the ledger has now."""
    with ledger.database.connect() as connection:
        rows = connection.execute("SELECT secret FROM packing_secrets").fetchall()
    return [secret for (secret,) in rows]


def a_changing_source() -> SteadySource:
    """Return a source whose large object changes after five of its parts were read."""
    source = a_steady_source()
    source.bodies["key-030"] = b"".join(source.bodies[f"key-{number:03d}"] for number in range(9))
    source.unavailable = {"key-030": (SkipReason.CHANGED, 5 * 65536)}
    return source


@dataclass(frozen=True)
class Segment:
    """A sealed segment; `place` is the file key and both nonces."""

    place: tuple[bytes, bytes, int, bool]
    ciphertext: bytes


class StagingCopies:
    """Copies of everything that a staging folder ever had, as snapshots of a disk."""

    def __init__(self, staging: Path, folder: Path) -> None:
        self._staging = staging
        self._folder = folder
        self._count = 0
        folder.mkdir()

    def take(self) -> None:
        self._count += 1
        shutil.copytree(self._staging, self._folder / str(self._count))

    def files(self) -> list[Path]:
        return [path for path in self._folder.rglob("*") if path.is_file()]

    def segments(self) -> Iterator[Segment]:
        for path in self.files():
            yield from sealed_segments(path)


def sealed_segments(path: Path) -> Iterator[Segment]:
    """Yield the authentic segments of a file that begins like an age file to IDENTITY."""
    data = path.read_bytes()
    try:
        header = age.parse_header(data)
        file_key = age.open_header(header, [IDENTITY])
    except CafError:
        return
    start = len(header.raw) + age.NONCE_BYTES
    nonce = data[len(header.raw) : start]
    payload = age.Payload(file_key, nonce)
    for number, at in enumerate(range(start, len(data), age.SEALED_SEGMENT_BYTES)):
        sealed = data[at : at + age.SEALED_SEGMENT_BYTES]
        for is_last in (False, True):
            try:
                payload.open(number, sealed, is_end=is_last)
            except CafError:
                continue
            yield Segment((file_key, nonce, number, is_last), sealed)
