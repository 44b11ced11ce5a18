"""`caf remove`: removes a source without stored chunks from ledger, local folders and Dagster.

The ledger decides, so it comes first. The other steps can be repeated.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext

from dagster import DagsterInstance, RunsFilter

from caf_pipeline.automation.dead_runs import GOING_ON, process_lives
from caf_pipeline.dagster_host.source_runs import open_instance
from caf_pipeline.dagster_host.storage import may_have_state
from caf_pipeline.errors import HeldByOther, NotLocated
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.records import RemovableSource, plan_lease
from caf_pipeline.maintenance.remove_source import (
    Leftovers,
    find_leftovers,
    no_writers,
    remove_leftovers,
)
from caf_pipeline.naming import SOURCE_TAG, partitions_name
from caf_pipeline.setting_values import is_source_name
from caf_pipeline.settings import Settings
from caf_pipeline.source.protocol import UnavailableSource
from caf_pipeline.steps import chunk_steps
from caf_pipeline.system.processes import this_process
from caf_pipeline.system.quantities import counted, show_size
from caf_pipeline.wiring import open_ledger, open_run_context


def remove_command(
    source: str, *, settings: Settings, run: str, confirm: Callable[[Sequence[str]], None]
) -> int:
    """Remove a source, which need not be in the settings; return the exit status.

    `confirm` gets the removed things, and raises to decline. `run` holds the plan's lease.

    Raises:
        SettingsError, NotLocated: there never was such a source in settings or ledger.
        IllegalMove: something of the source is or may be stored.
        StoreUnreachable: a run wanted to post a chunk, and the store does not answer.
        HeldByOther: a run works on the source.
    """
    with closing(open_ledger(settings)) as ledger:
        if not is_source_name(source):
            raise settings.unknown_source(source, ledger.lookup.sources())
        removable = ledger.removal.removable(source) if source in ledger.lookup.sources() else None
        leftovers = find_leftovers(settings, ledger, source)
        with open_instance(settings) if may_have_state(settings) else nullcontext() as instance:
            partitions = _partitions(instance, source)
            if removable is None:
                _require_former_source(settings, ledger, source, leftovers, partitions)
            confirm([*_lines(source, removable, leftovers, len(partitions))])
            if instance is not None:
                _require_no_run(instance, source)
            with ledger.leases.hold(plan_lease(source), this_process(run)) as lease:
                if removable and removable.intended:
                    _withdraw(settings, ledger, source, removable.intended, run)
                # A run may have written files before the user confirmed.
                leftovers = find_leftovers(settings, ledger, source)
                with no_writers(leftovers):
                    if source in ledger.lookup.sources():
                        ledger.removal.remove(lease, source)
                    remove_leftovers(leftovers)
                if instance is not None:
                    # Read again, since a run may have added partitions.
                    for name in _partitions(instance, source):
                        instance.delete_dynamic_partition(partitions_name(source), name)
    kept = [file.path.name for file in leftovers.kept]
    if kept:
        sys.stdout.write(
            f"kept {counted(len(kept), 'staged file')} of chunks that this ledger never had: "
            f"{', '.join(kept)}\n"
        )
    sys.stdout.write(f"source '{source}' is removed\n")
    if source in settings.sources:
        sys.stdout.write(
            f"the settings still have it: 'caf run {source}' archives it as a new source\n"
        )
    sys.stdout.flush()
    return 0


def _require_no_run(instance: DagsterInstance, source: str) -> None:
    # A run holds no lease between two steps. The next step needs the removed files.
    for run in instance.get_runs(RunsFilter(tags={SOURCE_TAG: source}, statuses=GOING_ON)):
        if process_lives(run):
            raise HeldByOther(
                f"run {run.run_id} works on source '{source}'",
                holder=run.run_id,
                hint="wait for that run, or end it first",
            )


def _withdraw(
    settings: Settings, ledger: Ledger, source: str, chunks: Sequence[str], run: str
) -> None:
    objects = UnavailableSource("a removal does not read the bucket")
    with closing(
        open_run_context(settings, source, run=run, ledger=ledger, objects=objects, register=False)
    ) as context:
        chunk_steps.withdraw_all(context, chunks, reason="its source is removed")


def _partitions(instance: DagsterInstance | None, source: str) -> Sequence[str]:
    return instance.get_dynamic_partitions(partitions_name(source)) if instance else []


def _require_former_source(
    settings: Settings, ledger: Ledger, source: str, leftovers: Leftovers, partitions: Sequence[str]
) -> None:
    # Raises unless this ledger once had the source, and something of the source is left.
    if not leftovers.folders and not leftovers.staged and not leftovers.kept and not partitions:
        if source not in settings.sources:
            raise settings.unknown_source(source, ledger.lookup.sources())
        raise NotLocated(
            f"the ledger has nothing of source '{source}'", hint="there is nothing to remove"
        )
    if not ledger.leases.ever_held([plan_lease(source)]):
        raise NotLocated(
            f"the ledger never had source '{source}': the files may belong to a lost ledger",
            hint="'caf rebuild' restores a lost ledger; if none was lost, delete the files",
        )


def _lines(
    source: str, removable: RemovableSource | None, leftovers: Leftovers, partitions: int
) -> Iterator[str]:
    if removable is None:
        yield f"source      {source}; it is no longer in the ledger, and this is left"
    else:
        yield f"source      {source}, {removable.address}"
        yield (
            f"ledger      {counted(removable.plans, 'plan')}, {counted(removable.chunks, 'chunk')}"
        )
    yield f"snapshots   {leftovers.snapshots}"
    yield (
        f"staged      {show_size(leftovers.staged_bytes)} in "
        f"{counted(len(leftovers.staged), 'file')}"
    )
    yield f"partitions  {partitions}"
    for folder in leftovers.folders:
        yield f"folder      {folder}"
