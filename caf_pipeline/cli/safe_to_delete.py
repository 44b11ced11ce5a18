"""`caf safe-to-delete`. Nothing in this project deletes anything in S3."""

from pathlib import Path
from typing import Annotated, Final

import typer

from caf_pipeline.cli.opening import opened_ledger, opened_run_context
from caf_pipeline.cli.terminal import (
    JsonOption,
    SourceArgument,
    counted,
    note,
    output_option,
    parse_path,
    print_json,
    printable,
    progress,
    show_size,
)
from caf_pipeline.errors import CafError, SettingsError
from caf_pipeline.maintenance.deletion.assessment import ProgressReporter
from caf_pipeline.maintenance.deletion.safe_to_delete import DeletionReport, find_deletable
from caf_pipeline.settings import load_settings

_SENTENCES: Final = {
    "not_planned": "not archived: no plan has them yet",
    "claimed": "not archived yet: a chunk under way has them",
    "left_out": "not archived: a filter of the source leaves them out",
    "skipped": "not archived: skipped",
    "changed": "changed in S3 since they were archived",
    "metadata_changed": "archived, but written again in S3 with other headers or user metadata",
    "rewritten": "archived, but written again in S3, and not proven to have the archived bytes",
    "damaged": "archived, but their chunk is damaged",
    "too_few_copies": "archived, but too few copies of their chunk are listed and right",
    "one_window": "archived, but not yet proven in two proof windows in a row",
    "not_looked_at": "archived, but their chunk could not be checked now",
    "not_read_back": "archived, but their chunk was not read back yet",
    "not_opened": "archived, but no identity has opened their whole chunk yet",
    "disagrees": "archived, but the ledger and the chunk do not agree on them",
    "adopted": "archived by another program, which kept none of their headers and user metadata",
    "not_told_apart": "archived, but S3 gives neither a version id nor a strong ETag to detect "
    "changes",
    "not_expressible": "safe, but a manifest for S3 Batch Operations cannot name their version",
}
_CAUTION: Final = (
    "this is true now; what is on Jackal can be lost later, also by a stranger who posts and "
    "deletes the same root (docs/how-to/connect-jackal.md): keep the proof watch and repairs "
    "running"
)
_HINTS: Final = {
    "damaged": "'caf repair {source}' mends damaged chunks",
    "too_few_copies": "'caf repair {source}' mends damaged chunks",
    "not_planned": "'caf run {source}' archives what is new or changed",
    "left_out": "to archive them, too, change the filters of sources.{source} in caf.toml",
    "changed": "'caf run {source}' archives what is new or changed",
    "metadata_changed": "'caf run {source}' archives them again with their new metadata",
    "rewritten": "'caf run {source}' archives them again",
    "claimed": "'caf run {source}' continues chunks under way",
    "disagrees": "keep objects on which the ledger and their chunk disagree",
    "not_read_back": "run the command again, without --no-read-back",
    "not_opened": "run 'caf safe-to-delete {source}' on a machine with the identity, without "
    "--no-read-back",
    "one_window": "run the command again in the next proof window: it needs two in a row",
}


def safe_to_delete(
    source: SourceArgument,
    output: Annotated[
        Path | None, output_option("The list; SOURCE-safe-to-delete.csv by default.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            parser=parse_path,
            metavar="FILE",
            help="Write all other objects with their reasons: .parquet or .csv.",
        ),
    ] = None,
    no_read_back: Annotated[
        bool,
        typer.Option(
            "--no-read-back",
            help="Download no chunk; chunks never read back are not safe.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    r"""List the objects that may be deleted in S3. Nothing is deleted.

    An object is listed only if all of this is true when the list is written:

    \b
    - Its chunk is located and undamaged.
    - The required copies were proven in two consecutive proof windows.
      The later window is no older than the last one.
    - One of these copies returned all bytes of the chunk once.
      The Merkle root and each object's SHA-256 were right.
    - If the chunk is encrypted, an identity opened all of these bytes.
    - The chunk's manifest and the ledger agree on the object and its headers.
    - A fresh inventory lists it with the same version id, or ETag, size and LastModified.

    The first run downloads every chunk once. You can stop it; the next run continues. For encrypted
    chunks, run the command on a machine with the identity: without it only the Merkle root is
    compared, and the chunk is downloaded again with the identity.

    If only LastModified is newer, a HEAD request compares S3's full-object checksum, Content-Type,
    -Encoding, -Language, -Disposition, Cache-Control, Expires and the user metadata with the
    archive. The object is safe only if S3 has this checksum and all are equal. Tags, ACLs and
    object lock are not archived.

    A window counts if the chain shows a verified proof of the provider. Unless the proof watch
    checks each chunk in each window, run this command in two consecutive windows; it prints when
    the next one begins. Files of up to 20,480 bytes have no proofs on the chain: each copy is read
    in two windows instead.

    Safe objects may be lost later: a stranger can make a provider remove its bytes
    (docs/explanation/jackal.md). The proof watch finds this at the next missed proof, and a repair
    restores the chunk from staging, another copy or S3. After the deletion in S3, other copies are
    all that is left.

    FILE is a manifest for S3 Batch Operations: lines of bucket,key or bucket,key,version id with
    percent-encoded keys. An older FILE is removed right before the report and the new FILE appear;
    after an earlier error it is unchanged.

    To delete what is listed, follow docs/how-to/delete-from-s3.md.
    Run this command right before:
    without a version id, or with "null", a key that was written again would be deleted with its new
    bytes. In a bucket with versions, deleting a current version by its id restores the one before
    it, and deleting without an id frees nothing.

    Older versions are listed only with versions = "all", each by its id; delete markers never. The
    command counts both.

    \b
    Examples:
      caf safe-to-delete demo -o list.csv --report not-yet.parquet
      caf safe-to-delete demo --no-read-back --json | jq 'select(.reason)'

    \b
    Exit status: 5, 7, 8
      0   All objects in S3 are safe and listed, or there are none.
      1   Some are not safe yet; the others are listed.
      2   FILE is not a regular file, or is also the report.
      3   Wrong settings, no such source, or the store has no proofs.
      6   The database failed, or a chunk changed.
      9   The numbers of objects do not add up.
      10  Another process runs the same command.
    With status 2 or higher, nothing is written.
    """
    settings = load_settings()
    settings.source(source)
    if settings.store.kind == "directory":
        raise SettingsError(
            "store.kind is 'directory': a folder has no proofs, so no object in it is ever safe to "
            "delete in S3",
            hint='archive the source on Jackal (store.kind = "jackal"); see '
            "docs/how-to/connect-jackal.md",
        )
    manifest = output or Path(f"{source}-safe-to-delete.csv")
    reporter = ProgressReporter(note=note, progress=progress)
    with opened_ledger(settings) as ledger, opened_run_context(settings, ledger, source) as context:
        result = find_deletable(
            context, manifest, report=report, reads_back=not no_read_back, reporter=reporter
        )
    if json:
        _print_json(source, result)
    else:
        _print(source, result, report)
    if not result.everything_is_safe:
        unsafe = sum(group.objects for group in result.not_safe)
        hints = [
            _HINTS[group.reason].format(source=source)
            for group in result.not_safe
            if group.reason in _HINTS
        ]
        raise CafError(
            f"{unsafe:,} of {counted(result.snapshot.object_count, 'object')} of '{source}' are "
            "not safe to delete",
            hint="; ".join(dict.fromkeys(hints)),
        )


def _print(source: str, result: DeletionReport, report: Path | None) -> None:
    snapshot = result.snapshot
    objects = counted(snapshot.object_count, "object")
    if not snapshot.object_count:
        typer.echo(f"{source}: S3 has no objects of it: there is nothing to delete")
    elif result.manifest:
        typer.echo(
            f"{source}: {result.safe_objects:,} of {objects} {_are(result.safe_objects)} safe to "
            f"delete ({show_size(result.safe_bytes)} of {show_size(snapshot.object_bytes)})"
        )
        columns = ",".join(result.columns)
        typer.echo(f"listed in {printable(str(result.manifest))}, columns {columns}")
        typer.echo(_CAUTION)
    else:
        typer.echo(f"{source}: none of {objects} is safe to delete; no list was written")
    beside, not_listed = snapshot.beside, []
    if beside.older and not snapshot.all_versions:
        not_listed.append(
            f"{counted(beside.older, 'older version')}, which {_are(beside.older)} not archived: "
            f"sources.{source}.versions is 'current'"
        )
    if beside.markers:
        markers = counted(beside.markers, "delete marker")
        not_listed.append(f"{markers}, which {_are(beside.markers)} no object")
    if not_listed:
        typer.echo(f"not on the list: {'; '.join(not_listed)}")
    for group in result.not_safe:
        skip = f" ({group.skip})" if group.skip else ""
        typer.echo(
            f"{counted(group.objects, 'object')} ({show_size(group.size_bytes)}) "
            f"{_SENTENCES[group.reason]}{skip}:"
        )
        previous = ""  # a detail that examples share is printed once
        for key, detail in group.examples:
            shown = f"  {printable(detail)}" if detail and detail != previous else ""
            typer.echo(f"  {printable(key)}{shown}")
            previous = detail
        if len(group.examples) < group.objects:
            typer.echo(f"  … and {group.objects - len(group.examples):,} more")
    if report:
        typer.echo(f"all of them are in {printable(str(report))}")
    if result.gone:
        names = ", ".join(printable(key) for key in result.gone_examples)
        more = ", …" if result.gone > len(result.gone_examples) else ""
        gone = counted(result.gone, "archived key")
        typer.echo(f"{gone} gone from S3 already, nothing to delete: {names}{more}")


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _print_json(source: str, result: DeletionReport) -> None:
    chunks_read_back, bytes_read_back = result.read_back
    print_json(
        source=source,
        objects=result.snapshot.object_count,
        bytes=result.snapshot.object_bytes,
        safe_objects=result.safe_objects,
        safe_bytes=result.safe_bytes,
        list=result.manifest,
        columns=result.columns,
        gone_keys=result.gone,
        **result.snapshot.versions_as_json(),
        chunks_read_back=chunks_read_back,
        bytes_read_back=bytes_read_back,
        caution=_CAUTION if result.manifest else None,
    )
    for group in result.not_safe:
        examples = [{"key": key, "detail": detail or None} for key, detail in group.examples]
        print_json(
            reason=group.reason,
            skip=group.skip or None,
            objects=group.objects,
            bytes=group.size_bytes,
            examples=examples,
        )
