"""Commands that look after what is stored: prove, repair."""

from typing import Annotated

import typer

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.cli.opened_ledger import opened_ledger
from caf_pipeline.cli.opening import known_sources
from caf_pipeline.cli.run_opening import opened_run_context
from caf_pipeline.cli.terminal import (
    JsonOption,
    SourceArgument,
    counted,
    note,
    print_json,
    printable,
)
from caf_pipeline.errors import CafError, NoChainAnswer, StoreUnreachable, UsageError
from caf_pipeline.inventory.chunk_id import ChunkId
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.maintenance.chain_listing import check_chain_listing
from caf_pipeline.maintenance.repair import RepairReport, concerns_one_chunk, repair_chunk
from caf_pipeline.maintenance.scrub import ProofReport, prove_oldest
from caf_pipeline.run_context import RunContext
from caf_pipeline.settings import load_settings


def prove(
    source: SourceArgument,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            metavar="N",
            min=1,
            help="Chunks to look at; jackal.prove_per_run by default.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    r"""Check the proofs and some bytes of stored chunks.

    That is the store's proofs, and pieces read back from each copy. Those that were looked at
    longest ago come first, but for chunks of which the chain's lists say something amiss: where no
    run did so within the hour, the lists are read first, by pages, for all sources. A chunk with
    too few copies or wrong bytes is marked as damaged; `caf repair` mends it. A chunk is unverified
    where its copies are right, and the chain shows no verified proof of enough of them: what it
    shows may be of a provider's joining alone. Look again in the next proof window; a file of up to
    20,480 bytes is always unverified. A chunk is unanswered if its copies that answer are right,
    and some do not answer: it is looked at first the next time. The job prove_SOURCE does the same
    every hour.

    \b
    Examples:
      caf prove demo
      caf prove demo --limit 5 --json | jq 'select(.verdict == "damaged")'

    Exit status: 0 all that were looked at are proven, and no chunk is known to be damaged or
    unanswered; 1 some are damaged or unverified; 3 a setting is wrong or there is no such source; 6
    the database failed; 7 the store failed, or some are unanswered and none is damaged or
    unverified.
    """
    settings = load_settings()
    settings.source(source)
    names_by_verdict: dict[str, list[str]] = {
        "damaged": [],
        "unanswered": [],
        "unverified": [],
        "proven": [],
    }
    with opened_ledger(settings) as ledger, opened_run_context(settings, ledger, source) as context:
        if (in_bulk := check_chain_listing(context)) is not None:
            note(in_bulk.described())
        try:
            for report in prove_oldest(context, limit or settings.jackal.prove_per_run):
                _print_proof(report, json)
                names_by_verdict[report.verdict].append(report.chunk.name)
        except NoChainAnswer:
            raise
        except StoreUnreachable:
            pass  # the reports name the chunks whose providers did not answer
        looked_at = sum(map(len, names_by_verdict.values()))
        _add_earlier(ledger, source, names_by_verdict)
    _raise_unless_proven(source, looked_at, names_by_verdict)
    if not json:
        typer.echo(
            f"{counted(looked_at, 'chunk')} of '{source}' looked at, all proven"
            if looked_at
            else f"no chunk of '{source}' was checked: none is located, or other runs hold those "
            "that are"
        )


def _add_earlier(ledger: Ledger, source: str, names_by_verdict: dict[str, list[str]]) -> None:
    """Add chunks that are damaged or unanswered since an earlier look."""
    looked_at = {name for names in names_by_verdict.values() for name in names}
    earlier = {
        "damaged": ledger.chunks.list(source, [ChunkState.DAMAGED]),
        "unanswered": ledger.chunks.unanswered(source),
    }
    for verdict, chunks in earlier.items():
        names_by_verdict[verdict] += [chunk.name for chunk in chunks if chunk.name not in looked_at]


def _raise_unless_proven(
    source: str, looked_at: int, names_by_verdict: dict[str, list[str]]
) -> None:
    """Raise the error that names the chunks that are damaged, unanswered or unverified."""
    kinds = [
        (verdict, names)
        for verdict, names in names_by_verdict.items()
        if verdict != "proven" and names
    ]
    if not kinds:
        return
    counts = "; ".join(f"{len(names)} {kind}: {_some(names)}" for kind, names in kinds)
    message = f"{counted(looked_at, 'chunk')} of '{source}' looked at; {counts}"
    if [kind for kind, _ in kinds] == ["unanswered"]:
        raise StoreUnreachable(message, hint="look again when the providers answer")
    hints = {
        "damaged": f"caf repair {source}",
        "unanswered": "look again when the providers answer",
        "unverified": "look at what is unverified again in the next proof window",
    }
    raise CafError(message, hint="; ".join(hints[kind] for kind, _ in kinds))


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")


def _print_proof(report: ProofReport, json: bool) -> None:
    if json:
        copies = [
            {
                "provider": each.copy.provider,
                "verified": each.copy.verified,
                "window": each.window,
                "fault": each.fault or None,
                "unanswered": each.unanswered or None,
            }
            for each in report.checks
        ]
        print_json(
            {
                "chunk": report.chunk.name,
                "verdict": report.verdict,
                "proven": report.proven,
                "explanation": report.explanation or report.unanswered or report.unverified or None,
                "state": str(report.chunk.state),
                "copies": copies,
            }
        )
    elif not report.proven:
        typer.echo(
            f"{report.chunk.name} {report.verdict}: "
            f"{printable(report.explanation or report.unanswered or report.unverified)}"
        )


def repair(
    what: Annotated[
        str,
        typer.Argument(
            metavar="CHUNK|SOURCE", help="A chunk, or a source: all its damaged chunks."
        ),
    ],
    json: JsonOption = False,
) -> None:
    r"""Store damaged chunks again.

    From staging, else from another provider, else packed again from S3. A chunk that the chain no
    longer lists is posted again, which takes space once more. A damaged chunk is located again only
    where the chain shows verified proofs of its copies.

    \b
    Examples:
      caf repair demo
      caf repair demo-1a2b3c4d-00001

    Exit status: 0 repaired, or there was nothing to repair; 2 the chunk is in no state that can be
    repaired; 3 a setting is wrong or there is no such source; 5 the source, 6 the database or 7 the
    store failed; 9 what could be found has other bytes; 10 a run works on it; 11 there is no such
    chunk.
    """
    settings = load_settings()
    with opened_ledger(settings) as ledger:
        known = known_sources(settings, ledger.lookup)
        if what in known:
            source, chunks = (
                what,
                [chunk.name for chunk in ledger.chunks.list(what, [ChunkState.DAMAGED])],
            )
        elif ChunkId.parse(what) is None:
            raise settings.unknown_source(what, known)
        else:
            chunk = ledger.chunks.get(what)
            if chunk.state not in (ChunkState.DAMAGED, ChunkState.LOCATED):
                raise UsageError(
                    f"chunk {what} is '{chunk.state}', and cannot be repaired.",
                    hint="`caf status` shows the others",
                )
            source, chunks = chunk.source, [what]
        if not chunks:
            note(f"no chunk of '{what}' is damaged")
            return
        with opened_run_context(settings, ledger, source) as context:
            _repair_all(context, chunks, json)


def _repair_all(context: RunContext, chunks: list[str], json: bool) -> None:
    """Repair one after the other; raise the first error at the end, or at once if every chunk would
    meet it.
    """
    failed: list[CafError] = []
    for name in chunks:
        try:
            _print_repair(repair_chunk(context, name), json)
        except CafError as error:
            if not concerns_one_chunk(error):
                raise
            failed.append(error)
            if len(chunks) > 1:
                note(f"{name}: {error}")
    if failed:
        raise failed[0]


def _print_repair(report: RepairReport, json: bool) -> None:
    chunk = report.chunk
    if json:
        providers = [copy.provider for copy in report.copies]
        print_json(
            {
                "chunk": chunk.name,
                "state": str(chunk.state),
                "origin": report.origin,
                "posted_again": report.posted_again,
                "providers": providers,
            }
        )
    elif report.origin == "none needed":
        typer.echo(f"{chunk.name} needs no repair")
    else:
        again = "; it was posted again, which took space once more" if report.posted_again else ""
        typer.echo(
            f"{chunk.name} is whole again, from {report.origin}, at "
            f"{counted(len(report.copies), 'provider')}{again}"
        )
