"""Creates CAF archives from local files, all or none."""

import contextlib
import hashlib
import os
import re
import stat
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate, islice
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from caf_pipeline.caf.archive import DEFAULT_LIMITS, PIECE_BYTES, CafWriter, Limits
from caf_pipeline.caf.index import EMPTY_INDEX_SIZE_BYTES, FOOTER_SIZE_BYTES, index_entry_size_bytes
from caf_pipeline.caf.merkle import FileRoots
from caf_pipeline.cli.terminal import note
from caf_pipeline.errors import (
    ArchiveLimitReached,
    CafError,
    MemberRefused,
    StagingError,
    UsageError,
)
from caf_pipeline.system.atomic_files import WholeFile
from caf_pipeline.system.hashes import RunningHash
from caf_pipeline.system.small_files import list_folder, read_files

_PIECES_BEHIND: Final = 8  # pieces of 1 MiB that wait for their hash

READERS: Final = 2
"""One thread waits for the disk while the other hashes."""


class InputFile(msgspec.Struct, frozen=True, gc=False):
    """A file and its state, which must not change before it is read.

    The size is -1 until `os.stat` is called. A Struct without garbage collection: there may be a
    million.
    """

    path: str
    key: str
    size_bytes: int
    modified_ns: int


# --- which files


def find_files(
    paths: Iterable[Path], folder: Path, out: Path, sums: Path | None = None
) -> list[InputFile]:
    """Return the files at and below `paths`, sorted by their keys below each path.

    Opens no file. Paths and keys are relative to `folder`. Outputs are left out with a note.

    Raises:
        UsageError: A path is outside of `folder`.
        MemberRefused: A name is not UTF-8, or two paths have one key.
        CafError: A path cannot be read.
    """
    numbered = re.compile(re.escape(_stem(out)) + r"-[0-9]{5,}\.caf")
    written = [sums] if sums else []
    with contextlib.suppress(FileNotFoundError), os.scandir(out.parent) as entries:
        written += [
            out.parent / entry.name
            for entry in entries
            if entry.name == out.name or numbered.fullmatch(entry.name)
        ]
    outputs: dict[tuple[int, int], str] = {}  # paths by device and inode
    for path in written:
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            outputs[status.st_dev, status.st_ino] = os.path.realpath(path)
    files = [
        file
        for path in paths
        for file in _walk(os.path.join(folder, path), _key_below(folder, path), outputs)
    ]
    if len({file.key for file in files}) < len(files):
        first: dict[str, InputFile] = {}
        for file in files:
            if (earlier := first.setdefault(file.key, file)) is not file:
                raise MemberRefused(
                    f"{earlier.path!r} and {file.path!r} would both have the key {file.key!r}.",
                    hint="Name each file or folder once.",
                )
    return files


def _key_below(folder: Path, path: Path) -> str:
    """Return a path with `/`; "" for the folder itself."""
    base = os.path.abspath(folder)
    absolute = os.path.join(base, path)
    if ".." in path.parts or not _is_below(os.path.normpath(absolute), base):
        # Resolve `..` and links by the file system: /tmp may be a link to /private/tmp.
        base = os.path.realpath(base)
        parent, name = os.path.split(absolute)
        absolute = (
            os.path.realpath(absolute)
            if name == ".."
            else os.path.join(os.path.realpath(parent), name)
        )
    absolute = os.path.normpath(absolute)
    if not _is_below(absolute, base):
        raise UsageError(
            f"{str(path)!r} is not below {str(folder)!r}.",
            hint="Keys are relative to DIR: name a folder above it with -C.",
        )
    return "" if absolute == base else os.path.relpath(absolute, base)


def _is_below(path: str, base: str) -> bool:
    return path == base or path.startswith(base.rstrip("/") + "/")


def _walk(root: str, root_key: str, outputs: Mapping[tuple[int, int], str]) -> Iterator[InputFile]:
    """Follows links, but not back to a folder above."""
    output_names = {os.path.basename(path) for path in outputs.values()}
    waiting: list[tuple[Iterator[InputFile], tuple[tuple[int, int], ...]]] = [
        (iter([InputFile(root, root_key, -1, 0)]), ())
    ]
    while waiting:
        entries, above = waiting[-1]
        for file in entries:
            if file.size_bytes >= 0:
                yield file
                continue
            path = file.path
            try:
                status = os.stat(path)
                if stat.S_ISDIR(status.st_mode):
                    folder = (status.st_dev, status.st_ino)
                    if folder in above:
                        note(f"left out: {path!r} leads back to a folder above it")
                        continue
                    prefix = f"{file.key}/" if file.key else ""
                    # The listing of a folder has sizes. Size -1: look at the file itself.
                    children = [
                        InputFile(
                            f"{path}/{name}",
                            prefix + name,
                            -1 if name in output_names else size_bytes,
                            modified_ns,
                        )
                        for name, size_bytes, modified_ns in list_folder(path)
                    ]
                    waiting.append((iter(children), (*above, folder)))
                    break
            except OSError as error:
                raise _unreadable(path, error) from error
            if not stat.S_ISREG(status.st_mode):
                raise CafError(
                    f"{path!r} is neither a file nor a folder.",
                    hint="Only the bytes of files can be archived.",
                )
            output = outputs.get((status.st_dev, status.st_ino))
            if output and output == os.path.realpath(path):
                note(f"left out: {path!r} is an output of this command")
                continue
            try:
                file.key.encode()
            except UnicodeEncodeError as error:
                raise MemberRefused(
                    f"The name {path!r} is not valid UTF-8.",
                    hint="Rename it: a CAF index holds UTF-8 names only.",
                ) from error
            yield InputFile(path, file.key, status.st_size, status.st_mtime_ns)
        else:
            waiting.pop()


def _unreadable(path: str, error: OSError) -> CafError:
    if os.path.islink(path) and not os.path.exists(path):
        return CafError(
            f"The link {path!r} is broken: its target does not exist.", hint="Repair or remove it."
        )
    return CafError(f"{path!r} cannot be read: {error.strerror}.")


# --- which archives


@dataclass(slots=True)
class _Volume:
    files: list[InputFile] = field(default_factory=list)
    body_bytes: int = 0
    index_bytes: int = EMPTY_INDEX_SIZE_BYTES

    def reason_against(self, file: InputFile, target_bytes: int, limits: Limits) -> str:
        body_bytes, index_bytes = self._with(file)
        size_bytes = body_bytes + index_bytes + FOOTER_SIZE_BYTES
        if self.files and size_bytes > target_bytes:
            return "it is over the target"
        return limits.reason_against(len(self.files) + 1, index_bytes, size_bytes)

    def add(self, file: InputFile) -> None:
        self.body_bytes, self.index_bytes = self._with(file)
        self.files.append(file)

    def _with(self, file: InputFile) -> tuple[int, int]:
        body_bytes = self.body_bytes + file.size_bytes
        entry_bytes = index_entry_size_bytes(file.key, self.body_bytes, body_bytes) + bool(
            self.files
        )
        return body_bytes, self.index_bytes + entry_bytes


def cut_into_archives(
    files: Sequence[InputFile], target_bytes: int, limits: Limits = DEFAULT_LIMITS
) -> list[Sequence[InputFile]]:
    """Cut files, in their order, into at least one archive of at most `target_bytes` each.

    A larger file has an archive of its own.

    Raises:
        ArchiveLimitReached: A file does not fit any archive.
    """
    # An upper bound: adding a million files one by one takes 2.1 s instead of 0.1 s.
    # A character takes at most six bytes, escaped. No end byte has more digits than the limit.
    key_bytes = 6 * sum(len(file.key) for file in files)
    entry_bytes = index_entry_size_bytes("", limits.max_bytes, limits.max_bytes) + 1
    index_bytes = EMPTY_INDEX_SIZE_BYTES + key_bytes + len(files) * entry_bytes
    size_bytes = sum(file.size_bytes for file in files) + index_bytes + FOOTER_SIZE_BYTES
    if size_bytes <= target_bytes and not limits.reason_against(
        len(files), index_bytes, size_bytes
    ):
        return [files]
    volumes = [_Volume()]
    for file in files:
        reason = volumes[-1].reason_against(file, target_bytes, limits)
        if reason and volumes[-1].files:
            volumes.append(_Volume())
            reason = volumes[-1].reason_against(file, target_bytes, limits)
        if reason:
            raise ArchiveLimitReached(
                f"{file.path!r} of {file.size_bytes} bytes fits no archive: {reason}."
            )
        volumes[-1].add(file)
    return [volume.files for volume in volumes]


def archive_paths(out: Path, count: int) -> list[Path]:
    """Return `out` for one archive, or `out-00001.caf` and so on.

    Raises:
        UsageError: The next number exists, and would look like part of this series.
    """
    if count == 1:
        return [out]
    paths = [out.with_name(f"{_stem(out)}-{number:05}.caf") for number in range(1, count + 1)]
    beyond = out.with_name(f"{_stem(out)}-{count + 1:05}.caf")
    if os.path.lexists(beyond):
        raise UsageError(
            f"{str(beyond)!r} belongs to a longer series of archives; this one has only {count}.",
            hint="Remove the old series, or choose another name.",
        )
    return paths


def _stem(out: Path) -> str:
    return out.name.removesuffix(".caf")


# --- writing


# coreutils' sha256sum begins a line with escapes with a backslash.
_SUM_ESCAPES: Final = str.maketrans({"\\": "\\\\", "\n": "\\n", "\r": "\\r"})


class WrittenArchive(NamedTuple):
    """A sealed archive, and its Merkle root if requested."""

    archive: CafWriter
    merkle_root: bytes = b""


def write_archives(
    volumes: Sequence[Sequence[InputFile]],
    paths: Sequence[Path],
    advance: Callable[[int], None],
    sums: Path | None = None,
    proof_type: int | None = None,
) -> list[WrittenArchive]:
    """Write all archives under temporary names, then rename all of them.

    `advance` gets the number of bytes packed; `sums` the members' SHA-256 for `sha256sum --check`.
    `proof_type` None computes no Merkle root.

    Raises:
        CafError: A file cannot be read, or changed.
        StagingError: An archive cannot be written.
    """
    written: list[WrittenArchive] = []
    path = sums
    try:
        with contextlib.ExitStack() as stack:
            # The sums get their name when the context ends.
            lines = stack.enter_context(WholeFile(sums)) if sums else None
            for path, files in zip(paths, volumes, strict=True):
                writer = stack.enter_context(CafWriter(path))
                written.append(_write_archive(writer, files, advance, lines, proof_type))
            for archive, _ in written:
                archive.publish()
            path = sums or path
    except OSError as error:
        raise StagingError(f"{str(path)!r} cannot be written: {error.strerror}.") from error
    return written


def _write_archive(
    archive: CafWriter,
    files: Sequence[InputFile],
    advance: Callable[[int], None],
    sums: WholeFile | None,
    proof_type: int | None,
) -> WrittenArchive:
    with contextlib.ExitStack() as stack:
        roots = (
            stack.enter_context(FileRoots(archive.temporary, proof_type))
            if proof_type is not None
            else None
        )

        def added(size_bytes: int) -> None:
            advance(size_bytes)
            if roots:
                roots.follow()

        for keys, digests in _add_files(archive, files, added, hashed=sums is not None):
            if sums:
                for key, digest in zip(keys, digests, strict=True):
                    name = key.translate(_SUM_ESCAPES)
                    escape = b"" if name == key else b"\\"
                    sums.file.write(b"%b%b  %b\n" % (escape, digest.hex().encode(), name.encode()))
        archive.seal()
        return WrittenArchive(archive, roots.finish()[0] if roots else b"")


def _add_files(
    writer: CafWriter, files: Sequence[InputFile], advance: Callable[[int], None], *, hashed: bool
) -> Iterator[tuple[Sequence[str], Sequence[bytes]]]:
    with (
        ThreadPoolExecutor(READERS, "reader") as readers,
        ThreadPoolExecutor(1, "hasher") as hasher,
    ):
        for group, bodies, (count, digests) in _read_ahead(files, readers, hashed=hashed):
            if count:
                keys = [file.key for file in group[:count]]
                sizes = [file.size_bytes for file in group[:count]]
                size_bytes = sum(sizes)
                writer.add_neighbours(keys, sizes, bodies[:size_bytes])
                yield keys, digests
                advance(size_bytes)
            for file in group[count:]:
                sha256 = hashlib.sha256() if hashed else None
                writer.add(file.key, file.size_bytes, _stream(file, advance, sha256, hasher))
                yield [file.key], [sha256.digest()] if sha256 else []


def _read_ahead(
    files: Sequence[InputFile], readers: Executor, *, hashed: bool
) -> Iterator[tuple[Sequence[InputFile], memoryview, tuple[int, list[bytes]]]]:
    """Yield groups of small files with their bodies and the result of `read_files`.

    A large file is a group of its own, and not read. Bodies are valid until the next group.
    """
    reading: deque[tuple[Sequence[InputFile], bytearray, Future[tuple[int, list[bytes]]]]] = deque()
    # Each thread works on one buffer while the next one waits.
    unused = [bytearray(PIECE_BYTES + 1) for _ in range(2 * READERS)]
    groups = _groups(files)
    while True:
        for group in islice(groups, len(unused)):
            paths, sizes = [file.path for file in group], [file.size_bytes for file in group]
            modified_ns = [file.modified_ns for file in group]
            buffer = unused.pop()
            reading.append(
                (
                    group,
                    buffer,
                    readers.submit(read_files, buffer, paths, sizes, modified_ns, hashed),
                )
            )
        if not reading:
            return
        group, buffer, read = reading.popleft()
        yield group, memoryview(buffer), read.result()
        unused.append(buffer)


def _groups(files: Sequence[InputFile]) -> Iterator[Sequence[InputFile]]:
    ends = array("Q", accumulate(file.size_bytes for file in files))
    first = end_byte = 0
    while first < len(files):
        last = max(first + 1, bisect_right(ends, end_byte + PIECE_BYTES))
        yield files[first:last]
        first, end_byte = last, ends[last - 1]


def _stream(
    file: InputFile, advance: Callable[[int], None], sha256: RunningHash | None, hasher: Executor
) -> Iterator[bytes]:
    """Yield a file's bytes while a thread hashes them."""
    hashing: deque[Future[None]] = deque()
    for piece in _read(file):
        if sha256:
            hashing.append(hasher.submit(sha256.update, piece))
            if len(hashing) > _PIECES_BEHIND:
                hashing.popleft().result()
        yield piece
        advance(len(piece))
    for piece_hashed in hashing:
        piece_hashed.result()


def _read(file: InputFile) -> Iterator[bytes]:
    done = 0
    try:
        # Never wait for a pipe, which may have replaced the file.
        descriptor = os.open(file.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            while piece := os.read(descriptor, min(PIECE_BYTES, file.size_bytes + 1 - done)):
                done += len(piece)
                if done > file.size_bytes:
                    break
                yield piece
            unchanged = (
                done == file.size_bytes and os.fstat(descriptor).st_mtime_ns == file.modified_ns
            )
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _unreadable(file.path, error) from error
    if not unchanged:
        raise CafError(
            f"{file.path!r} changed while the archive was made.",
            hint="Try again when no program writes to it.",
        )
