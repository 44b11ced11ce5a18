"""Manifests of located chunks, fetched when they are needed, for the headers of their objects: one download a chunk.

Source: "A chunk" in docs/format.md.
"""

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from caf_pipeline.caf.index import FOOTER_SIZE_BYTES, parse_footer
from caf_pipeline.caf.merkle import MerkleTree
from caf_pipeline.errors import ArchiveError, CafError, IntegrityError, NoChainAnswer, StagingError, StoreError, StoreUnreachable
from caf_pipeline.inventory.manifest import IDENTITY_COLUMNS, open_manifest, row_identity
from caf_pipeline.ledger.protocol import LocationLookups
from caf_pipeline.ledger.records import Chunk, posting_of
from caf_pipeline.packing.chunk_reader import ChunkFile, RemoteSource, StagedSource
from caf_pipeline.packing.staging import proof_type_of
from caf_pipeline.retrieval.holders import REPAIR, not_given
from caf_pipeline.retrieval.remote_chunk import AgreedSource, CopiesDiffer, fetch_manifest
from caf_pipeline.source.protocol import ObjectHeaders
from caf_pipeline.store.protocol import ChunkReader
from caf_pipeline.system.folder_lock import alone_in, writing_into
from caf_pipeline.system.quantities import show_size
from caf_pipeline.waits import Waits

MANIFESTS_BYTES: Final = 4 << 30
"""Of manifests that are kept on the disk, at some 100 bytes an object: those of 40 million objects. Objects come in the order of
keys, in which each plan of a source goes through its chunks again."""

HEADERS: Final = ("content_type", "content_encoding", "content_language", "content_disposition", "cache_control", "expires")
"""What a manifest keeps of an object's headers, beside its user metadata."""


FOLDER: Final = "caf-manifests."
"""Begins the names of folders for manifests."""

_SUFFIX: Final = ".manifest"


@contextlib.contextmanager
def manifests_folder() -> Iterator[Path]:
    """Give a new folder for manifests while the context lasts, and remove those of processes that were killed.

    Raises:
        StagingError: there can be none.
    """
    with contextlib.ExitStack() as stack:
        try:
            for left in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
                _remove_left(left)
            # Until it is locked, another process takes a new folder for one that was left, and removes it.
            while not _take(folder := Path(tempfile.mkdtemp(prefix=FOLDER)), stack):
                pass
        except OSError as error:
            raise StagingError(
                f"there is no folder for temporary files: {error.strerror}", hint="set TMPDIR to a folder that may be written"
            ) from error
        stack.callback(_remove, folder)
        yield folder


def _take(folder: Path, stack: contextlib.ExitStack) -> bool:
    """Keep others from removing the folder until the stack is closed; False where one did so before."""
    try:
        stack.enter_context(writing_into(folder))
    except FileNotFoundError:
        return False
    return folder.exists()


def _remove_left(folder: Path) -> None:
    """Remove a folder that no process has; what is not of this user is left, and so is what nothing here made."""
    with contextlib.suppress(OSError):
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            with alone_in(folder) as alone:
                if alone:
                    _remove(folder)


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for file in folder.glob(f"*{_SUFFIX}"):
            file.unlink(missing_ok=True)
        folder.rmdir()


class Manifests:
    """Manifests of located chunks, downloaded to a folder when they are needed; only the manifest that was sealed is accepted."""

    def __init__(
        self,
        ledger: LocationLookups,
        store: ChunkReader,
        folder: Path,
        *,
        staged: Callable[[Chunk], Path | None] = lambda chunk: None,
        waits: Waits | None = None,
    ) -> None:
        """Fetch nothing yet.

        Args:
            ledger: has the chunks.
            store: keeps them.
            folder: takes the manifests.
            staged: returns the file of a chunk that is still here, where its manifest is right.
            waits: where it is said while a copy is read whole, since nothing less proves its manifest; None: none is.
        """
        self._ledger = ledger
        self._store = store
        self._folder = folder
        self._staged = staged
        self._waits = waits
        self._kept: dict[str, tuple[Path, int]] = {}  # with their sizes in bytes; the one asked for last comes last
        self._kept_bytes = 0

    def headers(self, name: str, wanted: set[tuple[str, str]]) -> Mapping[tuple[str, str], ObjectHeaders] | CafError | None:
        """Return the headers of these (key, object version) of a chunk, or why its manifest cannot be had.

        None where the chunk was adopted: it has no manifest. Only the rows between the first and the last of the keys are read.

        Raises:
            NoChainAnswer. StagingError: the folder takes no more.
        """
        try:
            if name in self._kept:
                self._kept[name] = self._kept.pop(name)
            else:
                chunk = self._ledger.chunk(name)
                if chunk.adopted:
                    return None
                self._fetch(chunk)
            path, _ = self._kept[name]
            columns = ("key", *IDENTITY_COLUMNS, *HEADERS, "user_metadata")
            keys = [key for key, _ in wanted]
            rows = open_manifest(path).rows(columns, between=(min(keys), max(keys)))
            named = (((row["key"], row_identity(row)), row) for row in rows)
            return {one: _headers(row) for one, row in named if one in wanted}
        except (NoChainAnswer, StagingError):
            raise
        except (StoreError, IntegrityError) as error:
            return error
        except ArchiveError as error:
            return IntegrityError(f"the manifest of chunk {name} is not what was archived: {error}", hint=REPAIR)

    def _fetch(self, chunk: Chunk) -> None:
        """Fetch a manifest, and remove those that were not asked for longest, where there are too many bytes."""
        path = self._folder / f"{chunk.name}{_SUFFIX}"
        try:
            self._write(chunk, path)
            self._kept[chunk.name] = path, path.stat().st_size
            self._kept_bytes += path.stat().st_size
            while self._kept_bytes > MANIFESTS_BYTES and len(self._kept) > 1:
                oldest, size_bytes = self._kept.pop(next(iter(self._kept)))
                oldest.unlink(missing_ok=True)
                self._kept_bytes -= size_bytes
        except OSError as error:
            raise StagingError(
                f"{path} cannot be written: {error.strerror}",
                hint="see that its folder is there and may be written, and that its disk has room",
            ) from error

    def _write(self, chunk: Chunk, path: Path) -> None:
        if staged := self._staged(chunk):
            _write_from(staged, chunk, path)
        elif chunk.tail_start is not None:
            self._write_tail(chunk, chunk.tail_start, path)
        else:
            self._write_agreed(chunk, path)

    def _write_tail(self, chunk: Chunk, start_byte: int, path: Path) -> None:
        """Fetch manifest, index and footer from the first provider that gives them as they were sealed; keep the manifest."""
        posting, failed = posting_of(chunk), dict[str, CafError]()
        for provider in self._store.holders(posting):
            digest = hashlib.sha256()
            try:
                with path.open("wb") as file:
                    for piece in self._store.read(posting, start_byte, chunk.stored_size_bytes, provider=provider):
                        digest.update(piece)
                        file.write(piece)
            except NoChainAnswer:
                raise
            except (StoreError, IntegrityError) as error:
                failed[provider] = error
                continue
            if digest.digest() == chunk.tail_sha256:
                _cut_to_manifest(path)
                return
            failed[provider] = IntegrityError("it gives another manifest than was sealed")
        raise not_given(f"the manifest of chunk {chunk.name}", failed)

    def _write_agreed(self, chunk: Chunk, path: Path) -> None:
        """Fetch the manifest of a chunk whose seal did not keep its hash: as many copies as are required have to agree on it.

        Where they do not, and no other try is of use, one is read whole, if that may be: its Merkle root proves the manifest.
        """
        posting = posting_of(chunk)
        source = AgreedSource(self._store, posting, [copy.provider for copy in self._store.copies(posting)])
        try:
            fetch_manifest(source, ChunkFile(source, chunk.name).manifest_member(), path)
            if len(source.providers) < self._store.required_copies:
                given = f"{len(source.providers)} of {self._store.required_copies}"
                raise IntegrityError(f"only {given} copies of chunk {chunk.name} give its manifest", hint=REPAIR)
        except (ArchiveError, IntegrityError) as error:
            if self._waits and (isinstance(error, CopiesDiffer) or not source.may_say_more):
                self._write_proven(chunk, path, self._waits)
                return
            if not source.may_say_more:
                raise
            silent = "; ".join(f"{provider}: {reason}" for provider, reason in source.silent.items())
            raise StoreUnreachable(f"{error}; others do not answer ({silent})", hint="try again later") from error

    def _write_proven(self, chunk: Chunk, path: Path, waits: Waits) -> None:
        """Read copies whole until one has the chunk's Merkle root; keep its manifest."""
        posting, failed = posting_of(chunk), dict[str, CafError]()
        for provider in self._store.holders(posting):
            try:
                start_byte = ChunkFile(RemoteSource(self._store, posting, provider), chunk.name).manifest_member().start_byte
                tree, position = MerkleTree(proof_type_of(chunk)), 0
                what = f"all {show_size(chunk.stored_size_bytes)} of chunk {chunk.name} from {provider}"
                why = "its last byte ends it: the copies do not agree on the manifest, and only its Merkle root proves it"
                with waits.waiting(what, ends_by=why), path.open("wb") as file:
                    file.seek(start_byte)  # what comes before takes no room
                    for piece in self._store.read(posting, 0, chunk.stored_size_bytes, provider=provider):
                        tree.update(piece)
                        file.write(piece[max(start_byte - position, 0) :])
                        position += len(piece)
                if tree.root() != posting.merkle_root:
                    raise IntegrityError("it gives other bytes than its Merkle root says")
                # By the index that was read with all the rest: the one that was asked for alone is proven by nothing.
                if _write_from(path, chunk, path) < start_byte:
                    raise IntegrityError("its index alone is another one than that of its whole")
            except NoChainAnswer:
                raise
            except (StoreError, IntegrityError) as error:
                failed[provider] = error
            except ArchiveError as error:
                failed[provider] = IntegrityError(str(error))
            else:
                return
        raise not_given(f"the manifest of chunk {chunk.name}", failed)


def _write_from(file: Path, chunk: Chunk, path: Path) -> int:
    """Write the manifest of a chunk's file; return at which byte of it that begins."""
    source = StagedSource(file)
    member = ChunkFile(source, chunk.name).manifest_member()
    path.write_bytes(source.read(member.start_byte, member.end_byte))
    return member.start_byte


def _cut_to_manifest(path: Path) -> None:
    """Cut a file of manifest, index and footer behind the manifest."""
    with path.open("r+b") as file:
        size_bytes = file.seek(-FOOTER_SIZE_BYTES, 2)
        file.truncate(size_bytes - parse_footer(file.read(FOOTER_SIZE_BYTES)))


def _headers(row: Mapping[str, Any]) -> ObjectHeaders:
    return ObjectHeaders(**{name: row[name] or "" for name in HEADERS}, user_metadata=dict(row["user_metadata"] or ()))
