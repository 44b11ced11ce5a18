"""Reads the times of packed clp-s log archives for the manifest."""

from collections.abc import Callable
from typing import Final

from typing_extensions import Buffer

from caf_pipeline.errors import ArchiveError
from caf_pipeline.formats.clps import MAGIC_BYTES, begins_as_archive, read_times
from caf_pipeline.inventory.manifest import LogTimes, ManifestWriter
from caf_pipeline.inventory.plan import PlannedObject

HEAD_BYTES: Final = MAGIC_BYTES
"""Bytes at a member's start that `is_log` needs."""

Read = Callable[[int, int], bytes]
"""Returns bytes `[start, end)` of the staged chunk."""


def is_log(planned: PlannedObject, head: Buffer) -> bool:
    """Return whether an object is a log archive. Parts are none."""
    return planned.part is None and begins_as_archive(head)


def add_log_times(manifest: ManifestWriter, start_byte: int, end_byte: int, read: Read) -> None:
    """Add a staged log to the manifest, with its times if undamaged."""
    try:
        times = read_times(
            end_byte - start_byte, lambda begin, end: read(start_byte + begin, start_byte + end)
        )
    except ArchiveError:
        times = None
    manifest.add_log(LogTimes(start_byte, *(times or (None, None))))
