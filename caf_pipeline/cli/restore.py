"""The command that writes archived objects below a folder: restore.

What becomes of a key's name is `retrieval.file_names`.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Final

import typer

from caf_pipeline.cli.extracting import NotRestored, RestoreFolder
from caf_pipeline.cli.listing import CurrentOption, nothing_listed, wanted_status
from caf_pipeline.cli.opening import load_settings, opened_archive, opened_ledger
from caf_pipeline.cli.terminal import JsonOption, SourceArgument, counted, note, print_json, printable, progress, show_size
from caf_pipeline.errors import CafError, IntegrityError, StoreError, StoreUnreachable, UsageError
from caf_pipeline.retrieval.file_names import path_of

if TYPE_CHECKING:
    from caf_pipeline.ledger.records import Location
    from caf_pipeline.store.protocol import ChunkStore

SMALL_BYTES: Final = 1 << 20
"""Objects up to this size are read ahead, several at a time; a larger one by itself, into its file."""


_ERRORS_KEPT: Final = 1000
_GOES_ON: Final = "the same command goes on, and leaves what is there"


def restore(  # noqa: PLR0917 - the command line's options
    source: SourceArgument,
    where: Annotated[list[str], typer.Argument(metavar="[PREFIX] FOLDER", help="What the keys begin with, and where to.")],
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there and are not equal.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written; write nothing.")] = False,
    current: CurrentOption = False,
    json: JsonOption = False,
) -> None:
    r"""Write archived objects below a folder, each at its key, with its LastModified as the file's time.

    What `caf ls --recursive` lists is restored. Each file appears when it is whole and its SHA-256 was compared. A file that is
    there and equal is left as it is, so that the same command goes on after it was stopped or killed; one that is there
    and is not equal is never replaced without --force. Nothing is written outside FOLDER, and no symbolic link in it is followed.

    A file has the key as its path. Where that cannot be, a part of it begins with .caf~ or .caf+, and the key can be read from it
    (docs/retrieval.md): parts that are empty, '.' or '..', that begin with .caf, that are too long, or where one key's name is
    another's folder. Content type and user metadata are not kept in files.

    \b
    Examples:
      caf restore demo packages/ /srv/restored
      caf restore demo /srv/restored --dry-run

    Exit status: 0 all that is listed is there; 1 some files are different, or cannot be here; 2 wrong arguments; 3 a setting is
    wrong or there is no such source; 6 the database failed; 7 some object could not be read; 8 FOLDER cannot be written; 9 no
    provider gives some object right; 10 another process restores into FOLDER; 11 no archived key begins with PREFIX.
    """
    from caf_pipeline.retrieval.listing import list_objects  # noqa: PLC0415  loaded by the commands that use it

    if len(where) > 2:
        raise UsageError("There are more arguments than SOURCE, PREFIX and FOLDER.")
    prefix, folder = (where[0] if len(where) == 2 else ""), Path(where[-1])
    settings = load_settings()
    with opened_ledger(settings) as ledger, opened_archive(settings, ledger, source) as store, contextlib.ExitStack() as stack:
        restoring = _Restoring(store, force, dry_run, json, advance=stack.enter_context(progress("restoring", None)))
        if folder.exists() or not dry_run:
            restoring.target = stack.enter_context(RestoreFolder(folder, force=force))
        if restoring.target and not dry_run:
            restoring.target.own()
        restoring.take(list_objects(ledger, source, prefix, wanted=wanted_status(current)))
    if not restoring.listed:
        raise nothing_listed(source, prefix, current)
    restoring.print_sums(source, folder)
    restoring.raise_worst()


@dataclass
class _Restoring:
    """A restore, and what became of the objects that were listed so far.

    Attributes:
        target: None where there is no such folder, in a dry run.
        errors: the first ones.
    """

    store: "ChunkStore"
    force: bool
    dry_run: bool
    json: bool
    advance: Callable[[int], None]
    target: RestoreFolder | None = None
    listed: int = 0
    restored: int = 0
    restored_bytes: int = 0
    equal: int = 0
    different: int = 0
    failed: int = 0
    errors: list[CafError] = field(default_factory=list)

    def take(self, listed: "Iterable[Location]") -> None:
        """Restore objects.

        Raises:
            StagingError: the folder takes no more. StoreUnreachable: many objects in a row could not be read.
        """
        from caf_pipeline.retrieval.check import UNREAD_IN_A_ROW  # noqa: PLC0415  loaded by the commands that use it
        from caf_pipeline.retrieval.side_by_side import side_by_side  # noqa: PLC0415

        unread = 0
        for one, body in side_by_side(self._missing(listed), self._read):
            try:
                self._write(one, body)
            except (NotRestored, StoreError, IntegrityError) as error:
                self._tell(error)
                unread = unread + 1 if not error.permanent else 0
                if unread == UNREAD_IN_A_ROW:
                    raise StoreUnreachable(f"the last {unread} objects could not be read: {error}", hint=_GOES_ON) from error
            else:
                unread = 0

    def _missing(self, listed: "Iterable[Location]") -> "Iterator[Location]":
        """Yield what is to be read; count the rest."""
        for one in listed:
            self.listed += 1
            try:
                names, file = _place(self.target, one) if self.target else (path_of(one.row.key), None)
            except NotRestored as error:
                self._tell(error)
                continue
            if file and _is_equal(file, one):
                self.equal += 1
            elif file and not self.force:
                self.different += 1
                note(f"{one.row.key!r} was not written: another file is there.")
            elif self.dry_run:
                self._count(one, names)
            else:
                yield one

    def _read(self, one: "Location") -> "tuple[Location, bytes | CafError | None]":
        """Return a small object's bytes, or why they are not had; None of a large one. In another thread."""
        from caf_pipeline.retrieval.reader import Found  # noqa: PLC0415  loaded by the commands that use it

        try:
            return one, Found(one, self.store).open().read() if one.size_bytes <= SMALL_BYTES else None
        except (StoreError, IntegrityError) as error:
            return one, error

    def _write(self, one: "Location", body: "bytes | CafError | None") -> None:
        from caf_pipeline.retrieval.reader import Found  # noqa: PLC0415  loaded by the commands that use it

        if isinstance(body, CafError):
            raise body
        assert self.target
        names, file = _place(self.target, one)  # again: another key may have its name by now
        if file:
            file.close()
        fill = Found(one, self.store).write_to if body is None else partial(_write, body)
        self.target.fill(one.row.key, _encoded(names), fill, _mtime_ns(one))
        self._count(one, names)
        self.advance(one.size_bytes)

    def _count(self, one: "Location", names: Sequence[str]) -> None:
        self.restored += 1
        self.restored_bytes += one.size_bytes
        path = "/".join(names)
        if self.json:
            print_json({"key": one.row.key, "path": path, "size_bytes": one.size_bytes})
        elif self.dry_run:
            typer.echo(printable(path))

    def _tell(self, error: CafError) -> None:
        self.failed += 1
        if len(self.errors) < _ERRORS_KEPT:
            self.errors.append(error)
        note(str(error))

    def print_sums(self, source: str, folder: Path) -> None:
        """Print what became of all."""
        if self.json:
            sums = {name: getattr(self, name) for name in ("listed", "equal", "different", "failed")}
            print_json(sums | {"would_restore" if self.dry_run else "restored": self.restored, "bytes": self.restored_bytes})
            return
        done = "would be written" if self.dry_run else "written"
        note(
            f"{source}: of {counted(self.listed, 'object')} {self.restored:,} {done} to {str(folder)!r}"
            f" ({show_size(self.restored_bytes)}), {self.equal:,} there already, {self.different:,} different,"
            f" {self.failed:,} failed"
        )

    def raise_worst(self) -> None:
        """Raise the error that says why not all is there, if so."""
        if not self.errors and not self.different:
            return
        kinds = (IntegrityError, StoreUnreachable, StoreError)
        kind = next((kind for kind in kinds if any(isinstance(error, kind) for error in self.errors)), CafError)
        hint = _GOES_ON if self.errors else "--force replaces files that are different"
        raise kind(f"{counted(self.failed + self.different, 'object')} of {self.listed:,} were not restored", hint=hint)


def _place(target: RestoreFolder, one: "Location") -> tuple[Sequence[str], IO[bytes] | None]:
    """Return the names of an object's file, and the open file that is there; None where none is.

    Raises:
        NotRestored: neither of its two paths can have a file.
    """
    key, blocked = one.row.key, None
    for names in (path_of(key), path_of(key, escaped=True)):
        try:
            return names, target.open(key, _encoded(names))
        except NotRestored as error:
            blocked = error
    assert blocked
    raise blocked


def _is_equal(file: IO[bytes], one: "Location") -> bool:
    """Compare a file, and close it, with the SHA-256 of an object, of one in parts with that of each part."""
    with file:
        if os.fstat(file.fileno()).st_size != one.size_bytes:
            return False
        for each in one.ranges:
            digest, left = hashlib.sha256(), each.end_byte - each.start_byte
            while left and (piece := file.read(min(left, SMALL_BYTES))):
                digest.update(piece)
                left -= len(piece)
            if digest.digest() != each.sha256:
                return False
        return True


def _write(body: bytes, file: IO[bytes]) -> None:
    file.write(body)


def _mtime_ns(one: "Location") -> int:
    since = one.row.last_modified - datetime(1970, 1, 1, tzinfo=UTC)
    return (since // timedelta(microseconds=1)) * 1000


def _encoded(names: Sequence[str]) -> list[bytes]:
    return [name.encode() for name in names]
