"""The job that restores archived objects of any source."""

from dagster import (
    Failure,
    GraphDefinition,
    JobDefinition,
    Nothing,
    OpExecutionContext,
    Out,
    Output,
    in_process_executor,
    op,
)

from caf_pipeline.automation.dead_runs import process_tags
from caf_pipeline.automation.restoring import RestoreConfig, restore, sums_metadata
from caf_pipeline.defs.failures import RETRY_TRANSIENT, attempt
from caf_pipeline.naming import BEFORE_BACKFILLS, LEDGER, RESTORE_JOB, RUN, SOURCE_TAG, STORE
from caf_pipeline.retrieval.restore import RestoreSums
from caf_pipeline.system.processes import this_process


def restore_job() -> JobDefinition:
    """Return the job."""
    return GraphDefinition(name=RESTORE_JOB, node_defs=[restore_archived]).to_job(
        tags=BEFORE_BACKFILLS,
        executor_def=in_process_executor,
        description="Write archived objects of a source into a folder or a bucket. Set 'source' "
        "and 'destination'. Objects that are already there with the same content are skipped, so a "
        "failed run can be repeated. Different content is replaced only with 'force'.",
    )


@op(
    name="caf_restore_objects",
    description="Write the missing objects, each verified by SHA-256, and count objects that are "
    "not archived.",
    out=Out(Nothing),
    retry_policy=RETRY_TRANSIENT,
    required_resource_keys={LEDGER, STORE, RUN},
)
def restore_archived(context: OpExecutionContext, config: RestoreConfig) -> Output[None]:
    """The counts are shown even if the run fails."""
    tags = {SOURCE_TAG: config.source, **process_tags(this_process(context.run_id))}
    context.instance.add_run_tags(context.run_id, tags)
    sums = RestoreSums()
    try:
        attempt(context, lambda: restore(context, config, sums), context.resources.caf_run.on_error)
    except Failure as failure:
        failure.metadata = {**failure.metadata, **sums_metadata(sums)}
        raise
    return Output(None, metadata=sums_metadata(sums))
