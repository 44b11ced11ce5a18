"""Inspectors read facts from packed members, besides checksums, for the manifest."""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from typing_extensions import Buffer

from caf_pipeline.errors import ArchiveError
from caf_pipeline.formats.clps import MAGIC_BYTES, begins_as_archive, read_times
from caf_pipeline.inventory.manifest import LOG_BYTES, LogTimes, ManifestWriter
from caf_pipeline.inventory.plan import PlannedObject

HEAD_BYTES: Final = MAGIC_BYTES
"""Bytes at a member's start that an inspector sees before it accepts the member."""

Read = Callable[[int, int], bytes]
"""Returns bytes `[start, end)` of the staged chunk."""


class MemberInspector(Protocol):
    """Adds facts about a staged member to the manifest.

    Attributes:
        manifest_bytes: upper bound of the manifest bytes that one member adds.
    """

    manifest_bytes: int

    def accepts(self, head: Buffer) -> bool:
        """Return whether to inspect a member that begins with these bytes."""
        ...

    def inspect(self, manifest: ManifestWriter, start_byte: int, end_byte: int, read: Read) -> None:
        """Inspect a staged member. A damaged member is not an error: its bytes are archived."""
        ...


class ClpTimes:
    """The first and last record time of a clp-s archive."""

    manifest_bytes = LOG_BYTES

    def accepts(self, head: Buffer) -> bool:
        """See `MemberInspector`."""
        return begins_as_archive(head)

    def inspect(self, manifest: ManifestWriter, start_byte: int, end_byte: int, read: Read) -> None:
        """See `MemberInspector`."""
        try:
            times = read_times(
                end_byte - start_byte, lambda begin, end: read(start_byte + begin, start_byte + end)
            )
        except ArchiveError:
            times = None
        manifest.add_log(LogTimes(start_byte, *(times or (None, None))))


INSPECTORS: Final[Sequence[MemberInspector]] = (ClpTimes(),)


def inspectors_of(planned: PlannedObject, head: Buffer) -> Sequence[MemberInspector]:
    """Return the inspectors that accept a member with this beginning; none for a split object."""
    return [
        inspector for inspector in INSPECTORS if planned.part is None and inspector.accepts(head)
    ]
