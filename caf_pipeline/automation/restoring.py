"""Restores archived objects of a source, like `caf restore`."""

import time
from collections.abc import Mapping
from typing import Final

from dagster import (
    AssetObservation,
    Config,
    IntMetadataValue,
    MetadataValue,
    OpExecutionContext,
)
from pydantic import Field

from caf_pipeline import wiring
from caf_pipeline.encryption.opening_reader import OpeningReader
from caf_pipeline.errors import HeldByOther, NotLocated, StagingError, UsageError, with_hint
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.naming import ASSETS
from caf_pipeline.retrieval.listing import count_not_archived, every, is_current, list_objects
from caf_pipeline.retrieval.reader import no_source
from caf_pipeline.retrieval.restore import (
    RestoredObject,
    RestoreOutcome,
    RestoreSums,
    restore_objects,
)
from caf_pipeline.retrieval.side_by_side import take_all
from caf_pipeline.settings import Settings
from caf_pipeline.system.processes import this_process
from caf_pipeline.system.quantities import counted, show_size
from caf_pipeline.waits import LINE_SECONDS, Announcer, Waits

MAX_LOGGED: Final = 20
"""Failed objects, and as many different ones: each is an event in storage."""

OBSERVE_RATIO: Final = 0.25
"""Growth of a run's age between two observations, each a row in storage: some 30 in a day."""


class RestoreConfig(Config):
    """Selects the objects to restore and their destination."""

    source: str = Field(description="Name of the source.")
    destination: str = Field(
        description="Absolute path of a folder on the machine of the run, or s3://BUCKET/PREFIX."
    )
    prefix: str = Field(
        default="", description="Restore only keys that begin with this prefix. Default: all keys."
    )
    force: bool = Field(
        default=False, description="Replace files or objects at the destination that differ."
    )
    current: bool = Field(
        default=False, description="Restore only objects that S3 had at the last inventory."
    )
    profile: str = Field(default="", description="AWS profile for the destination bucket.")
    endpoint_url: str = Field(
        default="", description="URL of the destination's S3 server. Default: AWS."
    )


def restore(context: OpExecutionContext, config: RestoreConfig, sums: RestoreSums) -> None:
    """Restore objects; count the outcomes in `sums`. Raises a CafError if any was not restored."""
    ledger: Ledger = context.resources.caf_ledger.get()
    waits = Waits(Announcer(context.log.info))
    if unknown := no_source(ledger.lookup, config.source):
        raise unknown
    if not config.destination.startswith((wiring.BUCKET_SCHEME, "/")) or "\0" in config.destination:
        raise UsageError(
            f"destination {config.destination!r} is neither an absolute path nor "
            "s3://BUCKET/PREFIX",
            hint="use an absolute path, since each run has its own working folder",
        )
    if (config.profile or config.endpoint_url) and not config.destination.startswith(
        wiring.BUCKET_SCHEME
    ):
        raise UsageError(
            "`profile` and `endpoint_url` need a bucket as destination",
            hint="set `destination` to s3://BUCKET/PREFIX",
        )
    stored = context.resources.caf_store.open(ledger, this_process(context.run_id), waits)
    settings: Settings = context.resources.caf_run.settings
    store = OpeningReader(stored, ledger.lookup.chunk_header, settings.encryption)
    progress = _Progress(context, config, sums)
    try:
        with wiring.open_restore(
            ledger.lookup,
            store,
            config.source,
            config.destination,
            force=config.force,
            profile=config.profile,
            endpoint_url=config.endpoint_url,
            waits=waits,
        ) as target:
            sums.not_yet_archived, sums.skipped = count_not_archived(
                ledger.lookup, config.source, config.prefix
            )
            listed = list_objects(
                ledger.lookup,
                config.source,
                config.prefix,
                include=is_current if config.current else every,
            )
            ended = take_all(restore_objects(listed, target), progress.take)
    except HeldByOther as held:
        # A chunk's run succeeds if another run holds the chunk, but a restore must fail.
        raise StagingError(str(held), hint=held.hint) from held
    if not sums.listed:
        kind = "current" if config.current else "archived"
        raise NotLocated(
            f"source '{config.source}' has no {kind} key that begins with '{config.prefix}'"
        )
    if sums.beside:
        reasons = f"`caf status {config.source}` shows the reasons"
        context.log.warning(f"{counted(sums.listed, 'object')} listed; {sums.beside}: {reasons}")
    failure = sums.failure(ended, "`force`")
    if ended and failure is not ended:
        context.log.error(str(ended))
    if failure and not failure.permanent:
        progress.observe()  # Dagster keeps no metadata of an attempt that is retried
    if failure:
        raise failure


class _Progress:
    def __init__(
        self, context: OpExecutionContext, config: RestoreConfig, sums: RestoreSums
    ) -> None:
        self._context = context
        self._locations = context.resources.caf_run.asset_keys.key(config.source, ASSETS[-1])
        self._sums = sums
        self._began_at = self._logged_at = self._observed_at = time.monotonic()

    def take(self, restored: RestoredObject) -> None:
        self._sums.add(restored)
        if restored.error and self._sums.failed <= MAX_LOGGED:
            self._context.log.error(with_hint(restored.error))
        if restored.outcome is RestoreOutcome.DIFFERENT and self._sums.different <= MAX_LOGGED:
            self._context.log.error(
                f"{restored.location.row.key!r} was not written: {restored.place!r} has different "
                "content"
            )
        now = time.monotonic()
        if now - self._logged_at >= LINE_SECONDS:
            self._logged_at = now
            self._context.log.info(self._line)
            if now - self._observed_at >= OBSERVE_RATIO * (self._observed_at - self._began_at):
                self._observed_at = now
                self.observe()

    def observe(self) -> None:
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
            f"{sums.equal:,} already there"
        )


def sums_metadata(sums: RestoreSums) -> Mapping[str, IntMetadataValue]:
    """Return the counts as metadata."""
    shown = {
        "objects": sums.restored,
        "bytes": sums.restored_bytes,
        "there_already": sums.equal,
        "different": sums.different,
        "failed": sums.failed,
        "not_yet_archived": sums.not_yet_archived,
        "skipped": sums.skipped,
    }
    if sums.without_headers:  # only objects of adopted files
        shown["without_headers"] = sums.without_headers
    if sums.from_unknown_posts:
        shown["from_unknown_posts"] = sums.from_unknown_posts
    return {name: MetadataValue.int(count) for name, count in shown.items()}
