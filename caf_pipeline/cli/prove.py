"""`caf prove` and `caf repair`."""

from typing import Annotated

import typer

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.cli.opening import known_sources, opened_ledger, opened_run_context
from caf_pipeline.cli.terminal import (
    JsonOption,
    SourceArgument,
    counted,
    note,
    print_json,
    printable,
    show_size,
)
from caf_pipeline.errors import (
    CafError,
    NoChainAnswer,
    PrivateAddress,
    StoreUnreachable,
    UsageError,
)
from caf_pipeline.inventory.chunk_id import ChunkId
from caf_pipeline.maintenance.chain_listing import check_chain_listing
from caf_pipeline.maintenance.repair import RepairReport, concerns_one_chunk, repair_chunk
from caf_pipeline.maintenance.scrub import ProofReport, prove_oldest
from caf_pipeline.settings import load_settings


def prove(
    source: SourceArgument,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            metavar="N",
            min=1,
            help="Number of chunks to check; jackal.prove_per_run by default.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    r"""Check the proofs and some bytes of stored chunks.

    Checks the store's proofs, and reads pieces back from each copy. Chunks that a rebuild restored
    come first: all their bytes are read once and compared with the Merkle root. Then come chunks
    that the chain's lists show as suspicious, then those checked longest ago. The job
    caf_look does the same every hour if the settings name a wallet, and reads at most 32 GiB of
    restored chunks.

    Checks up to four chunks side by side. A copy that lost a range takes two minutes. Lost or wrong
    bytes are recorded at once, so that `caf repair` knows them even if you interrupt this command.

    \b
    damaged:     too few copies or wrong bytes; `caf repair` fixes it.
    unanswered:  some copies do not answer, the others are right; checked first next time.
    unread:      a rebuild restored it, and it was not read whole since.
    unverified:  the copies are right, but the chain shows too few verified proofs.
                 Check again in the next proof window. Chunks of up to 20,480 bytes always are:
                 the chain proves none, and each copy is read whole instead.

    \b
    Example:
      caf prove demo --limit 5 --json | jq 'select(.verdict == "damaged")'

    \b
    Exit status: 3, 6
      0  Checked chunks are proven, or small and right; none is damaged, unanswered or unread.
      1  Some chunks are damaged, unread, or unverified and larger.
      7  The store failed, or the only faults are unanswered chunks.
    """
    settings = load_settings()
    settings.source(source)
    verdicts = ("damaged", "unanswered", "unread", "unverified", "small", "proven")
    names_by_verdict: dict[str, list[str]] = {verdict: [] for verdict in verdicts}
    silent: StoreUnreachable | None = None
    with opened_ledger(settings) as ledger, opened_run_context(settings, ledger, source) as context:
        if (lists := check_chain_listing(context)) is not None:
            note(lists.described())
        if unread := ledger.chunks.unread(source):
            size_bytes = sum(chunk.stored_size_bytes for chunk in unread)
            note(
                f"a rebuild restored {counted(len(unread), 'chunk')} that were not read whole "
                f"since; reading them ({show_size(size_bytes)}) first"
            )
        try:
            for report in prove_oldest(context, limit or settings.jackal.prove_per_run):
                _print_proof(report, json)
                is_small = report.is_right and not report.proven
                verdict = "small" if is_small else report.verdict
                names_by_verdict[verdict].append(report.chunk.name)
        except NoChainAnswer:
            raise
        except StoreUnreachable as error:
            silent = error  # the reports name the chunks whose providers did not answer
        checked = {name for names in names_by_verdict.values() for name in names}
        earlier = {
            "damaged": ledger.chunks.list(source, [ChunkState.DAMAGED]),
            "unanswered": ledger.chunks.unanswered(source),
            "unread": ledger.chunks.unread(source),
        }
        for verdict, chunks in earlier.items():
            names_by_verdict[verdict] += [
                chunk.name for chunk in chunks if chunk.name not in checked
            ]
    _raise_unless_proven(source, len(checked), names_by_verdict, silent)
    if json:
        return
    if not checked:
        typer.echo(f"no chunk of '{source}' was checked: none is located, or other runs hold them")
        return
    results = []
    if proven := len(names_by_verdict["proven"]):
        results.append("all proven" if proven == len(checked) else f"{proven:,} proven")
    if small := len(names_by_verdict["small"]):
        results.append(f"{small:,} too small for proofs, and right at each copy")
    typer.echo(f"{counted(len(checked), 'chunk')} of '{source}' looked at: {'; '.join(results)}")


def _raise_unless_proven(
    source: str,
    checked: int,
    names_by_verdict: dict[str, list[str]],
    silent: StoreUnreachable | None,
) -> None:
    hints = {
        "damaged": f"caf repair {source}",
        "unanswered": "look again when the providers answer",
        "unread": "'caf prove' reads unread chunks first",
        "unverified": "look at unverified chunks again in the next proof window",
    }
    counts = []
    for verdict in (verdicts := [verdict for verdict in hints if names_by_verdict[verdict]]):
        names = names_by_verdict[verdict]
        more = ", …" if len(names) > 5 else ""
        counts.append(f"{len(names)} {verdict}: {', '.join(names[:5])}{more}")
    if not verdicts:
        return
    message = f"{counted(checked, 'chunk')} of '{source}' looked at; {'; '.join(counts)}"
    if isinstance(silent, PrivateAddress):
        hints["unanswered"] = PrivateAddress.remedy
    error = (
        (type(silent) if silent else StoreUnreachable) if verdicts == ["unanswered"] else CafError
    )
    raise error(message, hint="; ".join(hints[verdict] for verdict in verdicts))


def _print_proof(report: ProofReport, json: bool) -> None:
    explanation = report.reason
    if json:
        print_json(
            chunk=report.chunk.name,
            verdict=report.verdict,
            proven=report.proven,
            explanation=explanation or None,
            state=report.chunk.state,
            copies=[
                {
                    "provider": check.copy.provider,
                    "verified": check.copy.verified,
                    "window": check.window,
                    "fault": check.fault or None,
                    "unanswered": check.unanswered or None,
                }
                for check in report.checks
            ],
        )
    elif not report.proven:
        typer.echo(f"{report.chunk.name} {report.verdict}: {printable(explanation)}")


def repair(
    what: Annotated[
        str,
        typer.Argument(metavar="CHUNK|SOURCE", help="A chunk, or all damaged chunks of a source."),
    ],
    json: JsonOption = False,
) -> None:
    r"""Store damaged chunks again.

    Takes the bytes from staging or another provider, or packs the chunk again from S3. A chunk that
    the chain no longer lists is posted again, which takes space once more. A damaged chunk is
    located again only if the chain shows verified proofs of its copies.

    \b
    Example:
      caf repair demo-1a2b3c4d-00001

    \b
    Exit status: 3, 5, 6, 7, 10, 11
      0  The chunks are repaired, or none is damaged.
      2  The chunk's state does not allow a repair.
      9  All available bytes differ from the archived ones.
    """
    settings = load_settings()
    with opened_ledger(settings) as ledger:
        sources = known_sources(settings, ledger.lookup)
        if what in sources:
            source = what
            chunks = [chunk.name for chunk in ledger.chunks.list(what, [ChunkState.DAMAGED])]
        elif ChunkId.parse(what) is None:
            raise settings.unknown_source(what, sources)
        else:
            chunk = ledger.chunks.get(what)
            if chunk.state not in (ChunkState.DAMAGED, ChunkState.LOCATED):
                raise UsageError(
                    f"chunk {what} is '{chunk.state}', and cannot be repaired.",
                    hint="`caf status` shows the states of chunks",
                )
            source, chunks = chunk.source, [what]
        if not chunks:
            note(f"no chunk of '{what}' is damaged")
            return
        failures: list[CafError] = []
        with opened_run_context(settings, ledger, source) as context:
            for name in chunks:
                try:
                    report = repair_chunk(context, name)
                except CafError as error:
                    if not concerns_one_chunk(error):
                        raise  # every other chunk would meet it, too
                    failures.append(error)
                    if len(chunks) > 1:
                        note(f"{name}: {error}")
                    continue
                _print_repair(report, json)
        if failures:
            raise failures[0]


def _print_repair(report: RepairReport, json: bool) -> None:
    name = report.chunk.name
    if json:
        print_json(
            chunk=name,
            state=report.chunk.state,
            origin=report.origin,
            posted_again=report.posted_again,
            providers=[copy.provider for copy in report.copies],
        )
    elif report.origin == "none needed":
        typer.echo(f"{name} needs no repair")
    else:
        posted = "; it was posted again, which took space once more" if report.posted_again else ""
        providers = counted(len(report.copies), "provider")
        typer.echo(f"{name} is whole again, from {report.origin}, at {providers}{posted}")
