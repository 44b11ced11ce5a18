"""Compares headers: objects whose bytes are located and were written again, with what the archive has of them.

A HEAD for each such object, and the manifest of each chunk that has its bytes. Where they are equal, an exception says that the
located object stands for what S3 has now; where they differ, the object is archived again; where they cannot be compared, it is
skipped for the time being.

Source: "Which objects are to be archived" in docs/design.md; docs/decisions/0014-what-is-current.md.
"""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from caf_pipeline.caf.index import FOOTER_SIZE_BYTES, parse_footer
from caf_pipeline.context import Workplace
from caf_pipeline.errors import (
    ArchiveError,
    IntegrityError,
    NoChainAnswer,
    ObjectReadFailed,
    ObjectUnavailable,
    StagingError,
    StoreError,
)
from caf_pipeline.inventory.manifest import IDENTITY_COLUMNS, open_manifest, row_identity
from caf_pipeline.inventory.objects import CurrentException, S3Object, SkipReason
from caf_pipeline.inventory.snapshot import read_objects
from caf_pipeline.ledger.records import Chunk, InventoryRecord, LocatedVersion, Skip
from caf_pipeline.packing.chunk_reader import ChunkFile, StagedSource
from caf_pipeline.packing.staging import manifest_is_right, staged_path
from caf_pipeline.retrieval.remote_chunk import AgreedSource, fetch_manifest
from caf_pipeline.source.protocol import ObjectHeaders
from caf_pipeline.steps.chunk_steps import posting_of
from caf_pipeline.store.protocol import Lease

OBJECTS_AT_ONCE: Final = 10_000
"""Objects that stand in memory, with the headers that the archive has of each: some 20 MB."""

MANIFESTS_KEPT: Final = 4
"""Manifests that are kept on the disk: objects come in the order of keys, and so do most chunks."""

COMPARED: Final = ("content_type", "content_encoding", "content_language", "content_disposition", "cache_control", "expires")
"""The headers that an object has to have in common with what is archived, beside its user metadata.

Until 0.3.0 Expires was not kept: an object that has one, is archived without it and was written again is archived once more."""

_Headers = tuple[Mapping[str, str], Mapping[str, str]]  # headers, user metadata


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
    manifests = _Manifests(work, folder)
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


def _same(archived: Sequence[tuple[str, _Headers | Exception]], said: ObjectHeaders) -> tuple[str | None, Exception | None]:
    """Return the identity whose headers are these; else None, and why one of them could not be compared, if so."""
    now = {name: getattr(said, name) for name in COMPARED}, dict(said.user_metadata)
    unread: Exception | None = None
    for identity, headers in archived:
        if isinstance(headers, Exception):
            unread = headers
        elif headers == now:
            return identity, None
    return None, unread


# --- what the archive has ------------------------------------------------------------------------------------------


def _archived(
    work: Workplace, manifests: "_Manifests", objects: Sequence[S3Object]
) -> Mapping[bytes, Sequence[tuple[str, _Headers | Exception]]]:
    """Return by key each located identity of the same bytes, the newest first, with its headers or why they are not known."""
    wanted = {obj.key.decode(): (obj.etag, obj.size_bytes) for obj in objects}
    by_chunk: dict[str, list[LocatedVersion]] = defaultdict(list)
    for version in work.ledger.located_versions(work.source, list(wanted)):
        if wanted[version.key] == (version.etag, version.size_bytes):
            by_chunk[version.chunk].append(version)
    found: dict[bytes, list[tuple[str, _Headers | Exception]]] = defaultdict(list)
    for chunk, versions in sorted(by_chunk.items()):
        headers = manifests.headers(chunk, {(version.key, version.object_version) for version in versions})
        for version in versions:
            known = headers if isinstance(headers, Exception) else headers.get((version.key, version.object_version))
            missing = IntegrityError(f"the manifest of chunk {chunk} does not have the object")
            found[version.key.encode()].append((version.object_version, missing if known is None else known))
    return defaultdict(list, {key: sorted(known, key=lambda one: one[0], reverse=True) for key, known in found.items()})


class _Manifests:
    """Manifests of located chunks, downloaded to a folder when they are needed; only the manifest that was sealed is accepted."""

    def __init__(self, work: Workplace, folder: Path) -> None:
        self._work = work
        self._folder = folder
        self._kept: dict[str, Path] = {}

    def headers(self, name: str, wanted: set[tuple[str, str]]) -> Mapping[tuple[str, str], _Headers] | Exception:
        """Return the headers of these (key, object version) of a chunk, or why its manifest cannot be had."""
        try:
            path = self._kept.get(name) or self._fetch(name)
            columns = ("key", *IDENTITY_COLUMNS, *COMPARED, "user_metadata")
            rows = ((row["key"], row_identity(row), row) for row in open_manifest(path).rows(columns))
            return {(key, version): _headers(row) for key, version, row in rows if (key, version) in wanted}
        except (NoChainAnswer, StagingError):
            raise
        except (StoreError, ArchiveError, IntegrityError) as error:
            return error

    def _fetch(self, name: str) -> Path:
        chunk, path = self._work.ledger.chunk(name), self._folder / f"{name}.manifest"
        while len(self._kept) >= MANIFESTS_KEPT:
            self._kept.pop(next(iter(self._kept))).unlink(missing_ok=True)
        try:
            self._write(chunk, path)
        except OSError as error:
            raise StagingError(f"{path} cannot be written: {error.strerror}", hint="make room on that disk") from error
        self._kept[name] = path
        return path

    def _write(self, chunk: Chunk, path: Path) -> None:
        if staged_path(self._work, chunk.name).exists() and manifest_is_right(self._work, chunk):
            source = StagedSource(staged_path(self._work, chunk.name))
            member = ChunkFile(source, chunk.name).manifest_member()
            path.write_bytes(source.read(member.start_byte, member.end_byte))
        elif chunk.tail_start is not None:
            self._write_tail(chunk, chunk.tail_start, path)
        else:
            self._write_agreed(chunk, path)

    def _write_tail(self, chunk: Chunk, start_byte: int, path: Path) -> None:
        """Fetch manifest, index and footer from the first provider that gives them as they were sealed; keep the manifest."""
        posting, said = posting_of(chunk), list[str]()
        for provider in self._work.store.holders(posting):
            digest = hashlib.sha256()
            try:
                with path.open("wb") as file:
                    for piece in self._work.store.read(posting, start_byte, chunk.stored_size_bytes, provider=provider):
                        digest.update(piece)
                        file.write(piece)
            except NoChainAnswer:
                raise
            except (StoreError, IntegrityError) as error:
                said.append(f"{provider}: {error}")
                continue
            if digest.digest() == chunk.tail_sha256:
                _cut_to_manifest(path)
                return
            said.append(f"{provider}: it gives another manifest than was sealed")
        raise IntegrityError(f"no provider gives the manifest of chunk {chunk.name}: {'; '.join(said) or 'none is listed'}")

    def _write_agreed(self, chunk: Chunk, path: Path) -> None:
        """Fetch the manifest of a chunk whose seal did not keep its hash: as many copies as are required have to agree on it."""
        posting = posting_of(chunk)
        source = AgreedSource(self._work.store, posting, [copy.provider for copy in self._work.store.copies(posting)])
        fetch_manifest(source, ChunkFile(source, chunk.name).manifest_member(), path)
        if len(source.providers) < self._work.store.required_copies:
            given = f"{len(source.providers)} of {self._work.store.required_copies}"
            raise IntegrityError(f"only {given} copies of chunk {chunk.name} give its manifest")


def _cut_to_manifest(path: Path) -> None:
    """Cut a file of manifest, index and footer behind the manifest."""
    with path.open("r+b") as file:
        size_bytes = file.seek(-FOOTER_SIZE_BYTES, 2)
        file.truncate(size_bytes - parse_footer(file.read(FOOTER_SIZE_BYTES)))


def _headers(row: Mapping[str, Any]) -> _Headers:
    return {name: row[name] or "" for name in COMPARED}, dict(row["user_metadata"] or ())
