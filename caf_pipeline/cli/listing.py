"""`caf ls`, `caf find` and `caf du`, which read only the ledger."""

import fnmatch
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import groupby, islice
from typing import Annotated, Any, Final

import typer

from caf_pipeline.cli.completing import complete_key
from caf_pipeline.cli.opening import opened_lookup, require_archived
from caf_pipeline.cli.terminal import (
    AsOfOption,
    JsonOption,
    SourceArgument,
    counted,
    exclusive,
    note,
    parse_size,
    parse_time,
    print_json,
    printable,
    show_size,
    show_time,
)
from caf_pipeline.errors import NotLocated, UsageError
from caf_pipeline.inventory.objects import can_be_stored
from caf_pipeline.ledger.records import ListedObject, Location, LocationLookups
from caf_pipeline.retrieval.listing import (
    common_prefix,
    every,
    is_current,
    list_level,
    list_objects,
    list_rows,
    list_versions,
)
from caf_pipeline.retrieval.reader import not_located
from caf_pipeline.settings import load_settings

PrefixArgument = Annotated[
    str,
    typer.Argument(
        metavar="[PREFIX]",
        help="Beginning of the keys, as in S3; all keys by default.",
        autocompletion=complete_key,
    ),
]
CurrentOption = Annotated[
    bool,
    typer.Option(
        "--current",
        help="Only objects that S3 had at the last inventory.",
    ),
]
LongOption = Annotated[bool, typer.Option("-l", help="Show size, LastModified and status.")]

_TIME: Final = "%Y-%m-%d %H:%M:%S"


def ls(  # noqa: PLR0917 - the command line's options
    source: SourceArgument,
    prefix: PrefixArgument = "",
    long: LongOption = False,
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Show every key instead of one level.")
    ] = False,
    current: CurrentOption = False,
    as_of: AsOfOption = None,
    versions: Annotated[
        bool, typer.Option("--versions", help="Show every archived version of each key.")
    ] = False,
    start_after: Annotated[
        str,
        typer.Option(
            "--start-after", metavar="KEY", help="Show only what follows KEY in byte order."
        ),
    ] = "",
    limit: Annotated[
        int | None,
        typer.Option("--limit", metavar="N", min=1, help="Show at most N keys and prefixes."),
    ] = None,
    json: JsonOption = False,
) -> None:
    r"""List archived objects below a prefix.

    Shows one level, as S3 lists with the delimiter '/'. PREFIX is the beginning of keys, not a
    folder: `a` also matches `abc`. Each key stands for the object that `caf get` returns.

    An object is `current` if S3 had it at the last inventory, `gone` if that inventory no longer
    listed its key, and `older` if S3 has other content, which is not archived yet. It is
    `unknown_post` if nothing shows that this ledger packed it: `caf doctor --add-unknown-posts`
    added it.

    --as-of lists, for each key, the archived version that was current at TIME, as `archived`,
    `gone` or `older` by the inventories up to TIME. Changes between two inventories and objects
    that were never archived are unknown.

    --versions lists every archived version, newest first, with its version id; in a bucket without
    versions, with `etag:<ETag>:<size>`.

    Keys are sorted by their bytes. Control characters and '\' are escaped, except with --json. To
    list in pages, give the last key or prefix of a page to --start-after, until a page is empty.

    \b
    Examples:
      caf ls demo packages/rich/ -l
      caf ls demo packages/ --recursive --as-of 2026-11-21T10:00
      caf ls demo --recursive --json | jq -r 'select(.status == "gone").key'
      caf ls demo --recursive --limit 1000 --start-after packages/rich/py.typed

    \b
    Exit status: 0, 3, 6
      2   TIME is not a time, KEY cannot be a key, or options exclude each other.
      11  No archived key begins with PREFIX. Not with --start-after.
    """
    moment = read_moment(as_of, current)
    if start_after and not can_be_stored(start_after):
        raise UsageError("--start-after is not 1 to 1,024 bytes of UTF-8.", hint="Give a key.")
    if versions and (moment or current):
        raise UsageError("--versions excludes --as-of and --current.", hint="Give one of them.")
    empty, older, unknown = True, 0, 0
    with _opened(source) as lookup:
        list_entries: Callable[..., Iterator[Any]] = (
            list_level if not recursive else list_objects if versions else list_rows
        )
        listed = list_entries(
            lookup,
            source,
            prefix,
            include=status_filter(current),
            as_of=moment,
            start_after=start_after,
        )
        entries = islice(listed, limit)
        for entry in list_versions(lookup, source, entries) if versions else entries:
            empty = False
            if not isinstance(entry, str):
                older += entry.older_versions
                unknown += entry.from_unknown_post
            _print_entry(entry, long, json, versions=versions)
        if empty and not start_after:
            raise nothing_listed(lookup, source, prefix, current, moment)
    if unknown:
        note(f"{source}: {counted(unknown, 'object')} of these from unknown posts: -l marks them")
    if older and not versions and not moment:
        note(f"{source}: {counted(older, 'older version')} of these keys not shown: use --versions")


def find(  # noqa: PLR0917 - the command line's options
    source: SourceArgument,
    pattern: Annotated[
        str,
        typer.Argument(
            metavar="[PATTERN]",
            help="Pattern for the whole key: * matches any text, including '/'; ? one character.",
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
        typer.Option("--older", metavar="TIME", help="LastModified earlier than TIME, in UTC."),
    ] = None,
    current: CurrentOption = False,
    as_of: AsOfOption = None,
    long: LongOption = False,
    json: JsonOption = False,
) -> None:
    r"""Find archived objects by pattern, size and time.

    An object must meet all conditions. TIME is compared with LastModified. Only keys that begin
    with the part of PATTERN before its first * or ? are read.

    \b
    Examples:
      caf find demo '*.py' --larger 1MiB
      caf find demo 'logs/2026-*' --older 2026-06-01 --json | jq -s 'map(.size_bytes) | add'

    \b
    Exit status: 3, 6
      0   The search is complete, even without a match.
      2   PATTERN is empty, SIZE is not a size, or TIME is not a time.
      11  Nothing of the source is archived.
    """
    if not pattern:
        raise UsageError(
            "PATTERN is empty.",
            hint="Leave it out for all keys.",
        )
    sizes = [None if text is None else parse_size(text) for text in (larger, smaller)]
    times = [None if text is None else parse_time(text) for text in (newer, older)]
    # fnmatch's time does not explode with the number of stars. A '[' is an ordinary character here.
    matches = re.compile(fnmatch.translate(pattern.replace("[", "[[]"))).match
    moment, has_status = read_moment(as_of, current), status_filter(current)

    def is_selected(row: ListedObject) -> bool:
        return (
            matches(row.key) is not None
            and (sizes[0] is None or row.size_bytes > sizes[0])
            and (sizes[1] is None or row.size_bytes < sizes[1])
            and (times[0] is None or row.last_modified > times[0])
            and (times[1] is None or row.last_modified < times[1])
            and has_status(row)
        )

    prefix = re.split(r"[*?]", pattern, maxsplit=1)[0]
    with _opened(source) as lookup:
        for row in list_rows(lookup, source, prefix, include=is_selected, as_of=moment):
            _print_entry(row, long, json)


def du(  # noqa: PLR0917 - the command line's options
    source: SourceArgument,
    prefix: PrefixArgument = "",
    summarize: Annotated[
        bool, typer.Option("-s", "--summarize", help="Show only the total.")
    ] = False,
    current: CurrentOption = False,
    as_of: AsOfOption = None,
    json: JsonOption = False,
) -> None:
    r"""Sum up archived objects below a prefix.

    Prints a line for each next level, and a total. Counts the objects that `caf ls --recursive`
    lists, by their sizes in S3.

    \b
    Example:
      caf du demo packages/ --json

    \b
    Exit status: 0, 3, 6
      2   TIME is not a time.
      11  No archived key begins with PREFIX.
    """
    moment = read_moment(as_of, current)
    total_objects = total_bytes = 0
    with _opened(source) as lookup:
        listed = list_rows(lookup, source, prefix, include=status_filter(current), as_of=moment)
        for below, members in groupby(listed, lambda row: common_prefix(prefix, row.key)):
            objects = size_bytes = 0
            for row in members:
                objects, size_bytes = objects + 1, size_bytes + row.size_bytes
            total_objects, total_bytes = total_objects + objects, total_bytes + size_bytes
            if below and not summarize:
                _print_sum(below, objects, size_bytes, json)
        if not total_objects:
            raise nothing_listed(lookup, source, prefix, current, moment)
    _print_sum(prefix, total_objects, total_bytes, json)


@contextmanager
def _opened(source: str) -> Iterator[LocationLookups]:
    settings = load_settings()
    with opened_lookup(settings) as lookup:
        require_archived(settings, lookup, source)
        yield lookup


def status_filter(current: bool) -> Callable[[Location | ListedObject], bool]:
    """Return the filter for --current."""
    return is_current if current else every


def nothing_listed(
    lookup: LocationLookups, source: str, prefix: str, current: bool, as_of: datetime | None = None
) -> NotLocated:
    """Return the error for an empty listing, with a hint if the prefix is a key."""
    if prefix and not current and not as_of and lookup.not_archived(source, prefix):
        return not_located(lookup, source, prefix)
    then = f" as of {show_time(as_of)}" if as_of else ""
    what = "is current" if current else f"is archived{then}"
    if not prefix:
        return NotLocated(
            f"no object of source '{source}' {what}", hint=f"'caf status {source}' shows what is"
        )
    return NotLocated(
        f"no key of source '{source}' {what} and begins with '{prefix}'",
        hint=f"'caf ls {source}' lists the keys",
    )


def read_moment(as_of: str | None, current: bool) -> datetime | None:
    """Return the time of --as-of. Raises UsageError with --current."""
    exclusive(as_of=as_of is not None, current=current)
    return None if as_of is None else parse_time(as_of)


def _print_entry(
    entry: ListedObject | Location | str, long: bool, json: bool, *, versions: bool = False
) -> None:
    if isinstance(entry, str):
        if json:
            print_json(prefix=entry)
            return
        indent = f"{'':>19}  {'':>19}  {'':8}  " if long or versions else ""
        sys.stdout.write(f"{indent}{printable(entry)}\n")
        return
    row = entry if isinstance(entry, ListedObject) else ListedObject.of(entry)
    if json:
        print_json(
            key=row.key,
            size_bytes=row.size_bytes,
            last_modified=row.last_modified.astimezone(UTC),
            status=row.status,
            etag=row.etag,
            object_version=row.object_version,
            version_id=row.version_id,
            sha256=row.sha256 or None,
            chunks=row.chunks,
        )
        return
    columns = ""
    if long or versions:
        modified = f"{row.last_modified.astimezone(UTC):{_TIME}}"
        columns = f"{row.size_bytes:>19,}  {modified}  {row.status:8}  "
    if versions:
        columns += f"{printable(row.object_version)}  "
    sys.stdout.write(f"{columns}{printable(row.key)}\n")


def _print_sum(prefix: str, objects: int, size_bytes: int, json: bool) -> None:
    if json:
        print_json(prefix=prefix, objects=objects, size_bytes=size_bytes)
        return
    sys.stdout.write(
        f"{show_size(size_bytes):>10}  {counted(objects, 'object'):>20}  "
        f"{printable(prefix) or 'in all'}\n"
    )
