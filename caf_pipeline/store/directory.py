"""A ChunkStore in a folder: for trying the pipeline out, for tests, and for archives that stay at
home.

    store-id                     a random id, which the ledger knows
    chunks/<merkle root>.caf     the stored bytes
    posts/<merkle root>.json     owner, start, size, archive, proof type: what the chain would list

A copy "proves" itself by its length; its bytes are compared by the read-back as everywhere.

The first post writes the id, into the folder and then into the ledger. From then on the store is
away while the folder lacks the id, e.g. because the disk is not mounted: nothing is judged, and
nothing is written.
"""

import contextlib
import errno
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
from caf_pipeline.store.protocol import (
    ArchiveFiles,
    ChunkReader,
    ChunkStore,
    ChunkToStore,
    Copy,
    PostedFile,
    PostRecord,
    TransactionLog,
)
from caf_pipeline.system.atomic_files import WholeFile, sync_folder
from caf_pipeline.system.quantities import show_size

PIECE_BYTES: Final = 1 << 20
OWNER: Final = "directory"

MARKER: Final = "store-id"
"""The file with the store's id. If you copy it to another folder, that folder becomes the store."""

_PART: Final = ".part-"
_ROOT_BYTES: Final = 32  # of a root of proof type 3; one of type 0 has 64
_ROOT: Final = re.compile(r"(?:[0-9a-f]{2})+")
_ID: Final = re.compile(r"[0-9a-f]{32}")
_MARKER_BYTES: Final = 1000  # an id and white space; a longer file is no marker


class FolderLedger(Protocol):
    """The part of the ledger that the store needs: see `ledger.folder_store`."""

    def folder_store(self) -> str | None:
        """Return the id of the folder that has the chunks; None before `mark_folder_store`."""
        ...

    def mark_folder_store(self, folder_id: str) -> str:
        """Record that the folder with this id has the chunks; return the id that counts."""
        ...


class NoLedger:
    """The memory of a store without a ledger."""

    def __init__(self) -> None:
        self._id: str | None = None

    def folder_store(self) -> str | None:
        """Return the id that was marked."""
        return self._id

    def mark_folder_store(self, folder_id: str) -> str:
        """Keep the id while the process runs."""
        self._id = folder_id
        return folder_id


class DirectoryReader(ChunkReader):
    """Reads chunks that are files of a folder.

    Safe for several threads. Writes nothing, neither there nor in the ledger.
    """

    name = "directory"
    required_copies = 1

    def __init__(self, folder: Path, recorded_id: Callable[[], str | None] = lambda: None) -> None:
        """Open the folder.

        Args: folder: where it is. recorded_id: returns the id of the folder that has the chunks,
            None if the ledger has no id.
        """
        self.folder = folder
        self._recorded_id = recorded_id
        self._id = ""  # once the folder was seen with the id that the ledger knows
        self._chunks = folder / "chunks"
        self._posts = folder / "posts"

    def require_here(self) -> None:
        """Raise StoreAway if the folder does not hold the ledger's chunks.

        Any folder passes while the ledger has no chunk.
        """
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
        """Return the id in the folder; "" if there is none.

        Raises:
            StoreUnreachable: the marker cannot be read. StoreAway: it has no id.
        """
        path = self.folder / MARKER
        try:
            with path.open("rb") as file:
                text = file.read(_MARKER_BYTES).decode("ascii", "replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as error:
            raise StoreUnreachable(
                f"{path} cannot be read: {error.strerror}",
                hint="see that the store's folder is there and that this user may read it, and try "
                "again",
            ) from error
        if not _ID.fullmatch(text):
            raise StoreAway(
                f"{path} has no id of a store",
                hint="copy the file from a backup; remove it if no chunk was ever stored in "
                f"{self.folder}",
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
            f"the store's folder {self.folder} is not the one that has the chunks: {why}",
            hint="mount its disk, or correct store.folder; only if the disk is lost for good, let "
            "an empty folder take its place:"
            f" mkdir -p {folder} && echo {recorded} > {shlex.quote(str(self.folder / MARKER))}",
        )

    def copies(self, posting: PostRecord) -> Sequence[Copy]:
        """Return the one copy, where its file has the posted length.

        Raises:
            StoreUnreachable: it cannot be looked at.
        """
        self.require_here()
        try:
            size_bytes = self._chunk_path(posting).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            self.require_here()  # its disk may have gone since
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
        """Return the folder, where it has the chunk."""
        return [copy.provider for copy in self.copies(posting)]

    def urls(self, posting: PostRecord) -> Mapping[str, str]:
        """Return the file's address on this machine, as fsspec takes it: nothing in it is
        percent-encoded.
        """
        return {
            holder: f"file://{self._chunk_path(posting).resolve()}"
            for holder in self.holders(posting)
        }

    def read(
        self, posting: PostRecord, start_byte: int, end_byte: int, *, provider: str | None = None
    ) -> Iterator[bytes]:
        """Yield the range from the file."""
        self.require_here()
        try:
            with self._chunk_path(posting).open("rb") as file:
                file.seek(start_byte)
                left = end_byte - start_byte
                while left and (piece := file.read(min(left, PIECE_BYTES))):
                    left -= len(piece)
                    yield piece
        except FileNotFoundError as error:
            self.require_here()  # its disk may have gone since
            raise StoredChunkMissing(
                f"the store has no chunk {posting.merkle_root.hex()}"
            ) from error
        except OSError as error:
            raise _unreadable(posting, error) from error
        if left:
            raise IntegrityError(
                f"chunk {posting.merkle_root.hex()} ends {left} bytes before byte {end_byte}"
            )

    def _posting(self, merkle_root: bytes) -> PostRecord:
        described = json.loads(self._post_path(merkle_root).read_bytes())
        return PostRecord(
            merkle_root, described["owner"], described["start"], described["stored_size_bytes"]
        )

    def _chunk_path(self, posting: PostRecord) -> Path:
        return self._chunks / f"{posting.merkle_root.hex()}.caf"

    def _post_path(self, merkle_root: bytes) -> Path:
        return self._posts / f"{merkle_root.hex()}.json"


class DirectoryStore(DirectoryReader, ChunkStore):
    """Keeps each chunk as one file.

    Safe for several processes: files get their names only when they are whole.

    Nothing is written before the first post.
    """

    proof_type = 3  # the shorter root, and the faster one

    def __init__(self, folder: Path, ledger: FolderLedger | None = None) -> None:
        """Open the folder. `ledger` knows which folder has the chunks."""
        self._ledger = ledger or NoLedger()
        super().__init__(folder, self._ledger.folder_store)

    def bind(self) -> None:
        """Write an id into the folder if it has none, and record the id in the ledger.

        Raises:
            StoreAway: the ledger knows another folder. StoreError: the folder cannot be written.
        """
        self.require_here()
        if self._id:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._mark(self._read_marker() or self._write_marker(secrets.token_hex(16)))
        except OSError as error:
            raise self._not_made(error) from error

    def _mark(self, marker: str) -> None:
        counts = self._ledger.mark_folder_store(marker)
        if counts != marker:  # another process was first, with another folder
            raise self._away(marker, counts)
        self._id = marker

    def _write_marker(self, folder_id: str) -> str:
        """Write the marker, durable and whole.

        Return the id that the folder then has: another process may have been first.
        """
        path = self.folder / MARKER
        temporary = path.with_name(f".{MARKER}-{secrets.token_hex(8)}")
        try:
            _write_new(temporary, folder_id)
            try:
                os.link(temporary, path)  # unlike a rename, it replaces nothing
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

    def _not_made(self, error: OSError) -> StoreError:
        return StoreError(
            f"the store's folder {self.folder} cannot be made: {error.strerror}",
            hint="set store.folder to a folder you own",
        )

    def admit(self, *, public: bool, stored_size_bytes: int, waiting_bytes: int) -> None:
        """Refuse what the disk has no room for. `public` is not asked: nothing leaves the
        folder.
        """
        self.require_here()
        try:
            disk = os.statvfs(self._existing_folder())
        except OSError as error:
            raise self._not_made(error) from error
        free_bytes = disk.f_bavail * disk.f_frsize
        if stored_size_bytes + waiting_bytes > free_bytes:
            beside = (
                f" beside {show_size(waiting_bytes)} of chunks that wait" if waiting_bytes else ""
            )
            raise StoreError(
                f"the store's folder {self.folder} has {show_size(free_bytes)} free, too little "
                "for a chunk of"
                f" {show_size(stored_size_bytes)}{beside}",
                hint="make room there, or set store.folder to a folder on a larger disk",
            )

    def _existing_folder(self) -> Path:
        """Return the folder, or the nearest one above it in which it can be made."""
        folder = next(
            path for path in (self.folder, *self.folder.absolute().parents) if os.path.lexists(path)
        )
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return folder

    def post(self, chunk: ChunkToStore, log: TransactionLog) -> PostRecord:
        """Write down that the chunk is to come. There is nothing to sign, so `log` stays empty."""
        self.bind()
        path = self._post_path(chunk.merkle_root)
        if not path.exists():
            described = {
                "owner": OWNER,
                "start": 1,
                "stored_size_bytes": chunk.stored_size_bytes,
                "name": chunk.name,
                "archive": chunk.archive_id,
                "proof_type": chunk.proof_type,
            }
            self._write(path, iter([json.dumps(described).encode()]))
        return self._posting(chunk.merkle_root)

    def posted_already(self, chunk: ChunkToStore, log: TransactionLog) -> PostRecord | None:
        """Return the chunk's post, where the folder has one."""
        self.require_here()
        return (
            self._posting(chunk.merkle_root)
            if self._post_path(chunk.merkle_root).exists()
            else None
        )

    def unknown_posts(self, archive_id: str, log: TransactionLog) -> Sequence[bytes]:
        """Return the roots of the archive's posts that the ledger does not know; only such posts
        are read.

        Raises:
            StoreAway: the folder is not the store's. StoreError: one of them is no post.
        """
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
        """Copy the staged file.

        An existing copy of the same bytes stays, so that `wrong` changes nothing.

        Raises: RootRefused: the bytes do not have the posted Merkle root; nothing was kept of them.
            StoreError.
        """
        try:
            file = staged.open("rb")
        except FileNotFoundError as error:
            raise StoreError(
                f"the staged file {staged} is gone",
                hint="run the partition again: it is packed again",
            ) from error
        with file:
            self.bind()
            if self._has_equal(posting, staged):
                progress(posting.stored_size_bytes)
                return
            pieces = _told(iter(lambda: file.read(PIECE_BYTES), b""), progress)
            self._write(self._chunk_path(posting), _of_root(pieces, posting.merkle_root))
        self.require_here()  # its disk may have gone while the chunk was written

    def _has_equal(self, posting: PostRecord, staged: Path) -> bool:
        try:
            return bool(self.copies(posting)) and filecmp.cmp(
                staged, self._chunk_path(posting), shallow=False
            )
        except OSError as error:
            raise _unreadable(posting, error) from error

    def owner(self) -> str:
        """Return the one owner that there is."""
        return OWNER

    def posted(self, archive_id: str) -> Iterator[PostedFile]:
        """Yield the posts of an archive.

        Raises:
            StoreError: a file in the folder of posts is no post.
        """
        for listed, archive in self._listed():
            if archive == archive_id:
                yield listed

    def posted_as(self, merkle_root: bytes) -> Sequence[PostedFile]:
        """Return the post of a root. Raises as `posted`."""
        return [listed for listed, _ in self._listed() if listed.posting.merkle_root == merkle_root]

    def posted_by(self, owner: str) -> Iterator[PostedFile]:
        """Yield all posts of the one owner. Raises as `posted`."""
        return (listed for listed, _ in self._listed() if listed.posting.owner == owner)

    def archives(self) -> Mapping[str | None, ArchiveFiles]:
        """Return the posts by their archive's id. Raises as `posted`."""
        times = defaultdict[str | None, list[float]](list)
        for listed, archive in self._listed():
            times[archive].append(self._post_path(listed.posting.merkle_root).stat().st_mtime)
        return {
            archive: ArchiveFiles(
                len(of), datetime.fromtimestamp(min(of), UTC), datetime.fromtimestamp(max(of), UTC)
            )
            for archive, of in times.items()
        }

    def _listed(self) -> Iterator[tuple[PostedFile, str]]:
        self.require_here()
        return map(self._read_post, sorted(self._posts.glob("*.json")))

    def _read_post(self, path: Path) -> tuple[PostedFile, str]:
        try:
            described = json.loads(path.read_bytes())
            root = bytes.fromhex(path.stem)
            posting = PostRecord(
                root,
                described["owner"],
                int(described["start"]),
                int(described["stored_size_bytes"]),
            )
            listed, archive = (
                PostedFile(posting, int(described["proof_type"])),
                str(described["archive"]),
            )
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise StoreError(
                f"{path} is not a post of this store: {error}",
                hint="move this file and its chunk out of the store's folder",
            ) from error
        return listed, archive

    def half_copies(self) -> Sequence[tuple[bytes, Path]]:
        """Return unfinished files, of copies under way or killed, each with the Merkle root of its
        chunk.
        """
        self.require_here()
        found = [*self._chunks.glob(f"{_PART}*"), *self._posts.glob(f"{_PART}*")]
        named = [(path, path.name.removeprefix(_PART).partition(".")[0]) for path in sorted(found)]
        return [(bytes.fromhex(root), path) for path, root in named if _ROOT.fullmatch(root)]

    def _write(self, path: Path, pieces: Iterator[bytes]) -> None:
        # Files with this prefix were left by killed uploads of the same file: only the holder of
        # the chunk's lease writes it.
        prefix = f"{_PART}{path.name}-"
        try:
            path.parent.mkdir(exist_ok=True)
            for leftover in path.parent.glob(f"{prefix}*"):
                leftover.unlink(missing_ok=True)
            with WholeFile(path, path.with_name(f"{prefix}{secrets.token_hex(8)}")) as whole:
                os.fchmod(whole.file.fileno(), 0o600)  # for nobody else on this machine
                for piece in pieces:
                    whole.file.write(piece)
        except OSError as error:
            self.require_here()  # its disk may have gone since
            raise StoreError(
                f"the store's folder {self.folder} cannot take the chunk: {error.strerror}",
                hint="make room there",
            ) from error


def _write_new(path: Path, folder_id: str) -> None:
    """Write a new marker, and make it durable. Raises FileExistsError."""
    with path.open("xb") as file:
        file.write(f"{folder_id}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def _unreadable(posting: PostRecord, error: OSError) -> StoreUnreachable:
    """Return the error of a file that this process may not read, or not now: its bytes may be
    right.
    """
    return StoreUnreachable(
        f"chunk {posting.merkle_root.hex()} cannot be read: {error.strerror}",
        hint="see that the store's folder is there and that this user may read it, and try again",
    )


def _of_root(pieces: Iterator[bytes], merkle_root: bytes) -> Iterator[bytes]:
    """Pass on pieces that come to this Merkle root, as a provider does; raise RootRefused after the
    last of others.
    """
    tree = MerkleTree(3 if len(merkle_root) == _ROOT_BYTES else 0)
    for piece in pieces:
        tree.update(piece)
        yield piece
    if tree.root() != merkle_root:
        raise RootRefused(
            f"the bytes have the Merkle root {tree.root().hex()}, not {merkle_root.hex()} as "
            "posted",
            hint="run the partition again: the chunk is packed again",
        )


def _told(pieces: Iterator[bytes], progress: Callable[[int], None]) -> Iterator[bytes]:
    for piece in pieces:
        yield piece
        progress(len(piece))
