"""Commands on what is archived, as the ledger has it: ls, find, du.

Neither S3 nor the store is asked.
"""

import fnmatch
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import groupby
from typing import Annotated, Final

import typer

from caf_pipeline.cli.opening import opened_lookup, require_archived
from caf_pipeline.cli.terminal import (
    AsOfOption,
    JsonOption,
    SourceArgument,
    counted,
    note,
    parse_size,
    parse_time,
    print_json,
    printable,
    show_size,
    show_time,
)
from caf_pipeline.errors import NotLocated, UsageError
from caf_pipeline.ledger.protocol import LocationLookups
from caf_pipeline.ledger.records import Location
from caf_pipeline.retrieval.listing import (
    common_prefix,
    every,
    is_current,
    list_level,
    list_objects,
    list_versions,
)
from caf_pipeline.retrieval.reader import not_located
from caf_pipeline.settings import load_settings

PrefixArgument = Annotated[
    str,
    typer.Argument(metavar="[PREFIX]", help="What the keys begin with, as in S3; all by default."),
]
CurrentOption = Annotated[
    bool,
    typer.Option(
        "--current",
        help="Only objects that S3 had at the last inventory: none that are gone or older.",
    ),
]

_TIME: Final = "%Y-%m-%d %H:%M:%S"


def ls(  # noqa: PLR0917 - the command line's options
    source: SourceArgument,
    prefix: PrefixArgument = "",
    long: Annotated[
        bool, typer.Option("-l", help="Show size, LastModified and status, too.")
    ] = False,
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Show every key, instead of one level.")
    ] = False,
    current: CurrentOption = False,
    as_of: AsOfOption = None,
    versions: Annotated[
        bool, typer.Option("--versions", help="Show every archived version of each key.")
    ] = False,
    json: JsonOption = False,
) -> None:
    r"""List what is archived below a prefix.

    For each key this is the object that `caf get` gives. One level is shown, as S3 lists with the
    delimiter '/': what has a further '/' behind PREFIX is one line that ends in '/'. PREFIX is the
    beginning of keys, not a folder: `a` is also the beginning of `abc`.

    The status of an object is `current` where S3 had it at the last inventory; `gone` where that no
    longer listed its key, e.g. since it was deleted after it was archived; `older` where the key
    has other content in S3, which is not archived yet.

    With --as-of it is, for each key, what is archived of it that was last modified latest up to
    TIME, or that an inventory up to TIME found current. The status is then `archived`; `gone` where
    an inventory up to TIME no longer listed the key; or `older` where something later, up to TIME,
    was skipped or is still to be archived. What was in S3 and was never archived, and when between
    two inventories a key was deleted, is not known.

    --versions shows every archived version of a key, newer before older, with its size,
    LastModified, status and version id. A bucket without versions has no ids: a version is then
    `etag:<ETag>:<size>`. If the option is missing, a line on standard error counts the older
    versions of the listed keys.

    The ledger is read in pages: each is of one moment. Keys come in the order of their bytes;
    control characters in them are escaped, and so is '\', but not with --json.

    \b
    Examples:
      caf ls demo
      caf ls demo packages/rich/ -l
      caf ls demo packages/ --recursive --as-of 2026-11-21T10:00
      caf ls demo packages/ --recursive --versions
      caf ls demo --recursive --json | jq -r 'select(.status == "gone").key'

    Exit status: 0; 2 TIME is not a time, or options exclude each other; 3 a setting is wrong or
    there is no such source; 6 the database failed; 11 no archived key begins with PREFIX.
    """
    moment = read_moment(as_of, current)
    if versions and (moment or current):
        raise UsageError("--versions excludes --as-of and --current.", hint="Give one of them.")
    listed = list_objects if recursive else list_level
    empty, older = True, 0
    with _opened(source) as lookup:
        entries: Iterator[Location | str] = listed(
            lookup, source, prefix, include=wanted_status(current), as_of=moment
        )
        for entry in list_versions(lookup, source, entries) if versions else entries:
            empty = False
            older += 0 if isinstance(entry, str) else entry.older_versions
            _print_entry(entry, long, json, versions=versions)
        if empty:
            raise nothing_listed(lookup, source, prefix, current, moment)
    if older and not versions and not moment:
        note(
            f"{source}: {counted(older, 'older version')} of these keys not shown: --versions "
            "shows them"
        )


def find(  # noqa: PLR0917 - the command line's options
    source: SourceArgument,
    pattern: Annotated[
        str,
        typer.Argument(
            metavar="[PATTERN]",
            help="What the whole key matches: * is any text, '/' too, ? any character.",
        ),
    ] = "*",
    larger: Annotated[
        str | None,
        typer.Option("--larger", metavar="SIZE", help="Larger than SIZE: 64MiB, 1000000."),
    ] = None,
    smaller: Annotated[
        str | None, typer.Option("--smaller", metavar="SIZE", help="Smaller than SIZE.")
    ] = None,
    newer: Annotated[
        str | None,
        typer.Option(
            "--newer",
            metavar="TIME",
            help="LastModified later than TIME: 2026-11-21, 2026-11-21T10:00.",
        ),
    ] = None,
    older: Annotated[
        str | None,
        typer.Option(
            "--older", metavar="TIME", help="LastModified earlier than TIME, which is in UTC."
        ),
    ] = None,
    current: CurrentOption = False,
    as_of: AsOfOption = None,
    long: Annotated[
        bool, typer.Option("-l", help="Show size, LastModified and status, too.")
    ] = False,
    json: JsonOption = False,
) -> None:
    r"""Find archived objects by pattern, size and time.

    The time is LastModified; all that is asked for must hold. What is listed is as by `caf ls
    --recursive`, also with --as-of: for each key, the object that `caf get` gives. Only keys that
    begin with what PATTERN has before its first * or ? are read.

    \b
    Examples:
      caf find demo '*.py' --larger 1MiB
      caf find demo 'logs/2026-*' --older 2026-06-01 --json | jq -s 'map(.size_bytes) | add'
      caf find demo '*.csv' --as-of 2026-11-21T10:00 -l

    Exit status: 0, also where nothing is found; 2 PATTERN is empty, SIZE not a size, or TIME not a
    time; 3 a setting is wrong or there is no such source; 6 the database failed; 11 the ledger does
    not know the source yet.
    """
    if not pattern:
        raise UsageError(
            "PATTERN is empty, and no key is.",
            hint="Leave it out for all keys, or give what a whole key matches.",
        )
    least, most = (None if one is None else parse_size(one) for one in (larger, smaller))
    after, before = (None if one is None else parse_time(one) for one in (newer, older))
    # Of fnmatch, whose time does not explode with the stars of a pattern; here a '[' is a character
    # like others.
    matches = re.compile(fnmatch.translate(pattern.replace("[", "[[]"))).match
    moment, is_wanted = read_moment(as_of, current), wanted_status(current)

    def wanted(one: Location) -> bool:
        return (
            matches(one.row.key) is not None
            and (least is None or one.size_bytes > least)
            and (most is None or one.size_bytes < most)
            and (after is None or one.row.last_modified > after)
            and (before is None or one.row.last_modified < before)
            and is_wanted(one)
        )

    with _opened(source) as lookup:
        for one in list_objects(
            lookup, source, re.split(r"[*?]", pattern, maxsplit=1)[0], include=wanted, as_of=moment
        ):
            _print_entry(one, long, json)


def du(  # noqa: PLR0917 - the command line's options
    source: SourceArgument,
    prefix: PrefixArgument = "",
    summarize: Annotated[
        bool, typer.Option("-s", "--summarize", help="Show the sum alone.")
    ] = False,
    current: CurrentOption = False,
    as_of: AsOfOption = None,
    json: JsonOption = False,
) -> None:
    r"""Sum up archived objects below a prefix.

    There is a line for each next level, and one for all. Counted is what `caf ls --recursive`
    lists, also with --as-of: for each key one object, and its size as in S3. Every key is read.

    \b
    Examples:
      caf du demo
      caf du demo packages/ --json
      caf du demo --as-of 2026-11-21T10:00

    Exit status: 0; 2 TIME is not a time; 3 a setting is wrong or there is no such source; 6 the
    database failed; 11 no archived key begins with PREFIX.
    """
    moment = read_moment(as_of, current)
    total_objects = total_bytes = 0
    with _opened(source) as lookup:
        found = list_objects(lookup, source, prefix, include=wanted_status(current), as_of=moment)
        for below, members in groupby(found, lambda one: common_prefix(prefix, one.row.key)):
            objects = size_bytes = 0
            for one in members:
                objects, size_bytes = objects + 1, size_bytes + one.size_bytes
            total_objects, total_bytes = total_objects + objects, total_bytes + size_bytes
            if below and not summarize:
                _print_sum(below, objects, size_bytes, json)
        if not total_objects:
            raise nothing_listed(lookup, source, prefix, current, moment)
    _print_sum(prefix, total_objects, total_bytes, json)


@contextmanager
def _opened(source: str) -> Iterator[LocationLookups]:
    """Open the look-ups of the ledger, which has something of the source."""
    settings = load_settings()
    with opened_lookup(settings) as lookup:
        require_archived(settings, lookup, source)
        yield lookup


def wanted_status(current: bool) -> Callable[[Location], bool]:
    """Return what an option asks of objects that are listed."""
    return is_current if current else every


def nothing_listed(
    lookup: LocationLookups, source: str, prefix: str, current: bool, as_of: datetime | None = None
) -> NotLocated:
    """Return the error of a listing that has nothing; where the prefix is a key, it says why that
    is not archived.
    """
    if prefix and not current and not as_of and lookup.not_archived(source, prefix):
        return not_located(lookup, source, prefix)
    then = f" as of {show_time(as_of)}" if as_of else ""
    what = "is current and" if current else f"is archived{then} and"
    if not prefix:
        what = what.removesuffix(" and")
        return NotLocated(
            f"no object of source '{source}' {what}", hint=f"'caf status {source}' shows what is"
        )
    return NotLocated(
        f"no key of source '{source}' {what} begins with '{prefix}'",
        hint=f"'caf ls {source}' shows what there is",
    )


def read_moment(as_of: str | None, current: bool) -> datetime | None:
    """Return the time of --as-of; raises UsageError where --current is given, too."""
    if as_of is not None and current:
        raise UsageError("--as-of and --current exclude each other.", hint="Give one of them.")
    return None if as_of is None else parse_time(as_of)


def _print_entry(entry: Location | str, long: bool, json: bool, *, versions: bool = False) -> None:
    if json:
        print_json({"prefix": entry} if isinstance(entry, str) else _as_json(entry))
        return
    key = entry if isinstance(entry, str) else entry.row.key
    if not long and not versions:
        shown = ""
    elif isinstance(entry, str):
        shown = f"{'':>19}  {'':>19}  {'':8}  "
    else:
        shown = (
            f"{entry.size_bytes:>19,}  {entry.row.last_modified.astimezone(UTC):{_TIME}}  "
            f"{entry.status:8}  "
        )
    if versions and not isinstance(entry, str):
        shown += f"{printable(entry.row.object_version)}  "
    sys.stdout.write(f"{shown}{printable(key)}\n")


def _as_json(one: Location) -> dict[str, object]:
    row = one.row
    return {
        "key": row.key,
        "size_bytes": one.size_bytes,
        "last_modified": row.last_modified.isoformat(),
        "status": one.status,
        "etag": row.etag,
        "object_version": row.object_version,
        "version_id": row.version_id,
        "sha256": row.sha256.hex() or None,
        "chunks": [each.chunk for each in one.ranges],
    }


def _print_sum(prefix: str, objects: int, size_bytes: int, json: bool) -> None:
    if json:
        print_json({"prefix": prefix, "objects": objects, "size_bytes": size_bytes})
        return
    sys.stdout.write(
        f"{show_size(size_bytes):>10}  {counted(objects, 'object'):>20}  "
        f"{printable(prefix) or 'in all'}\n"
    )
