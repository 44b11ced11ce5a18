"""`caf doctor`."""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from typing import Annotated, Final

import typer

from caf_pipeline.caf.merkle import IMPLEMENTATION
from caf_pipeline.cli.opening import known_sources, opened_ledger, require_source
from caf_pipeline.cli.terminal import (
    DryRunOption,
    JsonOption,
    SourcesArgument,
    YesOption,
    counted,
    exclusive,
    note,
    print_json,
    printable,
    progress,
    require_confirmation,
)
from caf_pipeline.errors import CafError, HeldByOther, LedgerUnreachable
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.maintenance.deletion.assessment import ProgressReporter
from caf_pipeline.maintenance.doctor.examine import Settler, examine
from caf_pipeline.maintenance.doctor.findings import (
    Actor,
    Finding,
    Kind,
    MendResult,
    UnknownPosts,
    mendable,
)
from caf_pipeline.run_context import Lazy, RunContext
from caf_pipeline.settings import Settings, load_settings
from caf_pipeline.source.protocol import UnavailableSource
from caf_pipeline.store.protocol import ChunkStore
from caf_pipeline.system.processes import is_alive, this_process
from caf_pipeline.waits import Announcer, Waits
from caf_pipeline.wiring import jackal_of, open_store, record_space

RUN: Final = "caf doctor"
"""The holder of the doctor's leases, as other runs show it."""

_OWN_STATUS: Final = (3, 6, 7, 8)
"""Errors with these statuses end the command; others count as 1."""

_OF_STORE: Final = (Kind.FILE, Kind.TRANSACTION)
"""If one of these needs an operator, the ledger and the store do not agree."""

_KEYS_SHOWN: Final = 20

_OUTCOMES: Final = {
    Actor.MENDED: "mended",
    Actor.DOCTOR: "not mended",
    Actor.RUN: "for the next run",
    Actor.OPERATOR: "for an operator",
    Actor.NOBODY: "left as they are",
}


def doctor(  # noqa: PLR0917 - the command line's options
    source: SourcesArgument = None,
    dry_run: DryRunOption = False,
    add_unknown_posts: Annotated[
        bool,
        typer.Option(
            "--add-unknown-posts", help="Add posts that are not shown to be this ledger's."
        ),
    ] = False,
    leave_unknown_posts: Annotated[
        bool,
        typer.Option(
            "--leave-unknown-posts", help="Set such posts aside, so that they stop nothing."
        ),
    ] = False,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    r"""Find what crashes left, and repair it.

    Finds leases of dead runs, unneeded files and reservations in staging, unsettled transactions,
    and half copies in a folder store. It also finds unknown chunks on Jackal, rows without a chunk,
    and located chunks that the chain no longer lists. It finds chunks that no run continues. In
    Dagster it finds stray partitions, and located chunks that are shown as failed. In your own
    Dagster project it also names settings of the instance that would help. After `caf backup
    --restore --unverified`, it decides whether the ledger fits the store.

    Run it at any time: it changes nothing that a live run holds, pays nothing, deletes nothing on
    Jackal, and does not ask S3. It ignores files of other wallets with this archive's note; `caf
    rebuild --dry-run` lists them.

    Adds posts of this ledger that a restored older backup does not know. Other posts under the
    source's archive may be forged with a stolen wallet. They are listed with block, time, size and
    the keys that they would change. --add-unknown-posts adds each after a question, also those that
    were set aside. `caf ls`, `caf get` and `caf restore` mark their objects. They change no content
    that this ledger packed.

    Prints a finding's kind, name, fault and repair. "turn" in JSON says who acts next: "mended"
    (done), "doctor" (not repaired, or a dry run), "run" (the next `caf run`), "operator" or
    "nobody".

    \b
    Example:
      caf doctor --json | jq 'select(.turn == "operator")'

    \b
    Exit status: 6
      0  Everything is right, repaired or left to the next run.
      1  Something needs an operator, was not repaired, or would be (--dry-run).
      2  Options exclude each other, or a question has no terminal.
      3  Wrong settings, wallet or source.
      7  The store failed; findings that need it are missing.
      8  A folder cannot be read or changed.
    """
    exclusive(add_unknown_posts=add_unknown_posts, leave_unknown_posts=leave_unknown_posts)
    unknown_posts = UnknownPosts.REPORT
    if leave_unknown_posts:
        unknown_posts = UnknownPosts.LEAVE
    elif add_unknown_posts:
        unknown_posts = UnknownPosts.ADD
        if not dry_run:
            require_confirmation(yes=yes)
    # Dagster takes seconds to load.
    from caf_pipeline.dagster_host.partition_findings import partition_findings  # noqa: PLC0415
    from caf_pipeline.dagster_host.team_instance import instance_findings  # noqa: PLC0415

    settings = load_settings()
    note(f"Merkle roots are computed by {IMPLEMENTATION} code")
    with opened_ledger(settings) as ledger:
        if source is not None:
            require_source(settings, ledger.lookup, source)
        examination = _Examination(dry_run=dry_run, json=json, unknown_posts=unknown_posts, yes=yes)
        waits = Waits(Announcer(note))
        with closing(open_store(settings, ledger, this_process(RUN), waits)) as store:
            for name in [source] if source else known_sources(settings, ledger.lookup):
                examination.examine_source(settings, ledger, store, name)
                examination.handle(partition_findings(name, settings=settings, ledger=ledger))
            examination.judge_backup(ledger, of_all_sources=source is None)
            record_space(settings, ledger, store)
            examination.handle(instance_findings(settings=settings, ledger=ledger))
    examination.close()


class _Examination:
    def __init__(
        self, *, dry_run: bool, json: bool, unknown_posts: UnknownPosts, yes: bool
    ) -> None:
        self._dry_run = dry_run
        self._json = json
        self._unknown_posts = unknown_posts
        self._yes = yes
        self._handled: set[tuple[str, str]] = set()  # sources share some findings
        self._counts: Counter[Actor] = Counter()
        self._errors: list[CafError] = []
        self._fits = True  # the ledger and the store agree

    def examine_source(
        self, settings: Settings, ledger: Ledger, store: ChunkStore, source: str
    ) -> None:
        """Asks no S3, and registers nothing in the ledger."""
        objects = UnavailableSource("the doctor does not ask S3")
        context = RunContext(
            source, settings, this_process(RUN), Lazy.of(objects), Lazy.of(store), Lazy.of(ledger)
        )
        settler = None
        if settings.store.kind == "jackal":
            poster, log = jackal_of(context).poster, ledger.transactions(context.holder)
            settler = Settler(lambda: poster.account, lambda: poster.settle(log))
        for finding in examine(
            context,
            alive=lambda holder: is_alive(holder.boot_id, holder.pid, holder.process_started),
            settler=settler,
            unknown_posts=self._unknown_posts,
            reporter=ProgressReporter(note=note, progress=progress),
        ):
            if (finding.kind, finding.name) not in self._handled:
                self._handled.add((finding.kind, finding.name))
                actor = self._handle(finding)
                self._fits = self._fits and not (
                    finding.kind in (Kind.UNSEEN, Kind.ROWS)
                    or (finding.kind is Kind.COPIES and finding.mend)  # not known before
                    or (finding.kind in _OF_STORE and actor in (Actor.OPERATOR, Actor.DOCTOR))
                )

    def handle(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self._handle(finding)

    def judge_backup(self, ledger: Ledger, *, of_all_sources: bool) -> None:
        """Let the pause after the restore of a backup without a hash end, if the ledger fits."""
        if not (problem := ledger.controls.unverified()):
            return

        def accept() -> MendResult:
            ledger.controls.accept()
            return MendResult("it fits the store: 'caf resume' ends the pause")

        if of_all_sources and self._fits:
            self._handle(mendable(Kind.BACKUP, "the ledger", problem, "accepted", accept))
            return
        remedy = (
            "run this again when the findings above about rows, files, transactions and what was "
            "not looked at are gone"
            if of_all_sources
            else "run 'caf doctor' for all sources"
        )
        self._handle(Finding(Kind.BACKUP, "the ledger", problem, remedy, Actor.OPERATOR))

    def close(self) -> None:
        """Print the number of findings. Raises CafError if any is not repaired."""
        if not self._json:
            total = sum(self._counts.values())
            counts = [
                f"{count} {word}"
                for actor, word in _OUTCOMES.items()
                if (count := self._counts[actor])
            ]
            typer.echo(
                f"{counted(total, 'thing')} found: {', '.join(counts)}"
                if total
                else "nothing was found"
            )
        if self._errors:
            first = self._errors[0]
            raise first if first.exit_code in _OWN_STATUS else CafError(str(first), hint=first.hint)
        operator = self._counts[Actor.OPERATOR]
        waiting = self._counts[Actor.DOCTOR] if self._dry_run else 0
        parts = []
        if operator:
            need = "needs" if operator == 1 else "need"
            parts.append(f"{counted(operator, 'thing')} {need} an operator")
        if waiting:
            parts.append(f"{counted(waiting, 'thing')} would be mended")
        if parts:
            hint = "the lines above say what to do" if operator else "run it without --dry-run"
            raise CafError(", ".join(parts), hint=hint)

    def _handle(self, finding: Finding) -> Actor:
        if self._json:
            for change in finding.changes():
                print_json(kind="key", name=finding.name, **asdict(change))
        outcome, error = None, finding.error
        if finding.mend is not None and not self._dry_run:
            outcome, error = self._mended(finding, finding.mend)
        actor = outcome.actor if outcome else finding.actor
        self._counts[actor] += 1
        if error is not None:
            self._errors.append(error)
        if self._json:
            print_json(
                kind=finding.kind,
                name=finding.name,
                found=finding.problem,
                remedy=finding.remedy or None,
                done=outcome.done if outcome else None,
                error=error,
                turn=actor,
                **finding.facts,
            )
            return actor
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
        if finding.mend is None or self._dry_run:
            _note_changes(finding)
        return actor

    def _mended(
        self, finding: Finding, mend: Callable[[], MendResult]
    ) -> tuple[MendResult | None, CafError | None]:
        note(f"{finding.kind} {printable(finding.name)}: {printable(finding.problem)} …")
        _note_changes(finding)
        if finding.question and not self._yes and not typer.confirm(finding.question, err=True):
            return MendResult("not added", Actor.OPERATOR), None
        try:
            return mend(), None
        except LedgerUnreachable:
            raise
        except HeldByOther as held:
            return MendResult(f"left: {held}", Actor.NOBODY), None
        except CafError as failed:
            return None, failed


def _note_changes(finding: Finding) -> None:
    changes = finding.changes()
    for change in islice(changes, _KEYS_SHOWN):
        note(f"  {change.change}: {printable(change.key)}")
    if more := sum(1 for _ in changes):
        note(f"  and {counted(more, 'key')} more, which --json lists")
