"""`caf rebuild`."""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Final

import typer

from caf_pipeline.cli.opening import opened_ledger, opened_run_context
from caf_pipeline.cli.terminal import (
    DryRunOption,
    JsonOption,
    SourcesArgument,
    YesOption,
    confirm,
    counted,
    note,
    print_json,
    printable,
    show_size,
    show_time,
)
from caf_pipeline.errors import CafError, MnemonicRefused, UsageError
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.maintenance import rebuild as steps
from caf_pipeline.maintenance.rebuild import NOT_KNOWN, NOTHING_MISSING, FileKind, RebuildOutcome
from caf_pipeline.records import PostedFile
from caf_pipeline.settings import Settings, load_settings
from caf_pipeline.source.protocol import UnavailableSource
from caf_pipeline.store.jackal.wallet import require_address

_POSTS_SHOWN: Final = 50


def rebuild(  # noqa: PLR0917 - the command line's options
    source: SourcesArgument = None,
    owner: Annotated[
        str | None,
        typer.Option(
            "--owner",
            metavar="ADDRESS",
            help="Address that posted the chunks: jkl1…",
        ),
    ] = None,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole",
            help="If copies differ, read all bytes and trust the posted Merkle root.",
        ),
    ] = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    r"""Restore a lost ledger, or lost rows, from the chunks.

    Needs the settings of the sources and the wallet, or --owner with its address, but not S3.
    Encrypted chunks need an identity; without one, nothing is restored. A folder has no owner: a
    rebuild from it trusts whoever can write there.

    A new ledger cannot know which posts are its own: whoever has the wallet's words can make posts.
    So the posts are first listed, with block, time and size, and the command asks. Later posts are
    left out. In an archive to which this ledger has posted, only its own posts are restored; `caf
    doctor` lists the others.

    Opens one chunk of each archive that the ledger does not know, to learn its source. Reports each
    file: restored, known, or why it is left out. You can repeat the command; it never changes what
    the ledger already has. A chunk that lacks locations in the ledger gets them back from its
    manifest. Rows that differ from the manifest are reported, and stay.

    A chunk with too few copies is restored as damaged; `caf repair` fixes it. A chunk whose copies
    differ is restored only with --whole.

    Objects of files that are left out would be archived and paid again. So nothing of the source is
    planned until a rebuild is complete, or you run `caf run NAME --new-archive`. Before the first
    run, wait jackal.timeout_blocks blocks: a transaction of the lost ledger may still be included.

    \b
    Example:
      caf rebuild demo --owner jkl1…

    \b
    Exit status: 6, 7, 8, 10
      0  All listed files are in the ledger.
      1  Some files are left out, or rows of the ledger were altered.
      2  ADDRESS is not an address, or the question has no terminal.
      3  Wrong settings, wallet or source, or no identity.
    """
    settings = load_settings()
    if source is not None:
        settings.source(source)
    if owner is not None:
        if settings.store.kind != "jackal":
            raise UsageError(
                "--owner is for chunks on Jackal.",
                hint=f"store.kind is '{settings.store.kind}': leave it out.",
            )
        owner = require_address(owner)
    kinds: Counter[FileKind] = Counter()
    sources: dict[str, str] = {}
    with opened_ledger(settings) as ledger:
        for name in [source] if source else sorted(settings.sources):
            kinds += _rebuild(
                settings,
                ledger,
                name,
                owner=owner,
                whole=whole,
                dry_run=dry_run,
                yes=yes,
                json=json,
                sources=sources,
            )
    left_out = sum(count for kind, count in kinds.items() if kind not in NOTHING_MISSING)
    # A dry run that would restore nothing has nothing more to report.
    if not json and (not dry_run or left_out or kinds[FileKind.CHUNK]):
        typer.echo("Not restored, because no chunk contains it:")
        for subject, explanation in NOT_KNOWN.items():
            typer.echo(f"  {subject}: {explanation}")
        if settings.store.kind == "jackal":
            note(
                f"wait {settings.jackal.timeout_blocks} blocks before the first run: an earlier "
                "transaction may still be included"
            )
    if left_out:
        raise CafError(
            f"{counted(left_out, 'listed file')} could not be restored; the reasons are above",
            hint="'caf doctor' lists unknown posts; run 'caf rebuild' again if a provider did not "
            "answer, or 'caf rebuild --whole' "
            "if copies differ; until then only 'caf run NAME --new-archive' plans such a source, "
            "and archives these objects again",
        )
    if kinds[FileKind.ALTERED]:
        raise CafError(
            f"rows of {counted(kinds[FileKind.ALTERED], 'chunk')} were altered in the ledger",
            hint="restore a backup; or delete these rows from file_locations and run 'caf rebuild' "
            "again",
        )


def _rebuild(
    settings: Settings,
    ledger: Ledger,
    name: str,
    *,
    owner: str | None,
    whole: bool,
    dry_run: bool,
    yes: bool,
    json: bool,
    sources: dict[str, str],
) -> Counter[FileKind]:
    objects = UnavailableSource("a ledger is rebuilt without its source")
    kinds: Counter[FileKind] = Counter()
    left_out = 0
    with opened_run_context(settings, ledger, name, objects, register=not dry_run) as context:

        def ask(posts: Sequence[PostedFile]) -> None:
            times = context.store.posted_at([post.posting for post in posts])
            note(
                f"{name}: the store lists {counted(len(posts), 'post')} that may be of this source "
                "and that this ledger does not know:"
            )
            for number, (post, time) in enumerate(zip(posts, times, strict=True)):
                if json or number < _POSTS_SHOWN or number == len(posts) - 1:
                    _print_post(name, post, time, json)
                elif number == _POSTS_SHOWN:
                    note("  …, of which --json lists all")
            if not dry_run:
                question = f"Did you make all {counted(len(posts), 'post')}, and restore them?"
                confirm(question, yes=yes, otherwise="no post was restored")

        try:
            for outcome in steps.rebuild(
                context, owner=owner, whole=whole, dry_run=dry_run, sources=sources, ask=ask
            ):
                kinds[outcome.finding.kind] += 1
                left_out += not outcome.complete
                if json:
                    print_json(**_as_json(name, outcome))
                else:
                    _print(outcome, dry_run)
        except MnemonicRefused as error:
            hint = f"{error.hint}; or give --owner and the wallet's address, jkl1…"
            raise MnemonicRefused(str(error), hint=hint) from None
    if json:
        print_json(
            source=name,
            files=dict(sorted(kinds.items())),
            left_out=left_out,
            not_known=NOT_KNOWN,
        )
    else:
        counts = ", ".join(
            counted(count, "chunk")
            if kind is FileKind.CHUNK
            else f"{count:,} {kind.replace('_', ' ')}"
            for kind, count in sorted(kinds.items())
        )
        typer.echo(f"{name}: {counts or 'nothing is listed'}")
    if unread := len(ledger.lookup.unread_chunks(name)):
        note(
            f"{name}: {counted(unread, 'restored chunk')} count as unread until 'caf prove {name}' "
            "has read all their bytes and compared them with the Merkle root"
        )
    if settings.store.kind == "jackal" and not kinds.keys() - {FileKind.FOREIGN}:
        note(
            f"{name}: no listed file has this owner; if another wallet posted the chunks, give its "
            "address as --owner"
        )
    return kinds


def _print_post(source: str, post: PostedFile, time: datetime, json: bool) -> None:
    posting = post.posting
    if json:
        print_json(
            source=source,
            kind="listed",
            merkle_root=posting.merkle_root,
            owner=posting.owner,
            start=posting.start,
            posted_at=time.isoformat(timespec="seconds"),
            size_bytes=posting.stored_size_bytes,
        )
        return
    note(
        f"  block {posting.start}, about {show_time(time)}, "
        f"{show_size(posting.stored_size_bytes)}, root {posting.merkle_root.hex()[:16]}…"
    )


def _as_json(source: str, outcome: RebuildOutcome) -> dict[str, Any]:
    finding = outcome.finding
    posting, chunk = finding.file.posting, finding.chunk
    return {
        "source": source,
        "kind": finding.kind,
        "chunk": finding.name or None,
        "restored": outcome.rows is not None,
        "rows": outcome.rows,
        "objects": chunk.member_count if chunk else None,
        "skipped": chunk.skipped_count if chunk else None,
        "damaged": outcome.fault or None,
        "copies": [copy.provider for copy in chunk.copies] if chunk else None,
        "read_from": chunk.read_from if chunk else None,
        "unanswered": chunk.silent if chunk else None,
        "wrong": chunk.wrong if chunk else None,
        "why": finding.why or None,
        "merkle_root": posting.merkle_root,
        "owner": posting.owner,
        "start": posting.start,
    }


def _print(outcome: RebuildOutcome, dry_run: bool) -> None:
    finding = outcome.finding
    chunk, posting = finding.chunk, finding.file.posting
    if chunk is None:
        if finding.why:
            name = f" ({finding.name})" if finding.name else ""
            file = f"{posting.merkle_root.hex()[:16]}… of block {posting.start}{name}"
            kind = str(finding.kind).replace("_", " ")
            typer.echo(printable(f"{file}: {kind}: {finding.why}"))
        return
    done = "to be restored" if dry_run else "restored"
    if finding.kind in (FileKind.INCOMPLETE, FileKind.ALTERED):
        rows = "missing locations" if outcome.rows is None else counted(outcome.rows, "location")
        typer.echo(f"{chunk.name}: {rows} {done}")
        if finding.why:
            typer.echo(printable(f"{chunk.name}: altered: {finding.why}"))
        return
    new = outcome.rows not in (None, chunk.member_count)
    rows = f", {outcome.rows:,} of them not located before" if new else ""
    copies = counted(len(chunk.copies), "listed copy", "listed copies")
    typer.echo(
        f"{chunk.name}: {done}, {counted(chunk.member_count, 'object')}{rows}, "
        f"{chunk.skipped_count:,} skipped, read from {len(chunk.read_from)} of {copies}"
    )
    if outcome.fault:
        typer.echo(printable(f"{chunk.name}: damaged: {outcome.fault}"))
