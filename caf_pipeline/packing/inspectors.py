"""What packing reads in members for the manifest, besides their checksums."""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from typing_extensions import Buffer

from caf_pipeline.errors import ArchiveError
from caf_pipeline.formats.clps import MAGIC_BYTES, begins_as_archive, read_times
from caf_pipeline.inventory.manifest import LOG_BYTES, LogTimes, ManifestWriter
from caf_pipeline.inventory.plan import PlannedObject

HEAD_BYTES: Final = MAGIC_BYTES
"""The first bytes of a staged member that inspectors get.

It is the largest number that any of them needs.
"""

Read = Callable[[int, int], bytes]
"""Returns bytes of the staged chunk, from a first position to an exclusive second one."""


class MemberInspector(Protocol):
    """Adds to the manifest what it reads in a staged member.

    Attributes:
        manifest_bytes: upper bound of what one member adds to the manifest.
    """

    manifest_bytes: int

    def accepts(self, head: Buffer) -> bool:
        """Return whether to inspect a member that begins with these bytes."""
        ...

    def inspect(self, manifest: ManifestWriter, start_byte: int, end_byte: int, read: Read) -> None:
        """Inspect a staged member. A damaged one is no error: it is archived like any object."""
        ...


class ClpTimes:
    """The first and the last time of the records in a clp-s archive."""

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
    """Return the inspectors that accept a member that begins with these bytes.

    None accepts a part of a larger object.
    """
    return [
        inspector for inspector in INSPECTORS if planned.part is None and inspector.accepts(head)
    ]
