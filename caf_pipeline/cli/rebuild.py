"""`caf rebuild`: the ledger back from what the store lists."""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from caf_pipeline.cli.opened_ledger import opened_ledger
from caf_pipeline.cli.run_opening import opened_run_context
from caf_pipeline.cli.terminal import (
    JsonOption,
    SourcesArgument,
    counted,
    note,
    print_json,
    printable,
)
from caf_pipeline.errors import CafError, MnemonicRefused, UsageError
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.maintenance import rebuild as steps
from caf_pipeline.maintenance.rebuild import NOT_KNOWN, NOTHING_MISSING, FileKind, RebuildOutcome
from caf_pipeline.run_context import RunContext
from caf_pipeline.settings import Settings, load_settings
from caf_pipeline.source.protocol import UnavailableSource
from caf_pipeline.store.jackal.wallet import require_address


def rebuild(
    source: SourcesArgument = None,
    owner: Annotated[
        str | None,
        typer.Option(
            "--owner", metavar="ADDRESS", help="Who posted the chunks, instead of the wallet: jkl1…"
        ),
    ] = None,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole",
            help="Where copies differ, read them whole, and believe those with the Merkle root of "
            "the post.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tell what would be restored; restore nothing.")
    ] = False,
    json: JsonOption = False,
) -> None:
    r"""Restore a lost ledger from what the store lists.

    Reads ranges of the stored files. Needs the settings of the sources and the wallet's address; no
    mnemonic where --owner gives the address, and nothing of S3. It reports each listed file: a
    chunk that is restored, one that the ledger knows, or why it is none of ours. A chunk with fewer
    copies than required comes back as damaged; `caf repair` mends it. May be run on a ledger that
    is not empty, and again at any time: what the ledger knows stays as it is. A chunk whose copies
    differ in what is read of it is not restored, unless --whole reads them whole, which tells the
    wrong ones.

    The end says what no chunk tells. Objects of a file that could not be restored would be archived
    and paid for again: nothing of its source is planned until a rebuild leaves no file out, or `caf
    run NAME --new-archive` orders that. Before the first run, wait as many blocks as
    jackal.timeout_blocks: a transaction that the lost ledger sent may still be included.

    \b
    Examples:
      caf rebuild --dry-run
      caf rebuild demo --owner jkl1…

    Exit status: 0 all that is listed is in the ledger; 1 something is not, and it is said why; 2
    ADDRESS is not an address; 3 a setting or the wallet is wrong, or there is no such source; 6 the
    database, 7 the store or 8 the staging folder failed; 10 another run plans or rebuilds.
    """
    settings = load_settings()
    if source is not None:
        settings.source(source)
    owner = _require_owner(settings, owner)
    kinds: Counter[FileKind] = Counter()
    with opened_ledger(settings) as ledger:
        for name in [source] if source else sorted(settings.sources):
            kinds += _rebuild(
                settings, ledger, name, owner=owner, whole=whole, dry_run=dry_run, json=json
            )
    left_out = sum(count for kind, count in kinds.items() if kind not in NOTHING_MISSING)
    if not json and (
        not dry_run or left_out or kinds[FileKind.CHUNK]
    ):  # a dry run that would restore nothing has no more to say
        _print_not_known(settings)
    if left_out:
        raise CafError(
            f"{counted(left_out, 'listed file')} could not be restored; the reasons are above",
            hint="run 'caf rebuild' again if a provider did not answer, 'caf rebuild --whole' if "
            "copies differ; until nothing is"
            " left out, only 'caf run NAME --new-archive' plans such a source, and archives their "
            "objects again",
        )


def _require_owner(settings: Settings, owner: str | None) -> str | None:
    if owner is None:
        return None
    if settings.store.kind != "jackal":
        raise UsageError(
            "--owner is for chunks on Jackal.",
            hint=f"store.kind is '{settings.store.kind}': leave it out.",
        )
    return require_address(owner)


def _rebuild(
    settings: Settings,
    ledger: Ledger,
    name: str,
    *,
    owner: str | None,
    whole: bool,
    dry_run: bool,
    json: bool,
) -> Counter[FileKind]:
    """Rebuild one source; return its files by kind."""
    objects = UnavailableSource("a ledger is rebuilt without its source")
    kinds: Counter[FileKind] = Counter()
    left_out = 0
    with opened_run_context(settings, ledger, name, objects) as context:
        for outcome in _outcomes(context, owner, whole=whole, dry_run=dry_run):
            kinds[outcome.finding.kind] += 1
            left_out += not outcome.complete
            if json:
                print_json(_described(name, outcome))
            else:
                _print(outcome, dry_run)
    if json:
        print_json(
            {
                "source": name,
                "files": dict(sorted(kinds.items())),
                "left_out": left_out,
                "not_known": dict(steps.NOT_KNOWN),
            }
        )
    else:
        chunk = steps.FileKind.CHUNK
        said = ", ".join(
            counted(count, "chunk") if kind is chunk else f"{count:,} {kind.replace('_', ' ')}"
            for kind, count in sorted(kinds.items())
        )
        typer.echo(f"{name}: {said or 'nothing is listed'}")
    if set(kinds) == {steps.FileKind.FOREIGN}:
        note(
            f"{name}: nothing that is listed has this owner; if another wallet posted the chunks, "
            "give its address as --owner"
        )
    return kinds


def _outcomes(
    context: RunContext, owner: str | None, *, whole: bool, dry_run: bool
) -> Iterator[RebuildOutcome]:
    try:
        yield from steps.rebuild(context, owner=owner, whole=whole, dry_run=dry_run)
    except MnemonicRefused as error:
        raise MnemonicRefused(
            str(error), hint=f"{error.hint}; or give --owner and the wallet's address, jkl1…"
        ) from None


def _described(source: str, outcome: RebuildOutcome) -> dict[str, Any]:
    finding = outcome.finding
    posting, chunk = finding.file.posting, finding.chunk
    return {
        "source": source,
        "kind": str(finding.kind),
        "chunk": finding.name or None,
        "restored": outcome.rows is not None,
        "rows": outcome.rows,
        "objects": chunk.member_count if chunk else None,
        "skipped": chunk.skipped_count if chunk else None,
        "damaged": outcome.fault or None,
        "copies": [copy.provider for copy in chunk.copies] if chunk else None,
        "read_from": list(chunk.read_from) if chunk else None,
        "unanswered": dict(chunk.silent) if chunk else None,
        "wrong": dict(chunk.wrong) if chunk else None,
        "why": finding.why or None,
        "merkle_root": posting.merkle_root.hex(),
        "owner": posting.owner,
        "start": posting.start,
    }


def _print(outcome: RebuildOutcome, dry_run: bool) -> None:
    finding = outcome.finding
    chunk, posting = finding.chunk, finding.file.posting
    if chunk is None:
        if finding.why:
            which = (
                f"{posting.merkle_root.hex()[:16]}… of block "
                f"{posting.start}{f' ({finding.name})' if finding.name else ''}"
            )
            typer.echo(printable(f"{which}: {str(finding.kind).replace('_', ' ')}: {finding.why}"))
        return
    done = "to be restored" if dry_run else "restored"
    rows = (
        ""
        if outcome.rows in (None, chunk.member_count)
        else f", {outcome.rows:,} of them not located before"
    )
    typer.echo(
        f"{chunk.name}: {done}, {counted(chunk.member_count, 'object')}{rows}, "
        f"{chunk.skipped_count:,} skipped,"
        f" read from {len(chunk.read_from)} of "
        f"{counted(len(chunk.copies), 'listed copy', 'listed copies')}"
    )
    if outcome.fault:
        typer.echo(printable(f"{chunk.name}: damaged: {outcome.fault}"))


def _print_not_known(settings: Settings) -> None:
    typer.echo("Not restored, since no chunk contains it:")
    for what, sentence in NOT_KNOWN.items():
        typer.echo(f"  {what}: {sentence}")
    if settings.store.kind == "jackal":
        note(
            f"wait {settings.jackal.timeout_blocks} blocks before the first run: what was signed "
            "before may still be on its way"
        )
