"""The job that restores: archived objects of any source, below a folder or into a bucket, as `caf
restore` does.
"""

from typing import Final

from dagster import (
    Failure,
    GraphDefinition,
    JobDefinition,
    Nothing,
    OpExecutionContext,
    Out,
    Output,
    op,
)

from caf_pipeline.automation.dead_runs import process_tags
from caf_pipeline.automation.restoring import Restore, restore, sums_metadata
from caf_pipeline.defs.failures import RETRY_TRANSIENT, attempt
from caf_pipeline.defs.naming import BEFORE_BACKFILLS, LEDGER, RUN, SOURCE_TAG, STORE
from caf_pipeline.ledger.processes import this_process
from caf_pipeline.retrieval.restore import RestoreSums

RESTORE_JOB: Final = "restore"


def restore_job() -> JobDefinition:
    """Return the job; there is one for all sources."""
    return GraphDefinition(name=RESTORE_JOB, node_defs=[restore_archived]).to_job(
        tags=BEFORE_BACKFILLS,
        description="Write archived objects of a source below a folder, or into a bucket: give "
        "`source` and `destination`. "
        "What is there and equal is left, so that the same run goes on after a failure; what is "
        "not equal is replaced only with "
        "`force`.",
    )


@op(
    name="restore_objects",
    description="Write the objects that are not there, each compared with its SHA-256; count what "
    "is not archived.",
    out=Out(Nothing),
    retry_policy=RETRY_TRANSIENT,
    required_resource_keys={LEDGER, STORE, RUN},
)
def restore_archived(context: OpExecutionContext, config: Restore) -> Output[None]:
    """Restore, and show how far it came if it fails, too."""
    context.instance.add_run_tags(
        context.run_id, {SOURCE_TAG: config.source, **process_tags(this_process(context.run_id))}
    )
    sums = RestoreSums()
    try:
        attempt(context, lambda: restore(context, config, sums), context.resources.run.on_error)
    except Failure as failure:
        failure.metadata = {**failure.metadata, **sums_metadata(sums)}
        raise
    return Output(None, metadata=sums_metadata(sums))
