"""A ChunkStore in a folder: for trying the pipeline out, for tests, and for archives that stay at home.

    chunks/<merkle root>.caf     the stored bytes
    posts/<merkle root>.json     owner, start, size, archive, proof type: what the chain would list

A copy "proves" itself by its length; its bytes are compared by the read-back as everywhere.
"""

import filecmp
import json
import os
import re
import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from caf_pipeline.caf.merkle import MerkleTree
from caf_pipeline.errors import IntegrityError, RootRefused, StoredChunkMissing, StoreError, StoreUnreachable
from caf_pipeline.store.protocol import ArchiveFiles, ChunkStore, ChunkToStore, Copy, PostedFile, Posting
from caf_pipeline.system.atomic_files import WholeFile
from caf_pipeline.system.quantities import show_size

if TYPE_CHECKING:
    from caf_pipeline.ledger.transactions import TransactionLog

PIECE_BYTES: Final = 1 << 20
OWNER: Final = "directory"

_PART: Final = ".part-"
_ROOT_BYTES: Final = 32  # of a root of proof type 3; one of type 0 has 64
_ROOT: Final = re.compile(r"(?:[0-9a-f]{2})+")


class DirectoryStore(ChunkStore):
    """Keeps each chunk as one file. Safe for several processes: files get their names only when they are whole."""

    name = "directory"
    required_copies = 1
    proof_type = 3  # the shorter root, and the faster one

    def __init__(self, folder: Path, *, is_used: Callable[[], bool] = lambda: False) -> None:
        """Open the store; its folders are made where it is new.

        Args:
            folder: where it is.
            is_used: asked where the folder has no posts: whether chunks were stored in such a folder before.

        Raises:
            StoreError: the folder cannot be made, or has nothing of what was stored, as where its disk is not mounted.
        """
        self.folder = folder
        self._chunks = folder / "chunks"
        self._posts = folder / "posts"
        try:
            if not self._posts.is_dir() and is_used():
                raise StoreError(
                    f"the store's folder {folder} has nothing of the chunks that were stored",
                    hint="see that its disk is mounted, and that store.folder names it; a new store needs a home of its own",
                )
            self._chunks.mkdir(parents=True, exist_ok=True)
            self._posts.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"the store's folder {folder} cannot be made: {error.strerror}", hint="set store.folder to a folder you own"
            ) from error

    def admit(self, *, public: bool, stored_size_bytes: int, waiting_bytes: int) -> None:
        """Refuse what the disk has no room for. `public` is not asked: nothing leaves the folder."""
        disk = os.statvfs(self.folder)
        free_bytes = disk.f_bavail * disk.f_frsize
        if stored_size_bytes + waiting_bytes > free_bytes:
            beside = f" beside {show_size(waiting_bytes)} of chunks that wait" if waiting_bytes else ""
            raise StoreError(
                f"the store's folder {self.folder} has {show_size(free_bytes)} free, too little for a chunk of"
                f" {show_size(stored_size_bytes)}{beside}",
                hint="make room there, or set store.folder to a folder on a larger disk",
            )

    def post(self, chunk: ChunkToStore, log: "TransactionLog") -> Posting:
        """Write down that the chunk is to come. There is nothing to sign, so `log` stays empty."""
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

    def posted_already(self, chunk: ChunkToStore, log: "TransactionLog") -> Posting | None:
        """Return the chunk's post, where the folder has one."""
        return self._posting(chunk.merkle_root) if self._post_path(chunk.merkle_root).exists() else None

    def unknown_posts(self, archive_id: str, log: "TransactionLog") -> Sequence[bytes]:
        """Return the roots of the archive's posts that the ledger does not know; only such posts are read.

        Raises:
            StoreError: one of them is no post.
        """
        listed = {path.stem: path for path in self._posts.glob("*.json") if _ROOT.fullmatch(path.stem)}
        unknown = log.unknown_roots([bytes.fromhex(stem) for stem in listed], signed=False)
        posts = (self._read_post(listed[root.hex()]) for root in unknown)
        found = [post.posting.merkle_root for post, archive in posts if archive == archive_id]
        log.record_look(OWNER, archive_id, 0, len(found))
        return found

    def put(self, posting: Posting, staged: Path, progress: Callable[[int], None], *, wrong: Collection[str] = ()) -> None:
        """Copy the staged file; an existing copy of the same bytes is left as it is, so that `wrong` changes nothing.

        Raises:
            RootRefused: the bytes do not have the posted Merkle root; nothing was kept of them. StoreError.
        """
        try:
            if self.copies(posting) and filecmp.cmp(staged, self._chunk_path(posting), shallow=False):
                progress(posting.stored_size_bytes)
                return
            with staged.open("rb") as file:
                pieces = _told(iter(lambda: file.read(PIECE_BYTES), b""), progress)
                self._write(self._chunk_path(posting), _of_root(pieces, posting.merkle_root))
        except FileNotFoundError as error:
            raise StoreError(f"the staged file {staged} is gone", hint="run the partition again: it is packed again") from error

    def owner(self) -> str:
        """Return the one owner that there is."""
        return OWNER

    def posted(self, archive_id: str) -> Iterator[PostedFile]:
        """Yield the posts of an archive, and posts written before a post had the archive's id, of whatever archive they are.

        Raises:
            StoreError: a file in the folder of posts is no post.
        """
        for listed, archive in self._listed():
            if archive in (archive_id, None):
                yield listed

    def posted_as(self, merkle_root: bytes) -> Sequence[PostedFile]:
        """Return the post of a root. Raises as `posted`."""
        return [listed for listed, _ in self._listed() if listed.posting.merkle_root == merkle_root]

    def posted_by(self, owner: str) -> Iterator[PostedFile]:
        """Yield all posts of the one owner. Raises as `posted`."""
        return (listed for listed, _ in self._listed() if listed.posting.owner == owner)

    def archives(self) -> Mapping[str | None, ArchiveFiles]:
        """Return the posts by their archive's id; None has those written before a post had one. Raises as `posted`."""
        times = defaultdict[str | None, list[float]](list)
        for listed, archive in self._listed():
            times[archive].append(self._post_path(listed.posting.merkle_root).stat().st_mtime)
        return {
            archive: ArchiveFiles(len(of), datetime.fromtimestamp(min(of), UTC), datetime.fromtimestamp(max(of), UTC))
            for archive, of in times.items()
        }

    def _listed(self) -> Iterator[tuple[PostedFile, str | None]]:
        return map(self._read_post, sorted(self._posts.glob("*.json")))

    def _read_post(self, path: Path) -> tuple[PostedFile, str | None]:
        try:
            described = json.loads(path.read_bytes())
            root = bytes.fromhex(path.stem)
            posting = Posting(root, described["owner"], int(described["start"]), int(described["stored_size_bytes"]))
            listed = PostedFile(posting, int(described.get("proof_type", self.proof_type)))
            archive = described.get("archive")
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise StoreError(
                f"{path} is not a post of this store: {error}", hint="move this file and its chunk out of the store's folder"
            ) from error
        return listed, None if archive is None else str(archive)

    def copies(self, posting: Posting) -> Sequence[Copy]:
        """Return the one copy, where its file has the posted length.

        Raises:
            StoreUnreachable: it cannot be looked at.
        """
        try:
            size_bytes = self._chunk_path(posting).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise _unreadable(posting, error) from error
        if size_bytes == posting.stored_size_bytes:
            return [Copy(provider=str(self.folder), proof=f"{OWNER}/{posting.merkle_root.hex()}/{posting.start}")]
        return []

    def half_copies(self) -> Sequence[tuple[bytes, Path]]:
        """Return unfinished files, of copies under way or killed, each with the Merkle root of its chunk."""
        found = [*self._chunks.glob(f"{_PART}*"), *self._posts.glob(f"{_PART}*")]
        named = [(path, path.name.removeprefix(_PART).partition(".")[0]) for path in sorted(found)]
        return [(bytes.fromhex(root), path) for path, root in named if _ROOT.fullmatch(root)]

    def holders(self, posting: Posting) -> Sequence[str]:
        """Return the folder, where it has the chunk."""
        return [copy.provider for copy in self.copies(posting)]

    def urls(self, posting: Posting) -> Mapping[str, str]:
        """Return the file's address on this machine, as fsspec takes it: nothing in it is percent-encoded."""
        return {holder: f"file://{self._chunk_path(posting).resolve()}" for holder in self.holders(posting)}

    def read(self, posting: Posting, start_byte: int, end_byte: int, *, provider: str | None = None) -> Iterator[bytes]:
        """Yield the range from the file."""
        try:
            with self._chunk_path(posting).open("rb") as file:
                file.seek(start_byte)
                left = end_byte - start_byte
                while left and (piece := file.read(min(left, PIECE_BYTES))):
                    left -= len(piece)
                    yield piece
        except FileNotFoundError as error:
            raise StoredChunkMissing(f"the store has no chunk {posting.merkle_root.hex()}") from error
        except OSError as error:
            raise _unreadable(posting, error) from error
        if left:
            raise IntegrityError(f"chunk {posting.merkle_root.hex()} ends {left} bytes before byte {end_byte}")

    def _posting(self, merkle_root: bytes) -> Posting:
        described = json.loads(self._post_path(merkle_root).read_bytes())
        return Posting(merkle_root, described["owner"], described["start"], described["stored_size_bytes"])

    def _chunk_path(self, posting: Posting) -> Path:
        return self._chunks / f"{posting.merkle_root.hex()}.caf"

    def _post_path(self, merkle_root: bytes) -> Path:
        return self._posts / f"{merkle_root.hex()}.json"

    def _write(self, path: Path, pieces: Iterator[bytes]) -> None:
        # What a killed upload of the same file left. Whoever holds the chunk's lease is the only one who writes it.
        prefix = f"{_PART}{path.name}-"
        for left in path.parent.glob(f"{prefix}*"):
            left.unlink(missing_ok=True)
        try:
            with WholeFile(path, path.with_name(f"{prefix}{secrets.token_hex(8)}")) as whole:
                os.fchmod(whole.file.fileno(), 0o600)  # for nobody else on this machine
                for piece in pieces:
                    whole.file.write(piece)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StoreError(
                f"the store's folder {self.folder} cannot take the chunk: {error.strerror}", hint="make room there"
            ) from error


def _unreadable(posting: Posting, error: OSError) -> StoreUnreachable:
    """Return the error of a file that this process may not read, or not now: its bytes may be right."""
    return StoreUnreachable(
        f"chunk {posting.merkle_root.hex()} cannot be read: {error.strerror}",
        hint="see that the store's folder is there and that this user may read it, and try again",
    )


def _of_root(pieces: Iterator[bytes], merkle_root: bytes) -> Iterator[bytes]:
    """Pass on pieces that come to this Merkle root, as a provider does; raise RootRefused after the last of others."""
    tree = MerkleTree(3 if len(merkle_root) == _ROOT_BYTES else 0)
    for piece in pieces:
        tree.update(piece)
        yield piece
    if tree.root() != merkle_root:
        raise RootRefused(
            f"the bytes have the Merkle root {tree.root().hex()}, not {merkle_root.hex()} as posted",
            hint="run the partition again: the chunk is packed again",
        )


def _told(pieces: Iterator[bytes], progress: Callable[[int], None]) -> Iterator[bytes]:
    for piece in pieces:
        yield piece
        progress(len(piece))
