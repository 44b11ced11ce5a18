"""`caf restore`."""

import os
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

import typer

from caf_pipeline.cli.listing import CurrentOption, nothing_listed, read_moment, status_filter
from caf_pipeline.cli.opening import opened_lookup, opened_reader
from caf_pipeline.cli.terminal import (
    AsOfOption,
    DryRunOption,
    JsonOption,
    SourceArgument,
    counted,
    note,
    object_progress,
    print_json,
    printable,
    show_size,
)
from caf_pipeline.errors import UsageError
from caf_pipeline.ledger.records import ListedObject, Location, LocationLookups
from caf_pipeline.retrieval.listing import (
    count_not_archived,
    list_named_versions,
    list_objects,
    list_rows,
)
from caf_pipeline.retrieval.restore import RestoredObject, RestoreSums, restore_objects
from caf_pipeline.retrieval.side_by_side import take_all
from caf_pipeline.settings import load_settings
from caf_pipeline.waits import Announcer, Waits
from caf_pipeline.wiring import BUCKET_SCHEME, open_restore


class RestoredVersions(StrEnum):
    """Which versions to restore."""

    CURRENT = "current"
    ALL = "all"


def restore(  # noqa: PLR0917 - the command line's options
    source: SourceArgument,
    where: Annotated[
        list[str],
        typer.Argument(
            metavar="[PREFIX] DEST",
            help="Beginning of the keys; the folder or s3://BUCKET/PREFIX to write to.",
        ),
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Replace files or objects that differ.")
    ] = False,
    dry_run: DryRunOption = False,
    current: CurrentOption = False,
    versions: Annotated[
        RestoredVersions,
        typer.Option(
            "--versions", help="With `all`, restore older versions, too; only to a folder."
        ),
    ] = RestoredVersions.CURRENT,
    as_of: AsOfOption = None,
    profile: Annotated[
        str, typer.Option("--profile", metavar="NAME", help="The AWS profile for the bucket.")
    ] = "",
    endpoint_url: Annotated[
        str,
        typer.Option("--endpoint-url", metavar="URL", help="The bucket's server, if not AWS."),
    ] = "",
    json: JsonOption = False,
) -> None:
    r"""Write archived objects to a folder or a bucket.

    Restores the objects that `caf ls --recursive` lists, and counts those below PREFIX that are not
    archived. Each appears when it is complete and its SHA-256 is verified. Equal ones are kept, so
    you can repeat an interrupted restore. Different ones are replaced only with --force.

    In a folder, the key is the path, and LastModified is the file's time. Nothing is written
    outside of the folder, and no symbolic link in it is followed. A part of a key that cannot be a
    file name gets a name that begins with .caf~ or .caf+ (docs/how-to/restore.md). Files keep no
    content type and user metadata.

    --versions all writes the version that `caf get` returns to KEY, and older versions to
    KEY~caf-v-VERSION, or with the ETag for VERSION. If an archived key has that name, a further ~
    is added.

    In a bucket, the key is PREFIX/ and the archived key. Headers and user metadata are restored and
    compared, too, except of adopted files, which have none; a note counts these. LastModified is
    the time of the restore. Credentials, region and server are those of the AWS tools.

    \b
    Examples:
      caf restore demo /srv/restored --versions all
      caf restore demo packages/ s3://other-bucket/restored --endpoint-url https://s3.example.com

    \b
    Exit status: 0, 3, 6, 8
      1   Some are different, or cannot be written.
      5   The bucket is missing, refuses access or cannot be reached.
      7   Some object could not be read.
      9   No provider returns some object right.
      10  Another process restores into this folder, a parent or a subfolder.
      11  No archived key begins with PREFIX.
    """
    if len(where) > 2:
        raise UsageError(
            "There are more arguments than SOURCE, PREFIX and DEST.",
            hint="Quote names that have spaces.",
        )
    prefix, destination = (where[0] if len(where) == 2 else ""), where[-1]
    moment, to_bucket = read_moment(as_of, current), destination.startswith(BUCKET_SCHEME)
    all_versions = versions is RestoredVersions.ALL
    if all_versions and (moment or current):
        raise UsageError("--versions all excludes --as-of and --current.", hint="Give one of them.")
    if all_versions and to_bucket:
        raise UsageError(
            "--versions all restores to a folder, not to a bucket.",
            hint="Restore to a folder and upload its files, or give --as-of TIME to restore what "
            "was current then.",
        )
    if (profile or endpoint_url) and not to_bucket:
        raise UsageError(
            "--profile and --endpoint-url are for a bucket.",
            hint="Give s3://BUCKET/PREFIX as DEST.",
        )
    settings, sums, unread_count = load_settings(), RestoreSums(), 0
    with (
        opened_lookup(settings) as lookup,
        opened_reader(settings, lookup, source) as store,
        open_restore(
            lookup,
            store,
            source,
            _destination(lookup, source, where),
            force=force,
            dry_run=dry_run,
            profile=profile,
            endpoint_url=endpoint_url,
            waits=Waits(Announcer(note)),
        ) as target,
    ):
        unread = lookup.unread_chunks(source)

        def take(restored: RestoredObject) -> None:
            nonlocal unread_count
            unread_count += any(part.chunk in unread for part in restored.location.ranges)
            sums.add(restored)
            _print(restored, dry_run, json)
            advance(restored.location.size_bytes)

        include = status_filter(current)
        rows: Iterable[Location | ListedObject]
        if all_versions:
            listed = list_named_versions(lookup, source, prefix)
            rows = list_named_versions(lookup, source, prefix)
        else:
            listed = list_objects(lookup, source, prefix, include=include, as_of=moment)
            rows = list_rows(lookup, source, prefix, include=include, as_of=moment)
        total_bytes = 0
        with object_progress(f"counting what to restore of {source}") as advance:
            sums.not_yet_archived, sums.skipped = count_not_archived(lookup, source, prefix)
            for row in rows:
                total_bytes += row.size_bytes
                advance(row.size_bytes)
        with object_progress(f"restoring {source}", total_bytes) as advance:
            ended = take_all(restore_objects(listed, target), take)
        if not sums.listed:
            raise nothing_listed(lookup, source, prefix, current, moment)
        if all_versions or moment:
            sums.older_versions = 0  # they are restored, or irrelevant
    _print_sums(sums, source, destination, dry_run=dry_run, json=json)
    if unread_count:
        note(
            f"{source}: {counted(unread_count, 'object')} of these may be forged: a rebuild "
            "restored their chunks, whose bytes were not yet found to have their Merkle root; "
            f"'caf prove {source}' reads the chunks whole"
        )
    failure = sums.failure(ended)
    if ended and failure is not ended:
        note(str(ended))
    if failure:
        raise failure


def _destination(lookup: LocationLookups, source: str, where: list[str]) -> str:
    only = where[0] if len(where) == 1 else ""
    if (
        only.endswith("/")
        and not os.path.exists(only)
        and any(True for _ in list_objects(lookup, source, only))
    ):
        raise UsageError(
            f"{only!r} is not a folder, and archived keys of source '{source}' begin with it: DEST "
            "is missing.",
            hint="Add DEST. If this is DEST, make the folder first.",
        )
    return where[-1]


def _print(restored: RestoredObject, dry_run: bool, json: bool) -> None:
    key, error, outcome = restored.location.row.key, restored.error, restored.outcome
    why = str(error) if error else None
    if outcome == "different":
        why = "something else is there"
    if error:
        note(str(error))
    elif why:
        note(f"{key!r} was not written: {why}.")
    would_restore = dry_run and outcome == "restored"
    if json and outcome != "equal":
        print_json(
            key=key,
            path=restored.place or None,
            size_bytes=restored.location.size_bytes,
            unknown_post=restored.location.from_unknown_post,
            result="would_restore" if would_restore else outcome,
            error=why,
        )
    elif would_restore:
        typer.echo(printable(restored.place))


def _print_sums(
    sums: RestoreSums, source: str, destination: str, *, dry_run: bool, json: bool
) -> None:
    if json:
        print_json(
            listed=sums.listed,
            equal=sums.equal,
            different=sums.different,
            failed=sums.failed,
            **{"would_restore" if dry_run else "restored": sums.restored},
            bytes=sums.restored_bytes,
            without_headers=sums.without_headers,
            from_unknown_posts=sums.from_unknown_posts,
            not_yet_archived=sums.not_yet_archived,
            skipped=sums.skipped,
            older_versions=sums.older_versions,
        )
        return
    done = "would be written" if dry_run else "written"
    note(
        f"{source}: of {counted(sums.listed, 'object')} {sums.restored:,} {done} to "
        f"{destination!r} ({show_size(sums.restored_bytes)}), {sums.equal:,} there already, "
        f"{sums.different:,} different, {sums.failed:,} failed"
    )
    if sums.without_headers:
        has = "has" if sums.without_headers == 1 else "have"
        note(
            f"{source}: {counted(sums.without_headers, 'object')} of these {has} no headers and no "
            "user metadata, because an adopted file does not contain them"
        )
    if sums.from_unknown_posts:
        note(
            f"{source}: {counted(sums.from_unknown_posts, 'object')} of these from unknown posts, "
            f"which this ledger did not make: `caf ls {source} -rl` marks them"
        )
    if sums.older_versions:
        note(
            f"{source}: {counted(sums.older_versions, 'older version')} not restored: use "
            "--versions all with a folder"
        )
    if sums.beside:
        note(
            f"{source}: {sums.beside}: `caf status {source}` has the reasons, `caf get {source} "
            "KEY` the reason for one key"
        )
