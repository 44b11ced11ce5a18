"""The fsspec file system `caf://SOURCE/KEY` for pandas, polars, pyarrow, DuckDB and dask.

Directories are common parts of keys up to a '/'. As in other object stores' file systems, a key
that ends in '/' has no path. fsspec removes the '/'; where possible, such a path is refused. If a
key is also a prefix of others (`a` and `a/b`), `info` returns the file, and `ls` lists the keys
below it. Only `find` and `open` know a key with an empty part (`a//b`), not `ls` and `walk`.

Source: fsspec's AbstractFileSystem. Its protocol requires Python's own errors: FileNotFoundError,
and OSError for a read-only file system. All other errors are those of `Archive`. If a chunk
cannot be read, the error is an OSError, too.
"""

import atexit
import errno
import io
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import datetime
from glob import has_magic
from itertools import islice
from pathlib import Path
from typing import IO, Any, ClassVar, Final, NoReturn, cast

from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from fsspec.utils import isfilelike
from typing_extensions import Buffer

from caf_pipeline.errors import (
    ArchiveError,
    CafError,
    IdentityMissing,
    IntegrityError,
    NotLocated,
    StoreError,
    UsageError,
    with_hint,
)
from caf_pipeline.ledger.records import Location
from caf_pipeline.retrieval.archive import Archive
from caf_pipeline.retrieval.object_file import BLOCK_BYTES, ObjectFile
from caf_pipeline.retrieval.reader import write_whole
from caf_pipeline.settings import CONFIG_VARIABLE, Settings, load_settings
from caf_pipeline.wiring import open_archive

Info = dict[str, Any]


WALKED_KEYS: Final = 10_000
"""`walk` lists up to so many keys below a directory at once. Their entries take about 10 MB."""


class OpenedFile(io.BufferedReader, AbstractBufferedFile):  # type: ignore[misc]  # no types
    """An open archived object. It reads as Python's own files do, and has all of fsspec's.

    Its block cache stays empty: bytes come from providers, and `simplecache` and `filecache` cache
    whole files.
    """

    blocksize = BLOCK_BYTES
    loc = property(io.BufferedReader.tell, io.BufferedReader.seek)  # type: ignore[arg-type]
    readlines = io.BufferedReader.readlines  # fsspec's has no hint

    def __init__(self, fs: "CafFileSystem", path: str, raw: "_ObjectFile") -> None:
        """Send no request."""
        super().__init__(raw, BLOCK_BYTES)
        self.fs = fs
        self.path = path
        self.details = _file(_split(path)[0], raw.location)  # sets `size`, too

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the path, the version and the position. Unpickling looks the version up."""
        return _reopen, (self.fs, self.path, self.details, self.tell())

    __reduce_ex__ = object.__reduce_ex__  # BufferedReader's raises

    @property
    def closed(self) -> bool:
        """fsspec's block cache sets this, which has no effect."""
        return super().closed

    @closed.setter
    def closed(self, is_closed: bool) -> None:
        pass

    def _fetch_range(self, start_byte: int, end_byte: int) -> bytes:
        self.seek(start_byte)
        return self.read(end_byte - start_byte)


def _reopen(fs: "CafFileSystem", path: str, details: Info, position: int) -> OpenedFile:
    file: OpenedFile = fs.open(path, object_version=details["object_version"])
    file.details = details
    file.seek(position)
    return file


class _ObjectFile(ObjectFile):
    mode = "rb"

    def readinto(self, buffer: Buffer, /) -> int:
        with _python_errors(self.location.row.key):
            return super().readinto(buffer)


class _WithCallback:
    """Report written bytes to fsspec's callback, a negative number if bytes are truncated."""

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


class _SettingsPlace:
    """The working directory and CAF_CONFIG, which select the default settings.

    fsspec caches file systems by these values, too.
    """

    def __get__(self, instance: object, owner: type) -> tuple[str, str | None]:
        try:
            return os.getcwd(), os.environ.get(CONFIG_VARIABLE)
        except FileNotFoundError:  # the working directory was removed
            return "", os.environ.get(CONFIG_VARIABLE)


class CafFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The archive as a read-only file system.

    fsspec creates an instance for each thread and working directory. Instances with equal settings
    share an archive, which is opened at first use. A forked process opens its own.
    """

    protocol = "caf"
    root_marker = ""

    _settings_place: ClassVar = _SettingsPlace()
    _extra_tokenize_attributes = ("_settings_place",)
    _lock: ClassVar = threading.Lock()
    _archives: ClassVar[list[tuple[int, Settings, Archive]]] = []
    _archive: tuple[int, Archive] | None = None

    def __init__(self, config: str | os.PathLike[str] | None = None, **options: Any) -> None:  # noqa: ANN401 - fsspec's own
        """Use the settings in the file `config`, or the same as `caf`."""
        _only_open_has_versions(options)
        super().__init__(config=config, **options)
        self.config = config

    @property
    def archive(self) -> Archive:
        if self._archive is None or self._archive[0] != os.getpid():
            self._archive = (
                os.getpid(),
                self._shared(load_settings(Path(self.config) if self.config is not None else None)),
            )
        return self._archive[1]

    @classmethod
    def _shared(cls, settings: Settings) -> Archive:
        with cls._lock:
            for pid, archive_settings, archive in cls._archives:
                if (pid, archive_settings) == (os.getpid(), settings):
                    return archive
            archive = open_archive(settings)
            cls._archives.append((os.getpid(), settings, archive))
            atexit.register(_close, os.getpid(), archive)
            return archive

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:  # noqa: ANN401 - fsspec's own: a path, or a list of some
        """A leading '/' is removed, since every source has a name."""
        stripped = super()._strip_protocol(path)
        return stripped.lstrip("/") if isinstance(stripped, str) else stripped

    # --- listing

    def ls(
        self,
        path: str,
        detail: bool = True,
        listings: Mapping[str, list[Info]] | None = None,
        **options: Any,  # noqa: ANN401
    ) -> list[Any]:
        """List a directory in byte order of keys, or a file. `listings`: see `walk`."""
        _only_open_has_versions(options)
        path = self._strip_protocol(path)
        source, key = _split(path)
        if listings and path in listings:
            infos = listings[path]
        elif not source:
            infos = [_directory(name) for name in self.archive.sources()]
        else:
            prefix = f"{key}/" if key else ""
            with _python_errors(path):
                infos = [
                    _directory(f"{source}/{entry[:-1]}")
                    if isinstance(entry, str)
                    else _file(source, entry)
                    for entry in self.archive.ls(source, prefix)
                    if not (entry if isinstance(entry, str) else entry.row.key).endswith("//")
                ]
            infos = [info for info in infos if not info["name"].endswith("/")]
            if not infos and key and (info := self.info(path))["type"] == "file":
                infos = [info]
        return infos if detail else [info["name"] for info in infos]

    def info(self, path: str, **options: Any) -> Info:  # noqa: ANN401
        """Return name, size and type of a path, with one look-up.

        Files also have LastModified, ETag, SHA-256, object version and status.

        Raises:
            FileNotFoundError: The key is not archived; the message has the reason if it is known.
                Or the path ends in '/' and is not a directory.
        """
        _only_open_has_versions(options)
        unstripped, path = path, self._strip_protocol(path)
        source, key = _split(path)
        if not source or (not key and source in self.archive.sources()):
            return _directory(path)
        with _python_errors(path):
            try:
                return _file(source, self.archive.find(*self._file_at(unstripped)).location)
            except (NotLocated, FileNotFoundError):
                if next(self.archive.ls(source, f"{key}/"), None) is None:
                    raise
                return _directory(path)

    def exists(self, path: str, **options: Any) -> bool:  # noqa: ANN401
        """Raises if the archive cannot be read."""
        try:
            self.info(path, **options)
        except FileNotFoundError:
            return False
        return True

    lexists = exists  # fsspec's would ignore the options

    def isfile(self, path: str) -> bool:
        """Raises if the archive cannot be read."""
        try:
            return bool(self.info(path)["type"] == "file")
        except FileNotFoundError:
            return False

    def modified(self, path: str) -> datetime:
        with _python_errors(path):
            return self.archive.find(*self._file_at(path)).location.row.last_modified

    def walk(
        self,
        path: str,
        maxdepth: int | None = None,
        topdown: bool = True,
        on_error: Any = "omit",  # noqa: ANN401
        listings: Mapping[str, list[Info]] | None = None,
        **options: Any,  # noqa: ANN401
    ) -> Iterator[Any]:
        """Use one paged query for up to 10,000 keys, instead of some for each directory.

        fsspec passes `listings`, the content of directories, on to `ls` and to deeper walks.
        """
        path = self._strip_protocol(path)
        if maxdepth is None and not (listings and path in listings):
            listings = self._listings(path)
        yield from super().walk(path, maxdepth, topdown, on_error, listings=listings, **options)

    def _listings(self, path: str) -> Mapping[str, list[Info]]:
        """Return what `ls` lists in a directory and in those below; nothing if it has many keys."""
        source, key = _split(path)
        prefix = f"{key}/" if key else ""
        listings: dict[str, list[Info]] = {path: []}
        locations: list[Any] = []
        if source:
            with suppress(NotLocated):
                below = self.archive.ls(source, prefix, recursive=True)
                locations = list(islice(below, WALKED_KEYS + 1))
        if not 0 < len(locations) <= WALKED_KEYS:
            return {}
        for location in locations:
            *folders, name = location.row.key.removeprefix(prefix).split("/")
            parent = path
            for folder in folders:
                if not folder:  # `ls` lists no empty part
                    break
                child = f"{parent}/{folder}"
                if child not in listings:
                    listings[parent].append(_directory(child))
                    listings[child] = []
                parent = child
            else:
                if name:
                    listings[parent].append(_file(source, location))
        return listings

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        **options: Any,  # noqa: ANN401
    ) -> list[str] | dict[str, Info]:
        """Use one paged query instead of one for each directory."""
        _only_open_has_versions(options)
        path = self._strip_protocol(path)
        source, key = _split(path)
        if maxdepth is not None:
            files: list[str] | dict[str, Info] = super().find(
                path, maxdepth, withdirs, detail, **options
            )
            return files
        infos: dict[str, Info] = {}
        if not source:
            for name in self.archive.sources():
                of_source = self.find(name, withdirs=withdirs, detail=True)
                assert isinstance(of_source, dict)
                infos |= ({name: _directory(name)} if withdirs else {}) | of_source
            return dict(sorted(infos.items())) if detail else sorted(infos)
        try:
            for location in self.archive.ls(source, f"{key}/" if key else "", recursive=True):
                assert isinstance(location, Location)
                info = _file(source, location)
                if not info["name"].endswith("/"):
                    infos[info["name"]] = info
                at = len(info["name"])
                while withdirs and (at := info["name"].rfind("/", 0, at)) >= len(path):
                    infos.setdefault(info["name"][:at], _directory(info["name"][:at]))
        except NotLocated:  # As in other file systems, a missing source has no files.
            return {} if detail else []
        if not infos and self.isfile(path):
            infos[path] = self.info(path)
        names = sorted(name for name in infos if not name.endswith("/"))
        return {name: infos[name] for name in names} if detail else names

    # --- reading

    def open(self, path: str, mode: str = "rb", *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """Open a file. See `_open`. Checks for a final '/' before fsspec removes it."""
        if mode.startswith("r"):
            self._file_at(path)
        return super().open(path, mode, *args, **options)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> io.BufferedReader:  # noqa: ANN401
        """Open a file, or one of its versions.

        `object_version` selects a version, `as_of` a time. `Archive.open` documents the comparison
        of bytes.
        """
        if mode != "rb":
            self._refuse(path)
        path = self._strip_protocol(path)
        with _python_errors(path):
            archived = self.archive.find(
                *_split(path), options.get("object_version"), as_of=options.get("as_of")
            )
            return OpenedFile(self, path, _ObjectFile(archived.location, archived.store))

    def cat_file(
        self,
        path: str,
        start: int | None = None,
        end: int | None = None,
        **options: Any,  # noqa: ANN401
    ) -> bytes:
        _only_open_has_versions(options)
        source, key = self._file_at(path)
        with _python_errors(path):
            if start is None and end is None:
                return self.archive.read(source, key)
            (result,) = self.archive.read_many(source, [(key, start, end)])
            return result.body

    def cat_ranges(
        self,
        paths: list[str],
        starts: int | Sequence[int | None] | None,
        ends: int | Sequence[int | None] | None,
        max_gap: int | None = None,
        on_error: str = "return",
        **options: Any,  # noqa: ANN401
    ) -> list[bytes | Exception]:
        """Slices that are close in a chunk share a request. `max_gap` is ignored."""
        _only_open_has_versions(options)
        if not isinstance(paths, list):
            raise TypeError("paths must be a list")
        begins = list(starts) if isinstance(starts, Iterable) else [starts] * len(paths)
        stops = list(ends) if isinstance(ends, Iterable) else [ends] * len(paths)
        if not len(paths) == len(begins) == len(stops):
            raise ValueError("paths, starts and ends must have the same length")
        by_source = defaultdict[str, list[tuple[int, str]]](list)
        results: list[bytes | Exception] = [b""] * len(paths)
        for number, path in enumerate(paths):
            try:
                source, key = self._file_at(path)
            except FileNotFoundError as error:
                if on_error != "return":
                    raise
                results[number] = error
            else:
                by_source[source].append((number, key))
        for source, requests in by_source.items():
            ranges = [(key, begins[number], stops[number]) for number, key in requests]
            with closing(self.archive.read_many(source, ranges)) as reads:
                for read in reads:
                    number = requests[read.number][0]
                    try:
                        with _python_errors(paths[number]):
                            results[number] = read.body
                    except Exception as error:
                        if on_error != "return":
                            raise
                        results[number] = error
        return results

    def cat(
        self,
        path: Any,  # noqa: ANN401
        recursive: bool = False,
        on_error: str = "raise",
        **options: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Send few requests for a list."""
        _only_open_has_versions(options)
        if not recursive:
            self._refuse_other_files(path if isinstance(path, list) else [path])
        if recursive or not isinstance(path, list):
            return super().cat(path, recursive, on_error, **options)
        paths = self.expand_path(path)
        bodies = self.cat_ranges(
            paths, None, None, on_error="raise" if on_error == "raise" else "return"
        )
        return {
            name: body
            for name, body in zip(paths, bodies, strict=True)
            if on_error != "omit" or isinstance(body, bytes)
        }

    def get(
        self,
        rpath: Any,  # noqa: ANN401
        lpath: Any,  # noqa: ANN401
        recursive: bool = False,
        callback: Any = DEFAULT_CALLBACK,  # noqa: ANN401
        maxdepth: int | None = None,
        **options: Any,  # noqa: ANN401
    ) -> None:
        """Write files, and everything below directories, to paths like their keys.

        Raises:
            UsageError: A key in a directory or pattern is not a safe path. Its file would overwrite
                another key's, or be outside of `lpath`. No file is written.
        """
        _only_open_has_versions(options)
        paths = rpath if isinstance(rpath, list) else [rpath]
        if not recursive:
            self._refuse_other_files(paths)
            if isinstance(rpath, str) and isinstance(lpath, str) and self._is_key_with_magic(rpath):
                # fsspec would take the key for a pattern, and write into a folder.
                if lpath.endswith(os.sep) or os.path.isdir(lpath):
                    lpath = os.path.join(lpath, os.path.basename(rpath))
                rpath, lpath = [rpath], [lpath]
        is_expanded = recursive or any(has_magic(self._strip_protocol(path)) for path in paths)
        if is_expanded and not (isinstance(rpath, list) and isinstance(lpath, list)):
            for path in self.expand_path(rpath, recursive=recursive, maxdepth=maxdepth):
                _, key = _split(path)
                if key and not {"", ".", ".."}.isdisjoint(key.split("/")):
                    raise UsageError(
                        f"{path!r} is not a safe path: it has an empty part, '.' or '..'",
                        hint="'caf restore' can write every key",
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
        """Write a file. It appears once all bytes are written and compared.

        `callback` receives the size and the progress.
        """
        _only_open_has_versions(options)
        callback = callback or DEFAULT_CALLBACK
        if outfile is not None or isfilelike(lpath):
            super().get_file(rpath, lpath, outfile=outfile, callback=callback, **options)
        elif self.isdir(rpath):
            self._refuse_other_files([rpath])
            os.makedirs(lpath, exist_ok=True)
        else:
            Path(lpath).parent.mkdir(parents=True, exist_ok=True)
            with _python_errors(rpath), _not_written():
                archived = self.archive.find(*self._file_at(rpath))
                callback.set_size(archived.location.size_bytes)
                write_whole(
                    Path(lpath),
                    lambda file: archived.write_to(
                        cast("IO[bytes]", _WithCallback(file, callback))
                    ),
                )

    def expand_path(
        self,
        path: Any,  # noqa: ANN401
        recursive: bool = False,
        maxdepth: int | None = None,
        assume_literal: bool = False,
        **options: Any,  # noqa: ANN401
    ) -> list[str]:
        """A key that contains a pattern's characters matches itself."""
        _only_open_has_versions(options)
        paths = [path] if isinstance(path, str | os.PathLike) else list(path)
        keys = [] if assume_literal else [key for key in paths if self._is_key_with_magic(key)]
        if not keys:
            expanded: list[str] = super().expand_path(
                paths, recursive, maxdepth, assume_literal=assume_literal, **options
            )
            return expanded
        expanded = super().expand_path(keys, recursive, maxdepth, assume_literal=True, **options)
        patterns = [path for path in paths if path not in keys]
        with suppress(FileNotFoundError):
            if patterns:
                expanded += super().expand_path(patterns, recursive, maxdepth, **options)
        return sorted(set(expanded))

    def _is_key_with_magic(self, path: Any) -> bool:  # noqa: ANN401
        stripped = self._strip_protocol(path)
        return has_magic(stripped) and not _ends_in_slash(path) and self.isfile(stripped)

    def _file_at(self, path: str) -> tuple[str, str]:
        source, key = _split(self._strip_protocol(path))
        if key and _ends_in_slash(path):
            raise FileNotFoundError(
                errno.ENOENT,
                "a file's path cannot end in '/'; 'caf get' and Archive.read accept such a key",
                path,
            )
        return source, key

    def _refuse_other_files(self, paths: Sequence[str]) -> None:
        """Raise FileNotFoundError for a '/' at the end of a file or key: fsspec would remove it."""
        for path in filter(_ends_in_slash, paths):
            file = self._strip_protocol(path)
            with suppress(NotLocated):
                if self.isfile(file) or self.archive.find(*_split(f"{file}/")):
                    self._file_at(path)

    # --- refused operations

    def _refuse(self, path: Any, *_: Any, **__: Any) -> NoReturn:  # noqa: ANN401
        raise OSError(errno.EROFS, "the archive is read-only", path)

    mkdir = makedirs = rmdir = rm = rm_file = _rm = mv = cp_file = copy = touch = pipe_file = (
        put_file
    ) = put = _refuse


def _close(pid: int, archive: Archive) -> None:
    """A forked child must not close its parent's archive."""
    if pid == os.getpid():
        archive.close()


def _only_open_has_versions(options: Mapping[str, object]) -> None:
    """Refuse version options: fsspec would return the current content instead."""
    for name in ("object_version", "as_of"):
        if options.get(name) is not None:
            raise TypeError(f"only open() accepts {name}: fs.open(path, {name}=…)")


def _split(path: str) -> tuple[str, str]:
    source, _, key = path.partition("/")
    return source, key


def _ends_in_slash(path: object) -> bool:
    return isinstance(path, str) and path.endswith("/")


def _directory(path: str) -> Info:
    return {"name": path, "size": 0, "type": "directory"}


def _file(source: str, location: Location) -> Info:
    return {
        "name": f"{source}/{location.row.key}",
        "size": location.size_bytes,
        "type": "file",
        "LastModified": location.row.last_modified,
        "ETag": location.row.etag,
        "sha256": location.row.sha256.hex() or None,
        "object_version": location.row.object_version,
        "status": location.status,
    }


@contextmanager
def _python_errors(path: str) -> Iterator[None]:
    try:
        yield
    except NotLocated as error:
        raise FileNotFoundError(errno.ENOENT, with_hint(error), path) from error
    except (StoreError, IntegrityError, ArchiveError, IdentityMissing) as error:
        raise _as_os_error(error) from error


def _as_os_error(error: CafError) -> CafError:
    """Return an error of the same class that is an OSError, too."""
    kind = type(error)
    members = {"__module__": kind.__module__, "__reduce__": lambda _: (_as_os_error, (error,))}
    copy: Any = OSError.__new__(type(kind.__name__, (kind, OSError), members))
    copy.args = error.args
    copy.__dict__.update(error.__dict__)
    return cast("CafError", copy)


@contextmanager
def _not_written() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        raise
