"""A ChunkStore in a folder: for trials, tests, and archives on your own disk.

    store-id                     a random id, recorded in the ledger
    chunks/<merkle root>.caf     the stored bytes
    posts/<merkle root>.json     what a chain would list

A copy counts as proven if its length is right. The first post writes the id into the folder, then
into the ledger. From then on, a folder without the id (an unmounted disk) is away: the store judges
and writes nothing.
"""

import contextlib
import errno
import fcntl
import filecmp
import json
import os
import re
import secrets
import shlex
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Protocol

from caf_pipeline.caf.merkle import MerkleTree
from caf_pipeline.errors import (
    IntegrityError,
    RootRefused,
    StoreAway,
    StoredChunkMissing,
    StoreError,
    StoreUnreachable,
)
from caf_pipeline.records import Copy, PostedFile, PostRecord, TransactionLog
from caf_pipeline.store.protocol import (
    ArchiveFiles,
    ChunkReader,
    ChunkStore,
    ChunkToStore,
    refuse_unknown_archives,
)
from caf_pipeline.system.atomic_files import WholeFile, sync_folder
from caf_pipeline.system.quantities import show_size
from caf_pipeline.system.secret_files import make_private

PIECE_BYTES: Final = 1 << 20
OWNER: Final = "directory"

MARKER: Final = "store-id"
"""Holds the store's id. A folder that you copy it to becomes the store."""

_PART: Final = ".part-"
_ROOT_BYTES: Final = 32  # proof type 3; roots of type 0 have 64
_ROOT: Final = re.compile(r"(?:[0-9a-f]{2})+")
_ID: Final = re.compile(r"[0-9a-f]{32}")
_MARKER_BYTES: Final = 1000  # an id and white space


class FolderLedger(Protocol):
    """The part of the ledger that the store needs. See `ledger.folder_store`."""

    def folder_store(self) -> str | None: ...

    def mark_folder_store(self, folder_id: str) -> str: ...


class NoLedger:
    """Stands in for the ledger until the process ends."""

    def __init__(self) -> None:
        self._id: str | None = None

    def folder_store(self) -> str | None:
        return self._id

    def mark_folder_store(self, folder_id: str) -> str:
        self._id = folder_id
        return folder_id


class DirectoryReader(ChunkReader):
    """Reads chunks that are files of a folder. Writes nothing. Safe for several threads."""

    name = "directory"
    required_copies = 1

    def __init__(self, folder: Path, recorded_id: Callable[[], str | None] = lambda: None) -> None:
        self.folder = folder
        self._recorded_id = recorded_id
        self._id = ""  # set once the folder was seen with the ledger's id
        self._chunks = folder / "chunks"
        self._posts = folder / "posts"

    def require_here(self) -> None:
        marker = self._read_marker()
        if self._id and marker == self._id:
            return
        recorded = self._recorded_id()
        if recorded is None:
            return
        if marker != recorded:
            raise self._away(marker, recorded)
        self._id = recorded

    def _read_marker(self) -> str:
        path = self.folder / MARKER
        try:
            with path.open("rb") as file:
                text = file.read(_MARKER_BYTES).decode("ascii", "replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as error:
            raise StoreUnreachable(
                f"{path} cannot be read: {error.strerror}",
                hint="check that the store's folder exists and that this user may read it",
            ) from error
        if not _ID.fullmatch(text):
            raise StoreAway(
                f"{path} does not contain a store's id",
                hint="copy the file from a backup; if no chunk was ever stored in "
                f"{self.folder}, remove it",
            )
        return text

    def _away(self, marker: str, recorded: str) -> StoreAway:
        why = (
            f"its file {MARKER} has the id {marker}, not {recorded}"
            if marker
            else f"it has no file {MARKER}"
        )
        folder = shlex.quote(str(self.folder))
        return StoreAway(
            f"the store's folder {self.folder} is not the folder with the chunks: {why}",
            hint="mount its disk, or correct store.folder; only if the disk is lost for good, "
            f"replace it by an empty folder: mkdir -p {folder} && echo {recorded} > "
            f"{shlex.quote(str(self.folder / MARKER))}",
        )

    def copies(self, posting: PostRecord) -> Sequence[Copy]:
        """The copy exists if its file has the posted length."""
        self.require_here()
        try:
            size_bytes = self._chunk_path(posting).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            self.require_here()  # the disk may be gone by now
            return []
        except OSError as error:
            raise _unreadable(posting, error) from error
        if size_bytes == posting.stored_size_bytes:
            return [
                Copy(
                    provider=str(self.folder),
                    proof=f"{OWNER}/{posting.merkle_root.hex()}/{posting.start}",
                )
            ]
        return []

    def holders(self, posting: PostRecord) -> Sequence[str]:
        return [copy.provider for copy in self.copies(posting)]

    def urls(self, posting: PostRecord) -> Mapping[str, str]:
        """URLs are not percent-encoded, as fsspec expects."""
        return {
            holder: f"file://{self._chunk_path(posting).resolve()}"
            for holder in self.holders(posting)
        }

    def read(
        self, posting: PostRecord, start_byte: int, end_byte: int, *, provider: str | None = None
    ) -> Iterator[bytes]:
        self.require_here()
        try:
            with self._chunk_path(posting).open("rb") as file:
                file.seek(start_byte)
                missing = end_byte - start_byte
                while missing and (piece := file.read(min(missing, PIECE_BYTES))):
                    missing -= len(piece)
                    yield piece
        except FileNotFoundError as error:
            self.require_here()  # the disk may be gone by now
            raise StoredChunkMissing(
                f"the store has no chunk {posting.merkle_root.hex()}"
            ) from error
        except OSError as error:
            raise _unreadable(posting, error) from error
        if missing:
            raise IntegrityError(
                f"chunk {posting.merkle_root.hex()} ends {missing} bytes before byte {end_byte}"
            )

    def _posting(self, merkle_root: bytes) -> PostRecord:
        post = json.loads(self._post_path(merkle_root).read_bytes())
        return PostRecord(merkle_root, post["owner"], post["start"], post["stored_size_bytes"])

    def _chunk_path(self, posting: PostRecord) -> Path:
        return self._chunks / f"{posting.merkle_root.hex()}.caf"

    def _post_path(self, merkle_root: bytes) -> Path:
        return self._posts / f"{merkle_root.hex()}.json"


class DirectoryStore(DirectoryReader, ChunkStore):
    """Keeps each chunk as one file. Nothing is written before the first post.

    Safe for several processes: files get their names only when they are complete.
    """

    proof_type = 3  # its root is shorter and faster to compute

    def __init__(self, folder: Path, ledger: FolderLedger | None = None) -> None:
        self._ledger = ledger or NoLedger()
        super().__init__(folder, self._ledger.folder_store)

    def bind(self) -> None:
        self.require_here()
        if self._id:
            return
        try:
            make_private(self.folder)
            marker = self._read_marker() or self._write_marker(secrets.token_hex(16))
            recorded = self._ledger.mark_folder_store(marker)
        except OSError as error:
            raise self._cannot_create(error) from error
        if recorded != marker:  # another process was first, with another folder
            raise self._away(marker, recorded)
        self._id = marker

    def _write_marker(self, folder_id: str) -> str:
        path = self.folder / MARKER
        temporary = path.with_name(f".{MARKER}-{secrets.token_hex(8)}")
        try:
            _write_new(temporary, folder_id)
            try:
                os.link(temporary, path)  # unlike a rename, a link replaces nothing
            except FileExistsError:
                pass
            except OSError:  # a file system without hard links
                with contextlib.suppress(FileExistsError):
                    _write_new(path, folder_id)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(self.folder)
        sync_folder(self.folder.parent)
        return self._read_marker()

    def _cannot_create(self, error: OSError) -> StoreError:
        return StoreError(
            f"the store's folder {self.folder} cannot be created: {error.strerror}",
            hint="set store.folder to a folder you own",
        )

    def admit(self, *, stored_size_bytes: int, waiting_bytes: int) -> None:
        self.require_here()
        try:
            # The folder, or the nearest parent in which it can be created.
            folder = next(
                path
                for path in (self.folder, *self.folder.absolute().parents)
                if os.path.lexists(path)
            )
            if not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
            disk = os.statvfs(folder)
        except OSError as error:
            raise self._cannot_create(error) from error
        free_bytes = disk.f_bavail * disk.f_frsize
        if stored_size_bytes + waiting_bytes > free_bytes:
            others = f" and {show_size(waiting_bytes)} of waiting chunks" if waiting_bytes else ""
            raise StoreError(
                f"the store's folder {self.folder} has {show_size(free_bytes)} free, which is too "
                f"little for a chunk of {show_size(stored_size_bytes)}{others}",
                hint="free some space, or set store.folder to a folder on a larger disk",
            )

    def post(self, chunk: ChunkToStore, log: TransactionLog) -> PostRecord:
        """Record that the chunk will come. Nothing is signed."""
        self.bind()
        path = self._post_path(chunk.merkle_root)
        with contextlib.ExitStack() as stack:
            if path.exists():
                return self._posting(chunk.merkle_root)
            if not log.has_post(chunk.archive_id):
                stack.enter_context(self._alone())
                self.archives(log=log)
                refuse_unknown_archives(log.unknown_archives(OWNER, chunk.archive_id))
            post = {
                "owner": OWNER,
                "start": 1,
                "stored_size_bytes": chunk.stored_size_bytes,
                "name": chunk.name,
                "archive": chunk.archive_id,
                "proof_type": chunk.proof_type,
            }
            if chunk.header_sha256:
                post["header_sha256"] = chunk.header_sha256.hex()
            if chunk.mac:
                post["mac"] = chunk.mac.hex()
            self._write(path, iter([json.dumps(post).encode()]))
        return self._posting(chunk.merkle_root)

    def posted_already(self, chunk: ChunkToStore, log: TransactionLog) -> PostRecord | None:
        self.require_here()
        return (
            self._posting(chunk.merkle_root)
            if self._post_path(chunk.merkle_root).exists()
            else None
        )

    def unknown_posts(self, archive_id: str, log: TransactionLog) -> Sequence[bytes]:
        """Reads only the posts that the ledger does not know."""
        self.require_here()
        listed = {
            path.stem: path for path in self._posts.glob("*.json") if _ROOT.fullmatch(path.stem)
        }
        unknown = log.unknown_roots([bytes.fromhex(stem) for stem in listed], signed=False)
        posts = (self._read_post(listed[root.hex()]) for root in unknown)
        roots = [post.posting.merkle_root for post, archive in posts if archive == archive_id]
        log.record_look(OWNER, archive_id, 0, len(roots))
        return roots

    def put(
        self,
        posting: PostRecord,
        staged: Path,
        progress: Callable[[int], None],
        *,
        wrong: Collection[str] = (),
    ) -> None:
        """Copy the staged file. An identical copy stays, so `wrong` changes nothing.

        Bytes with another Merkle root are not kept.
        """
        try:
            file = staged.open("rb")
        except FileNotFoundError as error:
            raise StoreError(
                f"the staged file {staged} is missing",
                hint="run the partition again: it packs the chunk again",
            ) from error
        with file:
            self.bind()
            try:
                if self.copies(posting) and filecmp.cmp(
                    staged, self._chunk_path(posting), shallow=False
                ):
                    progress(posting.stored_size_bytes)
                    return
            except OSError as error:
                raise _unreadable(posting, error) from error

            def checked_pieces() -> Iterator[bytes]:
                tree = MerkleTree(3 if len(posting.merkle_root) == _ROOT_BYTES else 0)
                while piece := file.read(PIECE_BYTES):
                    tree.update(piece)
                    yield piece
                    progress(len(piece))
                if tree.root() != posting.merkle_root:
                    raise RootRefused(
                        f"the bytes have the Merkle root {tree.root().hex()}, but "
                        f"{posting.merkle_root.hex()} was posted",
                        hint="run the partition again: it packs the chunk again",
                    )

            self._write(self._chunk_path(posting), checked_pieces())
        self.require_here()  # the disk may have gone while the chunk was written

    def possible_holders(self, posting: PostRecord) -> Sequence[str]:
        return self.holders(posting)

    def owner(self) -> str:
        return OWNER

    def posted(self, archive_id: str) -> Iterator[PostedFile]:
        for listed, archive in self._listed():
            if archive == archive_id:
                yield listed

    def posted_as(self, merkle_root: bytes) -> Sequence[PostedFile]:
        return [listed for listed, _ in self._listed() if listed.posting.merkle_root == merkle_root]

    def posted_by(self, owner: str) -> Iterator[PostedFile]:
        return (listed for listed, _ in self._listed() if listed.posting.owner == owner)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other ledgers' first posts out."""
        with (self.folder / MARKER).open("rb") as marker:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(marker, fcntl.LOCK_EX)
            yield

    def archives(
        self, owner: str | None = None, *, log: TransactionLog | None = None
    ) -> Mapping[str | None, ArchiveFiles]:
        times = defaultdict[str | None, list[datetime]](list)
        for listed, archive in self._listed():
            if owner not in (None, listed.posting.owner):
                continue
            times[archive] += self.posted_at([listed.posting])
        if log is not None and owner is None:
            log.record_archives(OWNER, 0, {*filter(None, times)})
        return {
            archive: ArchiveFiles(len(posted), min(posted), max(posted))
            for archive, posted in times.items()
        }

    def posted_at(self, postings: Sequence[PostRecord]) -> Sequence[datetime]:
        paths = (self._post_path(posting.merkle_root) for posting in postings)
        return [datetime.fromtimestamp(path.stat().st_mtime, UTC) for path in paths]

    def _listed(self) -> Iterator[tuple[PostedFile, str]]:
        self.require_here()
        return map(self._read_post, sorted(self._posts.glob("*.json")))

    def _read_post(self, path: Path) -> tuple[PostedFile, str]:
        try:
            post = json.loads(path.read_bytes())
            posting = PostRecord(
                bytes.fromhex(path.stem),
                post["owner"],
                int(post["start"]),
                int(post["stored_size_bytes"]),
            )
            header_sha256, mac = (
                bytes.fromhex(value) if (value := post.get(name)) else None
                for name in ("header_sha256", "mac")
            )
            listed = PostedFile(posting, int(post["proof_type"]), header_sha256, mac)
            return listed, str(post["archive"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise StoreError(
                f"{path} is not a post of this store: {error}",
                hint="move this file and its chunk out of the store's folder",
            ) from error

    def half_copies(self) -> Sequence[tuple[bytes, Path]]:
        """Return files and roots of running or killed uploads."""
        self.require_here()
        paths = sorted([*self._chunks.glob(f"{_PART}*"), *self._posts.glob(f"{_PART}*")])
        roots = [path.name.removeprefix(_PART).partition(".")[0] for path in paths]
        return [
            (bytes.fromhex(root), path)
            for root, path in zip(roots, paths, strict=True)
            if _ROOT.fullmatch(root)
        ]

    def _write(self, path: Path, pieces: Iterator[bytes]) -> None:
        # Other files with this prefix are left from killed uploads: only the holder of the chunk's
        # lease writes it.
        prefix = f"{_PART}{path.name}-"
        try:
            path.parent.mkdir(exist_ok=True)
            for leftover in path.parent.glob(f"{prefix}*"):
                leftover.unlink(missing_ok=True)
            with WholeFile(path, path.with_name(f"{prefix}{secrets.token_hex(8)}")) as whole:
                os.fchmod(whole.file.fileno(), 0o600)  # hidden from other users
                for piece in pieces:
                    whole.file.write(piece)
        except OSError as error:
            self.require_here()  # the disk may be gone by now
            raise StoreError(
                f"the store's folder {self.folder} cannot take the chunk: {error.strerror}",
                hint="make room there",
            ) from error


def _write_new(path: Path, folder_id: str) -> None:
    with path.open("xb") as file:
        file.write(f"{folder_id}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def _unreadable(posting: PostRecord, error: OSError) -> StoreUnreachable:
    return StoreUnreachable(
        f"chunk {posting.merkle_root.hex()} cannot be read: {error.strerror}",
        hint="check that the store's folder exists and that this user may read it",
    )
