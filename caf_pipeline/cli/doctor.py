"""The command doctor: says what crashes left, and mends it."""

from collections import Counter
from typing import Annotated, Final

import typer

from caf_pipeline.caf.merkle import IMPLEMENTATION
from caf_pipeline.cli.dagster_commands import dagster_command
from caf_pipeline.cli.opened_ledger import opened_ledger
from caf_pipeline.cli.opening import known_sources, require_source
from caf_pipeline.cli.run_opening import opened_store
from caf_pipeline.cli.terminal import JsonOption, counted, note, print_json, printable
from caf_pipeline.errors import CafError, HeldByOther, LedgerUnreachable
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.processes import is_alive, this_process
from caf_pipeline.maintenance.doctor.examine import Settler, examine
from caf_pipeline.maintenance.doctor.findings import Actor, Finding, MendResult, not_checked
from caf_pipeline.run_context import Lazy, RunContext
from caf_pipeline.run_wiring import jackal_of
from caf_pipeline.settings import Settings, load_settings
from caf_pipeline.source.protocol import UnaskedObjects
from caf_pipeline.store.protocol import ChunkStore

RUN: Final = "caf doctor"
"""The holder of the doctor's leases, which another run shows in 'held by run …'."""

_OWN_STATUS: Final = (3, 6, 7, 8)
"""Exit statuses of errors that the command ends with; any other error is a thing that could not be
mended, which is 1.
"""


def doctor(
    source: Annotated[
        str | None, typer.Argument(metavar="[SOURCE]", help="One source; all by default.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what is found and would be done.")
    ] = False,
    json: JsonOption = False,
) -> None:
    r"""Find what crashes left, and mend it.

    Leases of dead runs, files and reservations in staging that no chunk needs, transactions that
    were signed and not settled, chunks on Jackal that the ledger does not know, rows without a
    chunk, located chunks that the chain no longer lists, what killed inventories and plans left,
    chunks that no run goes on with, partitions in Dagster that no plan made. Run it at any moment,
    even beside runs: it changes nothing that a live run holds. It pays nothing again, deletes
    nothing on Jackal, and does not ask S3. It leaves out files that other wallets posted under this
    archive's note: `caf rebuild --dry-run` lists them.

    A line is a finding: what it is about, its name, what was found, what was done. Its "turn" in
    JSON is "mended"; "doctor" where it was not mended, or only looked at; "run" for the next `caf
    run`; "operator"; or "nobody".

    \b
    Examples:
      caf doctor --dry-run
      caf doctor demo
      caf doctor --json | jq 'select(.turn == "operator")'

    Exit status: 0 nothing was found, or all of it is mended or left to the next run, also with
    --dry-run; 1 something needs an operator, could not be mended or, with --dry-run, would be
    mended; 3 a setting or the wallet is wrong, or there is no such source; 6 the database or 7 the
    store failed: what needs it was not looked at; 8 a folder cannot be read or changed; 130
    interrupted by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP or a closed terminal.
    """
    settings = load_settings()
    note(f"Merkle roots are taken in {IMPLEMENTATION} code")
    with opened_ledger(settings) as ledger:
        if source is not None:
            require_source(settings, ledger.lookup, source)
        examination = _Examination(dry_run=dry_run, json=json)
        with opened_store(settings, ledger) as store:
            for name in [source] if source else known_sources(settings, ledger.lookup):
                examination.examine_source(settings, ledger, store, name)
                examination.examine_partitions(settings, ledger, name)
    examination.close()


class _Examination:
    """Prints findings, mends what can be mended, and counts them."""

    def __init__(self, *, dry_run: bool, json: bool) -> None:
        self._dry_run = dry_run
        self._json = json
        self._told: set[tuple[str, str]] = set()  # what sources share is found with each of them
        self._counts: Counter[Actor] = Counter()
        self._errors: list[CafError] = []

    def examine_source(
        self, settings: Settings, ledger: Ledger, store: ChunkStore, source: str
    ) -> None:
        """Look at one source, and mend what can be mended as it is found."""
        context = _run_context(settings, ledger, store, source)
        settler = _settler(context)
        for finding in examine(
            context,
            alive=lambda holder: is_alive(holder.boot_id, holder.pid, holder.process_started),
            settler=settler,
        ):
            if (finding.kind, finding.name) not in self._told:
                self._told.add((finding.kind, finding.name))
                self._handle(finding)

    def examine_partitions(self, settings: Settings, ledger: Ledger, source: str) -> None:
        """Look at a source's partitions in Dagster."""
        try:
            stray_partitions = dagster_command("stray_partitions")
        except CafError as error:
            self._handle(not_checked(f"partitions of {source}", error))
            return
        for finding in stray_partitions(source, settings=settings, ledger=ledger):
            self._handle(finding)

    def close(self) -> None:
        """Say how many things were found, and end as they demand.

        Raises: CafError: what could not be looked at or mended, or that something waits for an
            operator.
        """
        counts = self._counts
        if not self._json:
            typer.echo(_sentence(counts))
        if self._errors:
            first = self._errors[0]
            raise first if first.exit_code in _OWN_STATUS else CafError(str(first), hint=first.hint)
        operator = counts[Actor.OPERATOR]
        waiting = counts[Actor.DOCTOR] if self._dry_run else 0
        if operator or waiting:
            hint = "the lines above say what to do" if operator else "run it without --dry-run"
            raise CafError(_needs(operator, waiting), hint=hint)

    def _handle(self, finding: Finding) -> None:
        outcome: MendResult | None = None
        error = finding.error
        if finding.mend is not None and not self._dry_run:
            note(f"{finding.kind} {printable(finding.name)}: {printable(finding.problem)} …")
            try:
                outcome = finding.mend()
            except LedgerUnreachable:
                raise
            except HeldByOther as held:
                outcome = MendResult(f"left: {held}", Actor.NOBODY)
            except CafError as failed:
                error = failed
        self._counts[outcome.actor if outcome else finding.actor] += 1
        if error is not None:
            self._errors.append(error)
        self._print(finding, outcome, error)

    def _print(self, finding: Finding, outcome: MendResult | None, error: CafError | None) -> None:
        actor = outcome.actor if outcome else finding.actor
        if self._json:
            print_json(
                {
                    "kind": str(finding.kind),
                    "name": finding.name,
                    "found": finding.problem,
                    "remedy": finding.remedy or None,
                    "done": outcome.done if outcome else None,
                    "error": str(error) if error else None,
                    "turn": str(actor),
                }
            )
            return
        if outcome:
            then = outcome.done
        elif finding.mend is None:
            then = finding.remedy
        else:
            then = f"not mended: {error}" if error else f"would be {finding.remedy}"
        typer.echo(
            printable(f"{finding.kind}  {finding.name}: {finding.problem}")
            + (f"; {printable(then)}" if then else "")
        )


def _sentence(counts: Counter[Actor]) -> str:
    """Count what was found, by who acts next."""
    words = {
        Actor.MENDED: "mended",
        Actor.DOCTOR: "not mended",
        Actor.RUN: "for the next run",
        Actor.OPERATOR: "for an operator",
        Actor.NOBODY: "left as they are",
    }
    total = sum(counts.values())
    if not total:
        return "nothing was found"
    parts = ", ".join(f"{counts[actor]} {word}" for actor, word in words.items() if counts[actor])
    return f"{counted(total, 'thing')} found: {parts}"


def _needs(operator: int, waiting: int) -> str:
    parts = []
    if operator:
        parts.append(
            f"{counted(operator, 'thing')} {'needs' if operator == 1 else 'need'} an operator"
        )
    if waiting:
        parts.append(f"{counted(waiting, 'thing')} would be mended")
    return ", ".join(parts)


# --- what is looked at
# ------------------------------------------------------------------------------------------


def _run_context(settings: Settings, ledger: Ledger, store: ChunkStore, source: str) -> RunContext:
    """Return a source's run context without its S3 side.

    Nothing is registered: looking changes nothing.
    """
    objects = UnaskedObjects("the doctor does not ask S3")
    return RunContext(
        source, settings, this_process(RUN), Lazy.of(objects), Lazy.of(store), Lazy.of(ledger)
    )


def _settler(context: RunContext) -> Settler | None:
    if context.settings.store.kind != "jackal":
        return None
    poster, log = jackal_of(context).poster, context.ledger.transactions(context.holder)
    return Settler(lambda: poster.account, lambda: poster.settle(log))
