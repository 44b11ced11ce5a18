"""The command that writes archived objects below a folder or into a bucket: restore."""

import os
from enum import StrEnum
from typing import Annotated

import typer

from caf_pipeline.cli.listing import CurrentOption, nothing_listed, read_moment, wanted_status
from caf_pipeline.cli.opening import opened_lookup, opened_reader
from caf_pipeline.cli.terminal import (
    AsOfOption,
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
from caf_pipeline.ledger.protocol import LocationLookups
from caf_pipeline.retrieval.listing import count_not_archived, list_named_versions, list_objects
from caf_pipeline.retrieval.restore import RestoredObject, RestoreSums, restore_objects
from caf_pipeline.retrieval.side_by_side import take_all
from caf_pipeline.run_wiring import BUCKET_SCHEME, open_restore
from caf_pipeline.settings import load_settings
from caf_pipeline.waits import Announcer, Waits


class RestoredVersions(StrEnum):
    """Which versions of a key are restored."""

    CURRENT = "current"
    ALL = "all"


def restore(  # noqa: PLR0917 - the command line's options
    source: SourceArgument,
    where: Annotated[
        list[str],
        typer.Argument(
            metavar="[PREFIX] DEST",
            help="What the keys begin with; a folder, or s3://BUCKET/PREFIX, to write to.",
        ),
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Replace what is there and is not equal.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be written; write nothing.")
    ] = False,
    current: CurrentOption = False,
    versions: Annotated[
        RestoredVersions,
        typer.Option(
            "--versions", help="Restore older versions of each key, too; to a folder only."
        ),
    ] = RestoredVersions.CURRENT,
    as_of: AsOfOption = None,
    profile: Annotated[
        str, typer.Option("--profile", metavar="NAME", help="The AWS profile for the bucket.")
    ] = "",
    endpoint_url: Annotated[
        str,
        typer.Option("--endpoint-url", metavar="URL", help="The bucket's server, where not AWS."),
    ] = "",
    json: JsonOption = False,
) -> None:
    r"""Write archived objects to a folder or a bucket.

    What `caf ls --recursive` lists is restored; how many other objects below PREFIX are not
    archived yet, or were skipped, is said. Each file or object appears when it is whole and its
    SHA-256 was compared. One that is there and equal is left as it is, so that the same command
    goes on after it was stopped or killed; one that is there and is not equal is never replaced
    without --force.

    In a folder, a file has the key as its path, and LastModified as its time. Nothing is written
    outside the folder, and no symbolic link in it is followed. Where the key cannot be a path, a
    part of it begins with .caf~ or .caf+, and the key can be read from it (docs/how-to/restore.md):
    parts that are empty, '.' or '..', that begin with .caf, that are too long, or where one key's
    name is another's folder. Content type and user metadata are not kept in files.

    --versions all restores every archived version of a key to a folder. The version that `caf get`
    gives is written at the key, an older version at KEY~caf-v-VERSION, or with its ETag for
    VERSION. A further ~ is added if an archived key has that name. `caf ls --versions` lists the
    versions. --as-of restores what `caf get --as-of` gives. If both options are missing, a line on
    standard error counts the older versions that are left out.

    In a bucket, an object has PREFIX/ and the key as its key, and its content type, its other
    headers and its user metadata as archived; LastModified is the time of the restore. Equal is
    what has the same headers, too. Of an adopted file no headers are
    known: its objects come back without, and are counted. Credentials, region and server are looked
    for as the AWS tools do.

    \b
    Examples:
      caf restore demo packages/ /srv/restored
      caf restore demo /srv/restored --dry-run
      caf restore demo /srv/restored --versions all
      caf restore demo /srv/restored --as-of 2026-11-21T10:00
      caf restore demo packages/ s3://other-bucket/restored --endpoint-url https://s3.example.com

    Exit status: 0 all that is listed is there; 1 some files or objects are different, or cannot be
    here; 2 wrong arguments; 3 a setting is wrong or there is no such source; 5 the bucket is
    missing, refuses, or cannot be reached; 6 the database failed; 7 some object could not be read;
    8 the folder cannot be written; 9 no provider gives some object right, or none has it; 10
    another process restores into the folder, into one in it or into one that it is in; 11 no
    archived key begins with PREFIX.
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
    settings, sums = load_settings(), RestoreSums()
    with (
        opened_lookup(settings) as lookup,
        opened_reader(settings, lookup, source) as store,
        open_restore(
            lookup,
            store,
            _destination(lookup, source, where),
            force=force,
            dry_run=dry_run,
            profile=profile,
            endpoint_url=endpoint_url,
            waits=Waits(Announcer(note)),
        ) as target,
        object_progress(f"restoring {source}") as advance,
    ):
        sums.not_yet_archived, sums.skipped = count_not_archived(lookup, source, prefix)

        def take(one: RestoredObject) -> None:
            sums.add(one)
            _print(one, dry_run, json)
            advance(one.location.size_bytes)

        listed = (
            list_named_versions(lookup, source, prefix)
            if all_versions
            else list_objects(lookup, source, prefix, wanted=wanted_status(current), as_of=moment)
        )
        ended = take_all(restore_objects(listed, target), take)
        if not sums.listed:
            raise nothing_listed(lookup, source, prefix, current, moment)
        if all_versions or moment:
            sums.older_versions = 0  # they are restored, or were not asked for
    _print_sums(sums, source, destination, dry_run=dry_run, json=json)
    failure = sums.failure(ended)
    if ended and failure is not ended:
        note(str(ended))
    if failure:
        raise failure


def _destination(lookup: LocationLookups, source: str, where: list[str]) -> str:
    """Return DEST; raises UsageError where it was more likely meant as PREFIX: all of the source
    would go to a new folder.
    """
    only = where[0] if len(where) == 1 else ""
    if (
        only.endswith("/")
        and not os.path.exists(only)
        and any(True for _ in list_objects(lookup, source, only))
    ):
        raise UsageError(
            f"{only!r} is no folder, and archived keys of source '{source}' begin with it: DEST is "
            "missing.",
            hint="Give DEST behind it. If it is DEST, make the folder first.",
        )
    return where[-1]


def _print(one: RestoredObject, dry_run: bool, json: bool) -> None:
    key = one.location.row.key
    why = (
        "something else is there"
        if one.outcome == "different"
        else str(one.error)
        if one.error
        else None
    )
    if one.error:
        note(str(one.error))
    elif why:
        note(f"{key!r} was not written: {why}.")
    if json and one.outcome != "equal":
        result = "would_restore" if dry_run and one.outcome == "restored" else one.outcome
        shown = {"key": key, "path": one.place or None, "size_bytes": one.location.size_bytes}
        print_json(shown | {"result": result, "error": why})
    elif dry_run and one.outcome == "restored":
        typer.echo(printable(one.place))


def _print_sums(
    sums: RestoreSums, source: str, destination: str, *, dry_run: bool, json: bool
) -> None:
    if json:
        counts = {name: getattr(sums, name) for name in ("listed", "equal", "different", "failed")}
        restored = {
            "would_restore" if dry_run else "restored": sums.restored,
            "bytes": sums.restored_bytes,
        }
        beside = {
            name: getattr(sums, name)
            for name in ("without_headers", "not_yet_archived", "skipped", "older_versions")
        }
        print_json(counts | restored | beside)
        return
    done = "would be written" if dry_run else "written"
    note(
        f"{source}: of {counted(sums.listed, 'object')} {sums.restored:,} {done} to {destination!r}"
        f" ({show_size(sums.restored_bytes)}), {sums.equal:,} there already, {sums.different:,} "
        "different,"
        f" {sums.failed:,} failed"
    )
    if sums.without_headers:
        has = "has" if sums.without_headers == 1 else "have"
        note(
            f"{source}: {counted(sums.without_headers, 'object')} of these {has} no headers and no "
            "user metadata: an adopted file"
            " does not tell them"
        )
    if sums.older_versions:
        note(
            f"{source}: {counted(sums.older_versions, 'older version')} not restored: --versions "
            "all restores them to a folder"
        )
    if sums.beside:
        note(
            f"{source}: {sums.beside}: `caf status {source}` has the reasons, `caf get {source} "
            "KEY` that of one"
        )
