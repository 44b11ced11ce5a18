"""`caf://SOURCE/KEY` for fsspec, and so for pandas, polars, pyarrow, DuckDB and dask: what is
archived, to be read.

A directory is what keys have in common up to a '/'. As in other object stores' file systems a key
that ends in '/' has no path; fsspec cuts the '/' off, and where that can be seen, what is there
without it is not given. Where a key is also the beginning of others (`a` and `a/b`), `info` says
that it is a file, and `ls` what is below it. A part of a key that is empty (`a//b`) is not a
directory: `find` and `open` know such keys, `ls` and `walk` do not.

Source: fsspec's AbstractFileSystem, whose protocol asks for Python's own errors: FileNotFoundError,
and the OSError of a file system that is read-only. All other errors are those of `Archive`.
"""

import atexit
import errno
import io
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from glob import has_magic
from pathlib import Path
from typing import IO, Any, ClassVar, NoReturn, cast

from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.spec import AbstractFileSystem
from fsspec.utils import isfilelike

from caf_pipeline.errors import NotLocated, UsageError, with_hint
from caf_pipeline.ledger.records import Location
from caf_pipeline.retrieval.archive import Archive
from caf_pipeline.retrieval.object_file import BLOCK_BYTES
from caf_pipeline.retrieval.reader import ArchivedObject, write_whole
from caf_pipeline.settings import CONFIG_VARIABLE, Settings, load_settings
from caf_pipeline.wiring import open_archive

Info = dict[str, Any]


class OpenedFile(io.BufferedReader):
    """An archived object that is open, with what fsspec's own code asks of its files: `read_block`,
    and the cache of blocks.

    That cache is not filled: what is read is asked for from providers. `simplecache` and
    `filecache` keep whole files.
    """

    def __init__(self, path: str, found: ArchivedObject) -> None:
        """Prepare to read; nothing is asked for yet."""
        super().__init__(found.open(), BLOCK_BYTES)
        self.path = path
        self.size = found.location.size_bytes
        self.blocksize = BLOCK_BYTES

    @property
    def closed(self) -> bool:
        """Whether it is closed; the cache of blocks says so, too, once it has closed it."""
        return super().closed

    @closed.setter
    def closed(self, is_closed: bool) -> None:
        pass

    def _fetch_range(self, start_byte: int, end_byte: int) -> bytes:
        self.seek(start_byte)
        return self.read(end_byte - start_byte)


class _Told:
    """A file to write to, that tells a callback of fsspec how much was written; less again where
    some of it is void.
    """

    def __init__(self, file: IO[bytes], callback: Any) -> None:  # noqa: ANN401
        self._file = file
        self._callback = callback

    def write(self, piece: bytes) -> int:
        written = self._file.write(piece)
        self._callback.relative_update(written)
        return written

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int) -> int:
        return self._file.seek(offset)

    def truncate(self) -> int:
        at, end = self._file.tell(), self._file.seek(0, os.SEEK_END)
        self._file.seek(at)
        self._callback.relative_update(at - end)
        return self._file.truncate()


class _Here:
    """What settings are taken by where none are named; fsspec gives no file system again that was
    made elsewhere.
    """

    def __get__(self, instance: object, owner: type) -> tuple[str, str | None]:
        try:
            return os.getcwd(), os.environ.get(CONFIG_VARIABLE)
        except FileNotFoundError:  # it was removed
            return "", os.environ.get(CONFIG_VARIABLE)


class CafFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """What is archived, as a file system that is read-only.

    fsspec makes one for each thread and working folder. All with the same settings share an
    archive, which is opened when it is first asked; a forked process opens its own.
    """

    protocol = "caf"
    root_marker = ""

    _here: ClassVar = _Here()
    _extra_tokenize_attributes = ("_here",)
    _lock: ClassVar = threading.Lock()
    _archives: ClassVar[list[tuple[int, Settings, Archive]]] = []
    _archive: tuple[int, Archive] | None = None

    def __init__(self, config: str | os.PathLike[str] | None = None, **options: Any) -> None:  # noqa: ANN401 - fsspec's own
        """Take the settings of this file, or of those that `caf` would take here."""
        _only_open_has_versions(options)
        super().__init__(config=config, **options)
        self.config = config

    @property
    def archive(self) -> Archive:
        """What is read."""
        if self._archive is None or self._archive[0] != os.getpid():
            self._archive = (
                os.getpid(),
                self._shared(load_settings(Path(self.config) if self.config is not None else None)),
            )
        return self._archive[1]

    @classmethod
    def _shared(cls, settings: Settings) -> Archive:
        with cls._lock:
            for pid, known, archive in cls._archives:
                if (pid, known) == (os.getpid(), settings):
                    return archive
            archive = open_archive(settings)
            cls._archives.append((os.getpid(), settings, archive))
            atexit.register(_close, os.getpid(), archive)
            return archive

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:  # noqa: ANN401 - fsspec's own: a path, or a list of some
        """Return `SOURCE/KEY` as fsspec does; no source has an empty name, so that '/' in front
        says nothing.
        """
        stripped = super()._strip_protocol(path)
        return stripped.lstrip("/") if isinstance(stripped, str) else stripped

    # --- what there is
    # --------------------------------------------------------------------------------

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:  # noqa: ANN401
        """List a directory; of a file, itself. Keys come in the order of their bytes."""
        _only_open_has_versions(options)
        path = self._strip_protocol(path)
        source, key = _split(path)
        if not source:
            found = [_directory(name) for name in self.archive.sources()]
        else:
            prefix = f"{key}/" if key else ""
            with _not_found(path):
                entries = self.archive.ls(source, prefix)
                named = (
                    entry
                    for entry in entries
                    if not (entry if isinstance(entry, str) else entry.row.key).endswith("//")
                )
                found = [
                    _directory(f"{source}/{one[:-1]}")
                    if isinstance(one, str)
                    else _file(source, one)
                    for one in named
                ]
            found = [one for one in found if not one["name"].endswith("/")]
            if not found and key:
                found = [one for one in [self.info(path)] if one["type"] == "file"]
        return found if detail else [one["name"] for one in found]

    def info(self, path: str, **options: Any) -> Info:  # noqa: ANN401
        """Return name, size, type; of a file LastModified, ETag, SHA-256, object version and
        status, too, by one look-up.

        Raises: FileNotFoundError: why the key is not archived, where that is known; or the path
            ends in '/', and is no directory.
        """
        _only_open_has_versions(options)
        given, path = path, self._strip_protocol(path)
        source, key = _split(path)
        if not source or (not key and source in self.archive.sources()):
            return _directory(path)
        with _not_found(path):
            try:
                return _file(source, self.archive.find(*self._file_at(given)).location)
            except (NotLocated, FileNotFoundError):
                if next(self.archive.ls(source, f"{key}/"), None) is None:
                    raise
                return _directory(path)

    def exists(self, path: str, **options: Any) -> bool:  # noqa: ANN401
        """Return whether there is such a file or directory.

        Where the archive cannot be read, raise its error.
        """
        try:
            self.info(path, **options)
        except FileNotFoundError:
            return False
        return True

    lexists = exists  # fsspec's own would pass the options over

    def isfile(self, path: str) -> bool:
        """Return whether it is a file; errors as `exists`."""
        try:
            return bool(self.info(path)["type"] == "file")
        except FileNotFoundError:
            return False

    def modified(self, path: str) -> datetime:
        """Return a file's LastModified in S3."""
        with _not_found(path):
            return self.archive.find(*self._file_at(path)).location.row.last_modified

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        **options: Any,  # noqa: ANN401
    ) -> list[str] | dict[str, Info]:
        """Return all files below a path, by a page of keys at a time instead of a question for each
        directory.
        """
        _only_open_has_versions(options)
        path = self._strip_protocol(path)
        source, key = _split(path)
        if maxdepth is not None:
            below: list[str] | dict[str, Info] = super().find(
                path, maxdepth, withdirs, detail, **options
            )
            return below
        found: dict[str, Info] = {}
        if not source:
            for name in self.archive.sources():
                of_source = self.find(name, withdirs=withdirs, detail=True)
                assert isinstance(of_source, dict)
                found |= ({name: _directory(name)} if withdirs else {}) | of_source
            return dict(sorted(found.items())) if detail else sorted(found)
        try:
            for one in self.archive.ls(source, f"{key}/" if key else "", recursive=True):
                assert isinstance(one, Location)
                info = _file(source, one)
                if not info["name"].endswith("/"):
                    found[info["name"]] = info
                at = len(info["name"])
                while withdirs and (at := info["name"].rfind("/", 0, at)) >= len(path):
                    found.setdefault(info["name"][:at], _directory(info["name"][:at]))
        except NotLocated:  # no such source: nothing is found, as by any other file system
            return {} if detail else []
        if not found and self.isfile(path):
            found[path] = self.info(path)
        names = sorted(name for name in found if not name.endswith("/"))
        return {name: found[name] for name in names} if detail else names

    # --- bytes
    # --------------------------------------------------------------------------------

    def open(self, path: str, mode: str = "rb", *given: Any, **options: Any) -> Any:  # noqa: ANN401 - fsspec's own
        """Open a file, as `_open`; the path is looked at before fsspec cuts a '/' off."""
        if mode.startswith("r"):
            self._file_at(path)
        return super().open(path, mode, *given, **options)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> io.BufferedReader:  # noqa: ANN401
        """Open a file: `object_version` names one version, `as_of` a time.

        What is compared when is as `Archive.open` says.
        """
        if mode != "rb":
            self._refuse(path)
        path = self._strip_protocol(path)
        with _not_found(path):
            found = self.archive.find(
                *_split(path), options.get("object_version"), as_of=options.get("as_of")
            )
        return OpenedFile(path, found)

    def cat_file(
        self,
        path: str,
        start: int | None = None,
        end: int | None = None,
        **options: Any,  # noqa: ANN401
    ) -> bytes:
        """Return a file's bytes, or a slice of them."""
        _only_open_has_versions(options)
        source, key = self._file_at(path)
        with _not_found(path):
            if start is None and end is None:
                return self.archive.read(source, key)
            (one,) = self.archive.read_many(source, [(key, start, end)])
            return one.body

    def cat_ranges(
        self,
        paths: list[str],
        starts: int | Sequence[int | None] | None,
        ends: int | Sequence[int | None] | None,
        max_gap: int | None = None,
        on_error: str = "return",
        **options: Any,  # noqa: ANN401
    ) -> list[bytes | Exception]:
        """Return slices of files; those that lie close in a chunk are one request, and `max_gap` is
        not asked.
        """
        _only_open_has_versions(options)
        if not isinstance(paths, list):
            raise TypeError("paths is a list")
        begins = list(starts) if isinstance(starts, Iterable) else [starts] * len(paths)
        stops = list(ends) if isinstance(ends, Iterable) else [ends] * len(paths)
        if not len(paths) == len(begins) == len(stops):
            raise ValueError("there are not as many starts and ends as paths")
        by_source = defaultdict[str, list[tuple[int, str]]](list)
        given: list[bytes | Exception] = [b""] * len(paths)
        for number, path in enumerate(paths):
            try:
                source, key = self._file_at(path)
            except FileNotFoundError as error:
                if on_error != "return":
                    raise
                given[number] = error
            else:
                by_source[source].append((number, key))
        for source, asked in by_source.items():
            for one in self.archive.read_many(
                source, [(key, begins[number], stops[number]) for number, key in asked]
            ):
                number = asked[one.number][0]
                try:
                    with _not_found(paths[number]):
                        given[number] = one.body
                except Exception as error:
                    if on_error != "return":
                        raise
                    given[number] = error
        return given

    def cat(
        self,
        path: Any,  # noqa: ANN401
        recursive: bool = False,
        on_error: str = "raise",
        **options: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Return files' bytes, by few requests where a list names them."""
        _only_open_has_versions(options)
        if not recursive:
            self._refuse_other_files(path if isinstance(path, list) else [path])
        if recursive or not isinstance(path, list):
            return super().cat(path, recursive, on_error, **options)
        paths = self.expand_path(path)
        found = zip(
            paths,
            self.cat_ranges(
                paths, None, None, on_error="raise" if on_error == "raise" else "return"
            ),
            strict=True,
        )
        return {name: body for name, body in found if on_error != "omit" or isinstance(body, bytes)}

    def get(
        self,
        rpath: Any,  # noqa: ANN401
        lpath: Any,  # noqa: ANN401
        recursive: bool = False,
        callback: Any = DEFAULT_CALLBACK,  # noqa: ANN401
        maxdepth: int | None = None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        """Write files, and what is below directories, as their keys say.

        Raises: UsageError: a key among those that a directory or a pattern stands for is no path,
            so that its file would be another
                key's, or outside; nothing is written.
        """
        _only_open_has_versions(options)
        paths = rpath if isinstance(rpath, list) else [rpath]
        if not recursive:
            self._refuse_other_files(paths)
            if isinstance(rpath, str) and isinstance(lpath, str) and self._is_key_with_magic(rpath):
                inside = lpath.endswith(os.sep) or os.path.isdir(
                    lpath
                )  # fsspec puts what a pattern stands for into a folder
                rpath, lpath = (
                    [rpath],
                    [os.path.join(lpath, os.path.basename(rpath)) if inside else lpath],
                )
        is_expanded = recursive or any(has_magic(self._strip_protocol(path)) for path in paths)
        if is_expanded and not (isinstance(rpath, list) and isinstance(lpath, list)):
            for path in self.expand_path(rpath, recursive=recursive, maxdepth=maxdepth):
                _, key = _split(path)
                if key and not {"", ".", ".."}.isdisjoint(key.split("/")):
                    raise UsageError(
                        f"{path!r} cannot be a path: it has a part that is empty, '.' or '..'",
                        hint="'caf restore' writes any key",
                    )
        super().get(
            rpath, lpath, recursive=recursive, callback=callback, maxdepth=maxdepth, **options
        )

    def get_file(
        self,
        rpath: str,
        lpath: Any,  # noqa: ANN401
        callback: Any = DEFAULT_CALLBACK,  # noqa: ANN401
        outfile: Any = None,  # noqa: ANN401
        **options: Any,  # noqa: ANN401
    ) -> None:
        """Write a file; it appears when it is whole and was compared.

        `callback` is told the size, and how far it is.
        """
        _only_open_has_versions(options)
        callback = callback or DEFAULT_CALLBACK
        if outfile is not None or isfilelike(lpath):
            super().get_file(rpath, lpath, outfile=outfile, callback=callback, **options)
        elif self.isdir(rpath):
            os.makedirs(lpath, exist_ok=True)
        else:
            Path(lpath).parent.mkdir(parents=True, exist_ok=True)
            with _not_found(rpath), _not_written():
                found = self.archive.find(*self._file_at(rpath))
                callback.set_size(found.location.size_bytes)
                write_whole(
                    Path(lpath),
                    lambda file: found.write_to(cast("IO[bytes]", _Told(file, callback))),
                )

    def expand_path(
        self,
        path: Any,  # noqa: ANN401
        recursive: bool = False,
        maxdepth: int | None = None,
        assume_literal: bool = False,
        **options: Any,  # noqa: ANN401
    ) -> list[str]:
        """Return the paths that patterns and directories stand for; a key that has a pattern's
        characters stands for itself.
        """
        _only_open_has_versions(options)
        paths = [path] if isinstance(path, str | os.PathLike) else list(path)
        keys = [] if assume_literal else [one for one in paths if self._is_key_with_magic(one)]
        if not keys:
            found: list[str] = super().expand_path(
                paths, recursive, maxdepth, assume_literal=assume_literal, **options
            )
            return found
        literal = super().expand_path(keys, recursive, maxdepth, assume_literal=True, **options)
        others = [one for one in paths if one not in keys]
        with suppress(FileNotFoundError):
            literal += super().expand_path(others, recursive, maxdepth, **options) if others else []
        return sorted(set(literal))

    def _is_key_with_magic(self, path: Any) -> bool:  # noqa: ANN401
        """Tell whether a path, which a pattern of fsspec could be, is a file's, as `a[1].txt`."""
        stripped = self._strip_protocol(path)
        return has_magic(stripped) and not _ends_in_slash(path) and self.isfile(stripped)

    def _file_at(self, path: str) -> tuple[str, str]:
        """Return source and key of a file; raise FileNotFoundError where the path, as it is given,
        ends in '/'.
        """
        source, key = _split(self._strip_protocol(path))
        if key and _ends_in_slash(path):
            raise FileNotFoundError(
                errno.ENOENT,
                "no path of a file ends in '/'; 'caf get' and Archive.read give a key that does",
                path,
            )
        return source, key

    def _refuse_other_files(self, paths: Sequence[str]) -> None:
        """Raise FileNotFoundError where fsspec would cut a '/' off a path and take what is a file
        then; a directory has none.
        """
        for path in paths:
            if _ends_in_slash(path) and self.isfile(self._strip_protocol(path)):
                self._file_at(path)

    # --- what is refused
    # --------------------------------------------------------------------------------

    def _refuse(self, path: Any, *_: Any, **__: Any) -> NoReturn:  # noqa: ANN401
        raise OSError(errno.EROFS, "what is archived can be read, and not written, here", path)

    mkdir = makedirs = rmdir = rm = rm_file = _rm = mv = cp_file = copy = touch = pipe_file = (
        put_file
    ) = put = _refuse


def _close(pid: int, archive: Archive) -> None:
    """Close what this process opened; a child that was forked would end its parent's
    connections.
    """
    if pid == os.getpid():
        archive.close()


def _only_open_has_versions(options: Mapping[str, object]) -> None:
    """Refuse what would be passed over: fsspec hands any option on, and the current content would
    be taken for the asked one.
    """
    for name in ("object_version", "as_of"):
        if options.get(name) is not None:
            raise TypeError(f"{name} is an option of open() alone: fs.open(path, {name}=…)")


def _split(path: str) -> tuple[str, str]:
    source, _, key = path.partition("/")
    return source, key


def _ends_in_slash(path: object) -> bool:
    return isinstance(path, str) and path.endswith("/")


def _directory(path: str) -> Info:
    return {"name": path, "size": 0, "type": "directory"}


def _file(source: str, one: Location) -> Info:
    return {
        "name": f"{source}/{one.row.key}",
        "size": one.size_bytes,
        "type": "file",
        "LastModified": one.row.last_modified,
        "ETag": one.row.etag,
        "sha256": one.row.sha256.hex() or None,
        "object_version": one.row.object_version,
        "status": one.status,
    }


@contextmanager
def _not_found(path: str) -> Iterator[None]:
    """Say it in Python's own error where something is not archived."""
    try:
        yield
    except NotLocated as error:
        raise FileNotFoundError(errno.ENOENT, with_hint(error), path) from error


@contextmanager
def _not_written() -> Iterator[None]:
    """Say it in Python's own error where a local file cannot be written."""
    try:
        yield
    except UsageError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        raise
