"""What a run that restores does: archived objects of a source, below a folder or into a bucket, as
`caf restore` does.
"""

import time
from collections.abc import Mapping
from typing import Final

from dagster import (
    AssetKey,
    AssetObservation,
    Config,
    IntMetadataValue,
    MetadataValue,
    OpExecutionContext,
)
from pydantic import Field

from caf_pipeline import run_wiring
from caf_pipeline.defs.naming import ASSETS, asset_key
from caf_pipeline.errors import HeldByOther, NotLocated, StagingError, UsageError, with_hint
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.processes import this_process
from caf_pipeline.retrieval.listing import count_not_archived, every, is_current, list_objects
from caf_pipeline.retrieval.reader import no_source
from caf_pipeline.retrieval.restore import (
    RestoredObject,
    RestoreOutcome,
    RestoreSums,
    restore_objects,
)
from caf_pipeline.retrieval.side_by_side import take_all
from caf_pipeline.system.quantities import counted, show_size
from caf_pipeline.waits import LINE_SECONDS, Announcer, Waits

MOST_TOLD: Final = 20
"""Errors of objects in the log of a run, each an event in Dagster's storage, and as many that are
different; all are counted.
"""

OBSERVED_LATER: Final = 0.25
"""Of its age, after which a run is observed again: some 30 times in a day, 40 in a week.

Each is a row of Dagster's storage.
"""


class Restore(Config):
    """What a run restores, and where to."""

    source: str = Field(description="The source's name.")
    destination: str = Field(
        description="The absolute path of a folder of the machine that the run is on, or "
        "s3://BUCKET/PREFIX."
    )
    prefix: str = Field(
        default="", description="What the keys begin with, as in S3; all by default."
    )
    force: bool = Field(default=False, description="Replace what is there and is not equal.")
    current: bool = Field(
        default=False, description="Only objects that S3 had at the last inventory."
    )
    profile: str = Field(default="", description="The AWS profile for the bucket.")
    endpoint_url: str = Field(default="", description="The bucket's server, where that is not AWS.")


def restore(context: OpExecutionContext, config: Restore, sums: RestoreSums) -> None:
    """Restore, and count into the sums.

    Raises:
        CafError: nothing more can be restored, or not all was.
    """
    ledger: Ledger = context.resources.ledger.get()
    waits = Waits(Announcer(context.log.info), context.resources.run.waiting)
    if unknown := no_source(ledger.lookup, config.source):
        raise unknown
    if (
        not config.destination.startswith((run_wiring.BUCKET_SCHEME, "/"))
        or "\0" in config.destination
    ):
        raise UsageError(
            f"destination {config.destination!r} is neither the absolute path of a folder nor "
            "s3://BUCKET/PREFIX",
            hint="give an absolute path: a run has a working folder of its own",
        )
    if (config.profile or config.endpoint_url) and not config.destination.startswith(
        run_wiring.BUCKET_SCHEME
    ):
        raise UsageError(
            "`profile` and `endpoint_url` are for a bucket",
            hint="give s3://BUCKET/PREFIX as `destination`",
        )
    store = context.resources.store.open(ledger, this_process(context.run_id), waits)
    progress = _Progress(context, config, sums)
    try:
        with run_wiring.open_restore(
            ledger.lookup,
            store,
            config.destination,
            force=config.force,
            profile=config.profile,
            endpoint_url=config.endpoint_url,
            waits=waits,
        ) as target:
            sums.not_yet_archived, sums.skipped = count_not_archived(
                ledger.lookup, config.source, config.prefix
            )
            wanted = is_current if config.current else every
            listed = list_objects(ledger.lookup, config.source, config.prefix, include=wanted)
            ended = take_all(restore_objects(listed, target), progress.take)
    except HeldByOther as held:
        raise StagingError(
            str(held), hint=held.hint
        ) from held  # of a chunk an outcome, of a restore a failure
    if not sums.listed:
        what = "is current" if config.current else "is archived"
        raise NotLocated(
            f"no key of source '{config.source}' {what} and begins with '{config.prefix}'"
        )
    if sums.beside:
        reasons = f"`caf status {config.source}` has the reasons"
        context.log.warning(f"{counted(sums.listed, 'object')} listed; {sums.beside}: {reasons}")
    failure = sums.failure(ended, "`force`")
    if ended and failure is not ended:
        context.log.error(str(ended))
    if failure and not failure.permanent:
        progress.observe()  # Dagster keeps no metadata of an attempt that is retried
    if failure:
        raise failure


class _Progress:
    """How far a run is: a line of its log every minute, and now and then an observation of what it
    reads, the locations.
    """

    def __init__(self, context: OpExecutionContext, config: Restore, sums: RestoreSums) -> None:
        self._context = context
        self._locations = AssetKey(asset_key(config.source, ASSETS[-1]))
        self._sums = sums
        self._began_at = self._told_at = self._observed_at = time.monotonic()

    def take(self, one: RestoredObject) -> None:
        """Count an object, and say how far the run is, where it is time to."""
        self._sums.add(one)
        if one.error and self._sums.failed <= MOST_TOLD:
            self._context.log.error(with_hint(one.error))
        if one.outcome is RestoreOutcome.DIFFERENT and self._sums.different <= MOST_TOLD:
            self._context.log.error(
                f"{one.location.row.key!r} was not written: something else is at {one.place!r}"
            )
        now = time.monotonic()
        if now - self._told_at >= LINE_SECONDS:
            self._told_at = now
            self._context.log.info(self._line)
            if now - self._observed_at >= OBSERVED_LATER * (self._observed_at - self._began_at):
                self._observed_at = now
                self.observe()

    def observe(self) -> None:
        """Let the locations show how far the run is."""
        shown = {f"restore_{name}": count for name, count in sums_metadata(self._sums).items()}
        run = MetadataValue.dagster_run(self._context.run_id)
        self._context.log_event(
            AssetObservation(
                self._locations, description=self._line, metadata={**shown, "run": run}
            )
        )

    @property
    def _line(self) -> str:
        sums = self._sums
        size = show_size(sums.restored_bytes)
        return (
            f"{counted(sums.listed, 'object')}: {sums.restored:,} restored ({size}), "
            f"{sums.equal:,} there"
        )


def sums_metadata(sums: RestoreSums) -> Mapping[str, IntMetadataValue]:
    """Return the sums as Dagster shows them."""
    shown = {
        "objects": sums.restored,
        "bytes": sums.restored_bytes,
        "there_already": sums.equal,
        "different": sums.different,
        "failed": sums.failed,
        "not_yet_archived": sums.not_yet_archived,
        "skipped": sums.skipped,
        **(
            {"without_headers": sums.without_headers} if sums.without_headers else {}
        ),  # only of adopted files
    }
    return {name: MetadataValue.int(count) for name, count in shown.items()}
