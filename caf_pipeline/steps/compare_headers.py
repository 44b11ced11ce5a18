"""Compares headers: objects whose bytes are located and were written again, with what the archive has of them.

A HEAD for each such object, and the manifest of each chunk that has its bytes. Where they are equal, an exception says that the
located object stands for what S3 has now; where they differ, the object is archived again; where they cannot be compared, it is
skipped for the time being.

Source: "Which objects are to be archived" in docs/design.md; docs/decisions/0014-what-is-current.md.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final

from caf_pipeline.context import Workplace
from caf_pipeline.errors import IntegrityError, ObjectReadFailed, ObjectUnavailable
from caf_pipeline.inventory.objects import CurrentException, S3Object, SkipReason
from caf_pipeline.inventory.snapshot import read_objects
from caf_pipeline.ledger.records import Chunk, InventoryRecord, LocatedVersion, Skip
from caf_pipeline.packing.staging import manifest_is_right, staged_path
from caf_pipeline.retrieval.manifests import Manifests
from caf_pipeline.source.protocol import ObjectHeaders
from caf_pipeline.store.protocol import Lease

OBJECTS_AT_ONCE: Final = 10_000
"""Objects that stand in memory, with the headers that the archive has of each: some 20 MB."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of objects that were written again. `requests` are HEADs."""

    requests: int = 0
    equal: int = 0
    different: int = 0
    not_compared: int = 0


def compare_headers(work: Workplace, lease: Lease, inventory: InventoryRecord, to_compare: Path, folder: Path) -> Comparison:
    """Compare the objects of a file, and record the equal ones as exceptions, and those that could not be compared as skipped.

    Args:
        work: the source.
        lease: on its plan.
        inventory: that lists the objects.
        to_compare: of `inventory.SNAPSHOT_SCHEMA`, in the order of keys.
        folder: takes some manifests.

    Raises:
        SourceError: S3 is out of reach. StoreUnreachable: the chain is. LeaseLost. StagingError: no room.
    """
    manifests = Manifests(work.ledger, work.store, folder, staged=partial(_staged, work))
    counts = dict.fromkeys(("requests", "equal", "different", "not_compared"), 0)
    objects = read_objects(to_compare)
    with ThreadPoolExecutor(work.settings.packing.fetch_threads, "compare") as pool:
        while some := list(islice(objects, OBJECTS_AT_ONCE)):
            work.wait_while_paused(lease.check)
            archived = _archived(work, manifests, some)
            equal, skips = list[CurrentException](), list[Skip]()
            for obj, said in zip(some, pool.map(partial(_read_headers, work), some), strict=True):
                if isinstance(said, ObjectHeaders):
                    same, unread = _same(archived[obj.key], said)
                else:
                    same, unread = None, said
                if same is not None:
                    equal.append(_stands_for(inventory, obj, same))
                elif unread is not None:
                    skips.append(_skip(obj, unread))
            work.ledger.record_exceptions(inventory, equal)
            work.ledger.record_skips(work.source, skips)
            counts["requests"] += len(some)
            counts["equal"] += len(equal)
            counts["not_compared"] += len(skips)
            counts["different"] += len(some) - len(equal) - len(skips)
    return Comparison(**counts)


def _read_headers(work: Workplace, obj: S3Object) -> ObjectHeaders | ObjectUnavailable | ObjectReadFailed:
    try:
        return work.objects.read_headers(obj)
    except (ObjectUnavailable, ObjectReadFailed) as error:
        return error


def _stands_for(inventory: InventoryRecord, obj: S3Object, identity: str) -> CurrentException:
    """Return the exception that makes a located identity current for the object as it was listed."""
    return CurrentException(obj.key.decode(), max(inventory.taken_at, obj.last_modified), identity, obj.last_modified)


def _skip(obj: S3Object, why: Exception) -> Skip:
    reason = SkipReason(why.reason) if isinstance(why, ObjectUnavailable) else SkipReason.NOT_COMPARED
    return Skip.of(obj, reason, str(why))


def _same(archived: Sequence[tuple[str, ObjectHeaders | Exception]], said: ObjectHeaders) -> tuple[str | None, Exception | None]:
    """Return the identity whose headers are these; else None, and why one of them could not be compared, if so."""
    unread: Exception | None = None
    for identity, headers in archived:
        if isinstance(headers, Exception):
            unread = headers
        elif headers == said:
            return identity, None
    return None, unread


# --- what the archive has ------------------------------------------------------------------------------------------


def _archived(
    work: Workplace, manifests: Manifests, objects: Sequence[S3Object]
) -> Mapping[bytes, Sequence[tuple[str, ObjectHeaders | Exception]]]:
    """Return by key each located identity of the same bytes, the newest first, with its headers or why they are not known."""
    wanted = {obj.key.decode(): (obj.etag, obj.size_bytes) for obj in objects}
    by_chunk: dict[str, list[LocatedVersion]] = defaultdict(list)
    for version in work.ledger.located_versions(work.source, list(wanted)):
        if wanted[version.key] == (version.etag, version.size_bytes):
            by_chunk[version.chunk].append(version)
    found: dict[bytes, list[tuple[str, ObjectHeaders | Exception]]] = defaultdict(list)
    for chunk, versions in sorted(by_chunk.items()):
        headers = manifests.headers(chunk, {(version.key, version.object_version) for version in versions})
        if headers is None:  # adopted, so that its headers are not known: what was written again is archived with its own
            continue
        for version in versions:
            known = headers if isinstance(headers, Exception) else headers.get((version.key, version.object_version))
            missing = IntegrityError(f"the manifest of chunk {chunk} does not have the object")
            found[version.key.encode()].append((version.object_version, missing if known is None else known))
    return defaultdict(list, {key: sorted(known, key=lambda one: one[0], reverse=True) for key, known in found.items()})


def _staged(work: Workplace, chunk: Chunk) -> Path | None:
    """Return the staged chunk, where it is there and its manifest is right."""
    path = staged_path(work, chunk.name)
    return path if path.exists() and manifest_is_right(work, chunk) else None
