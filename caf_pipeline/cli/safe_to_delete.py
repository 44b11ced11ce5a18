"""The command that says what may be deleted in S3: safe-to-delete.

Nothing in this project deletes anything in S3.
"""

from pathlib import Path
from typing import Annotated, Final

import typer

from caf_pipeline.cli.opened_ledger import opened_ledger
from caf_pipeline.cli.run_opening import opened_run_context
from caf_pipeline.cli.terminal import (
    JsonOption,
    SourceArgument,
    a_path,
    counted,
    note,
    print_json,
    printable,
    progress,
    show_size,
)
from caf_pipeline.errors import CafError, SettingsError
from caf_pipeline.inventory.snapshot import Snapshot
from caf_pipeline.maintenance.deletion.assessment import ProgressReporter
from caf_pipeline.maintenance.deletion.safe_to_delete import DeletionReport, NotSafe, find_deletable
from caf_pipeline.settings import load_settings

_SENTENCES: Final = {
    "not_planned": "not archived: no plan has them yet",
    "claimed": "not archived yet: a chunk under way has them",
    "skipped": "not archived: skipped",
    "changed": "changed in S3 since they were archived",
    "metadata_changed": "archived, but written again in S3 with other headers or user metadata",
    "rewritten": "archived, but written again in S3, and their bytes are not proven to be the "
    "archived ones",
    "damaged": "archived, but their chunk is damaged",
    "too_few_copies": "archived, but too few copies of their chunk are listed and right",
    "one_window": "archived, but not yet proven in two proof windows in a row",
    "not_looked_at": "archived, but their chunk could not be looked at now",
    "not_read_back": "archived, but their chunk was not read back yet",
    "disagrees": "archived, but the ledger and the chunk do not agree on them",
    "adopted": "archived by another program, which kept none of their headers and user metadata",
    "not_told_apart": "archived, but S3 gives neither a version id nor a strong ETag that would "
    "tell a change of them",
    "not_expressible": "safe, but a manifest for S3 Batch Operations cannot name their version",
}
_CAUTION: Final = (
    "this is what was found just now; what is on Jackal can be lost later, also by a stranger who "
    "posts and deletes the same root"
    " (docs/how-to/connect-jackal.md): keep the proof watch and repairs running"
)
_WHAT_HELPS: Final = {
    "damaged": "'caf repair {source}' mends damaged chunks",
    "too_few_copies": "'caf repair {source}' mends damaged chunks",
    "not_planned": "'caf run {source}' archives what is new or changed",
    "changed": "'caf run {source}' archives what is new or changed",
    "metadata_changed": "'caf run {source}' archives them again, with what they have now",
    "rewritten": "'caf run {source}' archives them again",
    "claimed": "'caf run {source}' goes on with chunks under way",
    "disagrees": "keep these objects: the ledger says of them what their chunk does not",
    "not_read_back": "run the command again, without --no-read-back",
    "one_window": "run the command again in the next proof window: of two in a row both have to be "
    "seen",
}


def safe_to_delete(
    source: SourceArgument,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            parser=a_path,
            metavar="FILE",
            help="The list; SOURCE-safe-to-delete.csv by default.",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            parser=a_path,
            metavar="FILE",
            help="Every other object, with its reason: .parquet or .csv.",
        ),
    ] = None,
    no_read_back: Annotated[
        bool,
        typer.Option(
            "--no-read-back",
            help="Download no chunk; those never read back as a whole are not safe.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    r"""List the objects that may be deleted in S3. Nothing is deleted.

    An object is listed only where, asked now: its chunk is located and undamaged; at least the
    required copies of it were proven in two proof windows that follow each other, the later one no
    older than the last; all bytes of the chunk came back from one of these copies once, with its
    Merkle root and each object's SHA-256; the chunk's manifest says of the object what the ledger
    does; and a fresh inventory still has it with the same version id, or the same ETag, size and
    LastModified. The first run reads every chunk once: that is as much as was archived. It may be
    stopped at any time; the next goes on.

    If only LastModified is newer, one HEAD asks for S3's checksum of the full object, its headers
    and user metadata. If S3 has no checksum that can be compared, or anything differs from the
    archive, the object is not safe. The headers are Content-Type, -Encoding, -Language,
    -Disposition, Cache-Control and Expires. Tags, ACLs and object lock are not archived.

    A window counts where the chain shows that the provider's last proof was verified. The proof
    watch sees both windows where it looks at each chunk in each window; else run this in two
    windows in a row: it says when the next one begins. Of a file of up to 20,480 bytes the chain
    shows no verified proof, ever: each copy of it is read as a whole in two windows instead.

    What is safe now may be lost later. Whoever knows a chunk's Merkle root, which the chain lists,
    can post it, let a provider claim it and delete that post: the provider then removes the bytes,
    though our post stays listed until its next missed proof. The proof watch finds that in its next
    look, and a repair puts the chunk back from staging, from another copy or from
    S3: once the objects are deleted there, other copies are all that is left.

    FILE is a manifest for S3 Batch Operations: a line bucket,key or bucket,key,version id for each
    object, keys percent-encoded. It is written when it is complete. Where nothing is safe there is
    none, and an older list under its name is removed; after an error it is left as it was.

    S3 Batch Operations cannot delete by itself. Let it invoke a Lambda function that decodes each
    key and deletes it, with its version id where there is one; or let it tag the objects and let a
    lifecycle rule expire what has the tag. Run this right before: where a line has no version id,
    or "null", a key that is written again after this command looked would be deleted with its new
    bytes. Any other version id makes it exact; deleting a current version by its id brings the one
    before it back, which the next run looks at. Deleting without a version id in a bucket with
    versions only adds a delete marker: nothing is freed.

    \b
    Examples:
      caf safe-to-delete demo
      caf safe-to-delete demo -o list.csv --report not-yet.parquet
      caf safe-to-delete demo --no-read-back --json | jq 'select(.reason)'

    With versions = "current", the objects are the current versions: older ones are neither archived
    nor listed. With "all", each version is listed by its own id. Delete markers are not objects,
    and never listed. How many there are of both is printed.

    Exit status: 0 every object that S3 has of the source is safe and listed (or it has none); 1
    some are not safe yet, the rest is listed; 2 FILE is not a regular file, or is also the report;
    3 a setting is wrong, there is no such source, or the store proves nothing over time; 5 the
    source, 6 the database or 7 the store failed, 6 also where a chunk changed while the list was
    written; 8 no room; 9 the accounting does not hold; 10 the same is under way. Nothing is written
    from 2 on.
    """
    settings = load_settings()
    settings.source(source)
    if settings.store.kind == "directory":
        raise SettingsError(
            "store.kind is 'directory': a folder proves nothing over time, so no object in it is "
            "ever safe to delete in S3",
            hint='archive the source on Jackal (store.kind = "jackal"); '
            "docs/how-to/connect-jackal.md says what "
            "it takes",
        )
    manifest = output or Path(f"{source}-safe-to-delete.csv")
    reporter = ProgressReporter(tell=note, progress=progress)
    with opened_ledger(settings) as ledger, opened_run_context(settings, ledger, source) as context:
        found = find_deletable(
            context, manifest, report=report, reads_back=not no_read_back, reporter=reporter
        )
    if json:
        _print_json(source, found)
    else:
        _print(source, found, report)
    if not found.everything_is_safe:
        raise _not_everything(source, found)


def _not_everything(source: str, found: DeletionReport) -> CafError:
    objects = counted(found.snapshot.object_count, "object")
    unsafe = sum(each.objects for each in found.not_safe)
    helps = [
        _WHAT_HELPS[each.reason].format(source=source)
        for each in found.not_safe
        if each.reason in _WHAT_HELPS
    ]
    return CafError(
        f"{unsafe:,} of {objects} of '{source}' are not safe to delete",
        hint="; ".join(dict.fromkeys(helps)),
    )


def _print(source: str, found: DeletionReport, report: Path | None) -> None:
    snapshot = found.snapshot
    if not snapshot.object_count:
        typer.echo(f"{source}: S3 has no objects of it: there is nothing to delete")
    elif found.manifest:
        are = "is" if found.safe_objects == 1 else "are"
        typer.echo(
            f"{source}: {found.safe_objects:,} of {counted(snapshot.object_count, 'object')} {are} "
            "safe to delete"
            f" ({show_size(found.safe_bytes)} of {show_size(snapshot.object_bytes)})"
        )
        typer.echo(f"listed in {printable(str(found.manifest))}, columns {','.join(found.columns)}")
        typer.echo(_CAUTION)
    else:
        typer.echo(
            f"{source}: none of {counted(snapshot.object_count, 'object')} is safe to delete; no "
            "list was written"
        )
    if said := _beside(source, snapshot):
        typer.echo(said)
    for each in found.not_safe:
        skip = f" ({each.skip})" if each.skip else ""
        typer.echo(
            f"{counted(each.objects, 'object')} ({show_size(each.size_bytes)}) "
            f"{_SENTENCES[each.reason]}{skip}:"
        )
        _print_examples(each)
    if report:
        typer.echo(f"all of them are in {printable(str(report))}")
    if found.gone:
        names = ", ".join(printable(key) for key in found.gone_examples)
        more = ", …" if found.gone > len(found.gone_examples) else ""
        typer.echo(
            f"{counted(found.gone, 'archived key')} gone from S3 already, nothing to delete: "
            f"{names}{more}"
        )


def _beside(source: str, snapshot: Snapshot) -> str:
    """Say what S3 has of the source that is no object of the inventory, and so is not on the list;
    "" without any.
    """
    beside, said = snapshot.beside, []
    if beside.older and not snapshot.all_versions:
        older = counted(beside.older, "older version")
        said.append(
            f"{older}, which {_are(beside.older)} not archived: sources.{source}.versions is "
            "'current'"
        )
    if beside and beside.markers:
        said.append(
            f"{counted(beside.markers, 'delete marker')}, which {_are(beside.markers)} no object"
        )
    return f"not on the list: {'; '.join(said)}" if said else ""


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _print_examples(each: NotSafe) -> None:
    """Print some objects; a reason that all of them share is printed once."""
    said = ""
    for key, detail in each.examples:
        typer.echo(
            f"  {printable(key)}{f'  {printable(detail)}' if detail and detail != said else ''}"
        )
        said = detail
    if len(each.examples) < each.objects:
        typer.echo(f"  … and {each.objects - len(each.examples):,} more")


def _print_json(source: str, found: DeletionReport) -> None:
    print_json(
        {
            "source": source,
            "objects": found.snapshot.object_count,
            "bytes": found.snapshot.object_bytes,
            "safe_objects": found.safe_objects,
            "safe_bytes": found.safe_bytes,
            "list": str(found.manifest) if found.manifest else None,
            "columns": list(found.columns),
            "gone_keys": found.gone,
            **found.snapshot.versions_as_json(),
            "chunks_read_back": found.read_back[0],
            "bytes_read_back": found.read_back[1],
            "caution": _CAUTION if found.manifest else None,
        }
    )
    for each in found.not_safe:
        print_json(
            {
                "reason": str(each.reason),
                "skip": each.skip or None,
                "objects": each.objects,
                "bytes": each.size_bytes,
                "examples": [
                    {"key": key, "detail": detail or None} for key, detail in each.examples
                ],
            }
        )
