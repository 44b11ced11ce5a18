"""The keys that a chunk from an unknown post would change."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Final

from caf_pipeline.inventory.manifest import open_manifest, row_identity
from caf_pipeline.maintenance.rebuild import FileFinding
from caf_pipeline.run_context import RunContext

_COLUMNS: Final = (
    "key", "version_id", "etag", "size_bytes", "last_modified", "rewritten_at", "skip_reason",
)  # fmt: skip
_KEYS_ASKED: Final = 1000


class Change(StrEnum):
    """How a key may change. Content that this ledger packed stays what `caf get` returns."""

    NEW = "new"  # nothing of the key is located
    CURRENT = "current"  # it takes the place of content of another unknown post
    VERSION = "version"  # one more version


@dataclass(frozen=True, slots=True)
class KeyChange:
    """A change of a key."""

    key: str
    object_version: str
    change: Change


def key_changes(context: RunContext, finding: FileFinding) -> Iterator[KeyChange]:
    """Yield the changes in the order of keys, while the finding has its `spool`."""
    if finding.spool is None:
        return
    rows = (
        row for row in open_manifest(finding.spool).rows(_COLUMNS) if row["skip_reason"] is None
    )
    while page := list(islice(rows, _KEYS_ASKED)):
        versions_of = context.ledger.lookup.locate_versions(
            context.source, {row["key"] for row in page}
        )
        for row in page:
            version, located = row_identity(row), versions_of.get(row["key"], ())
            if any(location.row.object_version == version for location in located):
                continue
            change = Change.NEW
            if located:
                is_latest = all(
                    location.from_unknown_post
                    and location.row.last_modified <= row["last_modified"]
                    for location in located
                )
                change = Change.CURRENT if is_latest else Change.VERSION
            yield KeyChange(row["key"], version, change)
