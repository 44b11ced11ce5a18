"""A ChunkStore of several folders, each of them a provider: one can lie, lose a copy or be out of
reach.

As strict as the real one where it matters to the steps: a chunk is posted before it is put, every
post has a start of its own, a provider that is asked alone answers alone, and what is put is listed
only where it has the posted size.
"""

import itertools
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

from caf_pipeline.errors import ChunkTooLarge, StoredChunkMissing, StoreError, StoreUnreachable
from caf_pipeline.records import Copy, PostedFile, PostRecord
from caf_pipeline.store.directory import DirectoryStore
from caf_pipeline.store.protocol import ArchiveFiles, ListedFile, ListedProof

WINDOW_BLOCKS = 100


class SeveralFolders:
    name = "several folders"
    proof_type = 3

    def __init__(self, folder: Path, providers=("anna", "bert", "carl"), *, required=3) -> None:
        self.folders = {name: DirectoryStore(folder / name) for name in providers}
        self.required_copies = required
        self.posts: dict[bytes, PostRecord] = {}
        self.noted: dict[bytes, str] = {}
        self.headers: dict[bytes, bytes | None] = {}  # SHA-256 of headers by root
        self.macs: dict[bytes, bytes | None] = {}
        self.away: set[str] = set()
        self.lost: dict[str, tuple[int, int]] = {}  # the range, end exclusive, that a provider lost
        self.unlisted: set[str] = set()
        self.unverified: set[str] = set()
        self.largest: int | None = None
        self.free_bytes = 1 << 40
        self.hold = 0.0
        self.admitted: list[tuple[int, int]] = []
        self.window: int | None = None
        self.now: int | None = None
        self.height: int | None = None
        self.proven: dict[str, int] = {}
        self._starts = itertools.count(100)

    def close(self) -> None:
        for folder in self.folders.values():
            folder.close()

    # --- what tests do to it ---

    def file(self, provider: str, posting: PostRecord) -> Path:
        return self.folders[provider].folder / "chunks" / f"{posting.merkle_root.hex()}.caf"

    def forget(self, posting: PostRecord) -> None:
        """Let the post be gone; the bytes are where they were."""
        del self.posts[posting.merkle_root]

    # --- ChunkStore ---

    def urls(self, posting):
        return {
            name: url for name, one in self.folders.items() for url in one.urls(posting).values()
        }

    def admit(self, *, stored_size_bytes, waiting_bytes):
        self.admitted.append((stored_size_bytes, waiting_bytes))
        if self.largest is not None and stored_size_bytes > self.largest:
            raise ChunkTooLarge(
                f"{stored_size_bytes} bytes take too long", fitting_bytes=self.largest
            )
        if stored_size_bytes + waiting_bytes > self.free_bytes:
            raise StoreError(
                f"{self.free_bytes} bytes are free, {stored_size_bytes} are needed beside "
                f"{waiting_bytes}"
            )

    def require_here(self):
        """Do nothing: it is always here."""

    def largest_chunk_bytes(self):
        return self.largest

    def staging_hold_seconds(self):
        return self.hold

    def bind(self):
        """Do nothing: each folder knows itself."""

    def post(self, chunk, log):
        self.admit(stored_size_bytes=chunk.stored_size_bytes, waiting_bytes=0)
        if chunk.merkle_root not in self.posts:
            posting = PostRecord(
                chunk.merkle_root, "owner", next(self._starts), chunk.stored_size_bytes
            )
            self.posts[chunk.merkle_root] = posting
            self.noted[chunk.merkle_root] = chunk.archive_id
            self.headers[chunk.merkle_root] = chunk.header_sha256
            self.macs[chunk.merkle_root] = chunk.mac
        return self.posts[chunk.merkle_root]

    def posted_already(self, chunk, log):
        return self.posts.get(chunk.merkle_root)

    def unknown_posts(self, archive_id, log):
        posted = [file.posting.merkle_root for file in self.posted(archive_id)]
        unknown = log.unknown_roots(posted, signed=False)
        log.record_look("owner", archive_id, 0, len(unknown))
        return unknown

    def put(self, posting, staged, progress, *, wrong=()):
        if self.posts.get(posting.merkle_root) != posting:
            raise StoreError("it was not posted")
        right = staged.read_bytes()
        for provider, folder in self.folders.items():
            self.unlisted.discard(provider)
            if provider in self.away:
                continue
            file = self.file(provider, posting)
            if provider in wrong or self._touches_lost(
                provider, 0, 1
            ):  # as one reads back the first bytes, but not all
                self.lost.pop(provider, None)
                file.unlink(missing_ok=True)
            if file.exists() and file.read_bytes() != right:
                file.unlink()
            folder.put(posting, staged, progress)

    def owner(self):
        return "owner"

    def posted(self, archive_id):
        return (
            self._listed_post(one)
            for one in self.posts.values()
            if self.noted[one.merkle_root] == archive_id
        )

    def posted_as(self, merkle_root):
        return [
            self._listed_post(posting)
            for posting in self.posts.values()
            if posting.merkle_root == merkle_root
        ]

    def posted_by(self, owner):
        return (
            self._listed_post(posting) for posting in self.posts.values() if posting.owner == owner
        )

    def _listed_post(self, posting):
        root = posting.merkle_root
        return PostedFile(posting, self.proof_type, self.headers.get(root), self.macs.get(root))

    def posted_at(self, postings):
        return [datetime.fromtimestamp(posting.start, UTC) for posting in postings]

    def archives(self, owner=None, *, log=None):
        times = defaultdict(list)
        for post in self.posts.values():
            times[self.noted[post.merkle_root]].append(datetime.fromtimestamp(post.start, UTC))
        return {
            archive: ArchiveFiles(len(posted), min(posted), max(posted))
            for archive, posted in times.items()
        }

    def copies(self, posting):
        return [
            Copy(
                name,
                f"{name}/{posting.start}",
                last_proven=posting.start,
                verified=name not in self.unverified,
            )
            for name in self._listed(posting)
        ]

    def holders(self, posting):
        return self._listed(posting)

    def read(self, posting, start_byte, end_byte, *, provider=None):
        listed = [provider] if provider else self._listed(posting)
        if not listed:
            raise StoredChunkMissing("nobody has it")
        if listed[0] in self.away:
            raise StoreUnreachable(f"{listed[0]} is away")
        if self._touches_lost(listed[0], start_byte, end_byte):
            raise StoreUnreachable(f"{listed[0]} does not answer in time")
        yield from self.folders[listed[0]].read(posting, start_byte, end_byte)

    def has_lost(self, posting, start_byte, end_byte, *, provider):
        return provider not in self.away and self._touches_lost(provider, start_byte, end_byte)

    def _touches_lost(self, provider, start_byte, end_byte):
        lost = self.lost.get(provider, (0, 0))
        return start_byte < lost[1] and lost[0] < end_byte

    def proof_window(self, posting, copy):
        return self.window

    def current_window(self, posting, height=None):
        return self.now

    def window_ends_in(self, posting, height=None):
        return None if self.now is None else 3600.0

    def listed_at(self):
        return self.height

    def file_pages(self, archive_id):
        for one in self.posts.values():
            if archive_id in (None, self.noted[one.merkle_root]):
                yield [
                    ListedFile(
                        one.merkle_root, one.owner, one.start, self._listed(one), WINDOW_BLOCKS
                    )
                ]

    def proof_pages(self, provider):
        for one in self.posts.values():
            if provider in self._listed(one):
                last = self.proven.get(provider, self.height)
                yield [ListedProof(one.merkle_root, one.owner, one.start, last)]

    def _listed(self, posting):
        if self.posts.get(posting.merkle_root) != posting:
            return []
        return [
            name
            for name, folder in self.folders.items()
            if name not in self.unlisted and folder.copies(posting)
        ]
