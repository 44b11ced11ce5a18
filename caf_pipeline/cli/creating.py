"""Archives from local files: which files and keys, cut into as many archives as it takes, written all or none."""

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from caf_pipeline.caf.archive import DEFAULT_LIMITS, PIECE_BYTES, CafWriter, Limits
from caf_pipeline.caf.index import EMPTY_INDEX_SIZE_BYTES, FOOTER_SIZE_BYTES, index_entry_size_bytes
from caf_pipeline.cli.terminal import note
from caf_pipeline.errors import ArchiveLimitReached, CafError, MemberRefused, StagingError, UsageError


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file as it was found: it must still be so when it is read."""

    path: str
    key: str
    size_bytes: int
    modified_ns: int


# --- which files ---------------------------------------------------------------------------------------------------


def find_files(paths: Iterable[Path], folder: Path, out: Path) -> list[LocalFile]:
    """Return the files at and below `paths`, each argument's in byte order of their keys. Nothing is opened.

    Args:
        paths: files and folders; a relative one is looked up in `folder`.
        folder: keys are relative to it.
        out: the archive to be written, which is left out with its numbered siblings, and told.

    Raises:
        UsageError: a path outside `folder`. MemberRefused: a name that is not UTF-8, or two paths of one key.
        CafError: a path that is missing, unreadable, or neither file nor folder.
    """
    own = _own_archives(out)
    found: dict[str, LocalFile] = {}
    for path in paths:
        for file in _walk(os.path.join(folder, path), _key_below(folder, path), own):
            if earlier := found.get(file.key):
                raise MemberRefused(
                    f"{earlier.path!r} and {file.path!r} would both have the key {file.key!r}.",
                    hint="Name each file or folder once.",
                )
            found[file.key] = file
    return list(found.values())


def _key_below(folder: Path, path: Path) -> str:
    """Return the path relative to the folder, with `/`, and "" for the folder itself."""
    base = os.path.abspath(folder)
    absolute = os.path.join(base, path)
    if ".." in path.parts or not _is_below(os.path.normpath(absolute), base):
        # `..` is where the file system says; and /tmp may be the same folder as /private/tmp.
        base = os.path.realpath(base)
        parent, name = os.path.split(absolute)
        absolute = os.path.realpath(absolute) if name == ".." else os.path.join(os.path.realpath(parent), name)
    absolute = os.path.normpath(absolute)
    if not _is_below(absolute, base):
        raise UsageError(
            f"{str(path)!r} is not below {str(folder)!r}.", hint="Keys are relative to DIR: name a folder above it with -C."
        )
    return "" if absolute == base else os.path.relpath(absolute, base)


def _is_below(path: str, base: str) -> bool:
    return path == base or path.startswith(base.rstrip("/") + "/")


def _own_archives(out: Path) -> Mapping[tuple[int, int], str]:
    """Return the files that already have one of the names that may be written, by device and inode."""
    numbered = re.compile(re.escape(_stem(out)) + r"-[0-9]{5,}\.caf")
    own: dict[tuple[int, int], str] = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(out.parent) as entries:
        for entry in entries:
            if entry.name == out.name or numbered.fullmatch(entry.name):
                status = entry.stat(follow_symlinks=False)
                own[status.st_dev, status.st_ino] = os.path.realpath(entry.path)
    return own


def _walk(root: str, root_key: str, own: Mapping[tuple[int, int], str]) -> Iterator[LocalFile]:
    """Yield the files at and below `root`. Links are followed, but not to a folder that is being walked already."""
    waiting: list[tuple[str, str, tuple[tuple[int, int], ...]]] = [(root, root_key, ())]
    while waiting:
        path, key, above = waiting.pop()
        with _named(path):
            status = os.stat(path)
            identity = (status.st_dev, status.st_ino)
            if stat.S_ISDIR(status.st_mode):
                if identity in above:
                    note(f"left out: {path!r} leads back to a folder above it")
                    continue
                names = reversed(_names_in_key_order(path))
                waiting.extend((f"{path}/{name}", f"{key}/{name}" if key else name, (*above, identity)) for name in names)
                continue
        if not stat.S_ISREG(status.st_mode):
            raise CafError(f"{path!r} is neither a file nor a folder.", hint="Only the bytes of files can be archived.")
        if identity in own and own[identity] == os.path.realpath(path):
            note(f"left out: {path!r} is where the archive is to be written")
            continue
        _check_name(path, key)
        yield LocalFile(path, key, status.st_size, status.st_mtime_ns)


def _names_in_key_order(path: str) -> list[str]:
    """List a folder so that the keys of all that is below come in byte order: `a.b` comes before what is in `a`."""
    with os.scandir(path) as entries:
        named = [(os.fsencode(entry.name) + (b"/" if _is_folder(entry) else b""), entry.name) for entry in entries]
    return [name for _, name in sorted(named)]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, which is told when its own turn comes
        return False


def _check_name(path: str, key: str) -> None:
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise MemberRefused(
            f"The name {path!r} is not valid UTF-8.", hint="Rename it: a CAF index holds UTF-8 names only."
        ) from error


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Turn the system's refusal into a sentence about the path."""
    try:
        yield
    except OSError as error:
        if os.path.islink(path) and not os.path.exists(path):
            raise CafError(f"The link {path!r} is broken: its target does not exist.", hint="Repair or remove it.") from error
        raise CafError(f"{path!r} cannot be read: {error.strerror}.") from error


# --- which archives ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Volume:
    """One archive to be, with its exact size so far."""

    files: list[LocalFile] = field(default_factory=list)
    body_bytes: int = 0
    index_bytes: int = EMPTY_INDEX_SIZE_BYTES

    def reason_against(self, file: LocalFile, target_bytes: int, limits: Limits) -> str:
        """Say why the file does not fit beside the others, or "" where it does. The target is no reason against the first."""
        body_bytes, index_bytes = self._with(file)
        size_bytes = body_bytes + index_bytes + FOOTER_SIZE_BYTES
        if self.files and size_bytes > target_bytes:
            return "it is over the target"
        return limits.reason_against(len(self.files) + 1, index_bytes, size_bytes)

    def add(self, file: LocalFile) -> None:
        """Add a file."""
        self.body_bytes, self.index_bytes = self._with(file)
        self.files.append(file)

    def _with(self, file: LocalFile) -> tuple[int, int]:
        body_bytes = self.body_bytes + file.size_bytes
        entry_bytes = index_entry_size_bytes(file.key, self.body_bytes, body_bytes) + bool(self.files)
        return body_bytes, self.index_bytes + entry_bytes


def cut_into_archives(
    files: Iterable[LocalFile], target_bytes: int, limits: Limits = DEFAULT_LIMITS
) -> list[Sequence[LocalFile]]:
    """Cut files, in their order, into archives of at most `target_bytes`; always at least one.

    A file that is larger than the target has an archive of its own.

    Raises:
        ArchiveLimitReached: a file does not fit any archive.
    """
    volumes = [_Volume()]
    for file in files:
        reason = volumes[-1].reason_against(file, target_bytes, limits)
        if reason and volumes[-1].files:
            volumes.append(_Volume())
            reason = volumes[-1].reason_against(file, target_bytes, limits)
        if reason:
            raise ArchiveLimitReached(f"{file.path!r} of {file.size_bytes} bytes fits no archive: {reason}.")
        volumes[-1].add(file)
    return [volume.files for volume in volumes]


def archive_paths(out: Path, count: int) -> list[Path]:
    """Return the name of the one archive, `out`, or of several: `out-00001.caf` and so on.

    Raises:
        UsageError: one of a longer series is in the way, which would look like part of this one.
    """
    if count == 1:
        return [out]
    paths = [out.with_name(f"{_stem(out)}-{number:05}.caf") for number in range(1, count + 1)]
    beyond = out.with_name(f"{_stem(out)}-{count + 1:05}.caf")
    if os.path.lexists(beyond):
        raise UsageError(
            f"{str(beyond)!r} belongs to an earlier, longer series of archives; only {count} would be written now.",
            hint="Remove the old series, or choose another name.",
        )
    return paths


def _stem(out: Path) -> str:
    return out.name.removesuffix(".caf")


# --- writing -------------------------------------------------------------------------------------------------------


def write_archives(
    volumes: Sequence[Sequence[LocalFile]], paths: Sequence[Path], advance: Callable[[int], None]
) -> list[CafWriter]:
    """Write all archives under temporary names, then give all their names; return their writers, which are done.

    `advance` is told bytes of bodies.

    Raises:
        CafError: a file cannot be read, or changed since it was found. StagingError: an archive cannot be written.
    """
    writers: list[CafWriter] = []
    with contextlib.ExitStack() as stack:
        try:
            for path, files in zip(paths, volumes, strict=True):
                writer = stack.enter_context(CafWriter(path))
                for file in files:
                    writer.add(file.key, file.size_bytes, _read(file, advance))
                writer.seal()
                writers.append(writer)
            for writer in writers:
                writer.publish()
        except OSError as error:
            raise StagingError(f"{str(path)!r} cannot be written: {error.strerror}.") from error
    return writers


def _read(file: LocalFile, advance: Callable[[int], None]) -> Iterator[bytes]:
    """Yield a file's bytes; raise CafError where it is not what was found."""
    done = 0
    with _named(file.path):
        # Something else may be there by now: a pipe must not be waited for.
        descriptor = os.open(file.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            while piece := os.read(descriptor, min(PIECE_BYTES, file.size_bytes + 1 - done)):
                done += len(piece)
                if done > file.size_bytes:
                    break
                yield piece
                advance(len(piece))
            unchanged = done == file.size_bytes and os.fstat(descriptor).st_mtime_ns == file.modified_ns
        finally:
            os.close(descriptor)
    if not unchanged:
        raise CafError(f"{file.path!r} changed while the archive was made.", hint="Run it again when nothing writes there.")
