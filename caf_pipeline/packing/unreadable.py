"""Finds objects that cannot be read although their source answers, and decides when to skip them.

The first run that meets such an object reads all objects behind it, counts the unreadable ones, and
fails. The journal ends at the first, which keeps the plan's order.
"""

from collections.abc import Iterable, Iterator
from itertools import chain, dropwhile, islice
from pathlib import Path
from typing import Final

from caf_pipeline.errors import ObjectReadFailed, ObjectUnavailable, SourceUnreachable
from caf_pipeline.inventory.objects import S3Object, is_supported
from caf_pipeline.inventory.plan import PlannedObject, read_chunk_objects
from caf_pipeline.packing.packer import Packer
from caf_pipeline.records import Chunk
from caf_pipeline.run_context import RunContext
from caf_pipeline.waits import UNANSWERED_SECONDS

MAX_UNREADABLE: Final = 1_000
"""Unreadable objects that one run looks for, some seconds each."""

SAMPLED_OBJECTS: Final = 8
"""Other objects tried, of the first page and of the chunk."""

SAMPLE_BYTES: Final = 64 << 10


def give_up_on(context: RunContext, chunk: Chunk, packer: Packer, planned: PlannedObject) -> bool:
    """Count a failed read; return whether enough runs failed to skip the object.

    Later runs read only the counted objects again. Raises SourceUnreachable if no object is
    readable.
    """
    require_answers(context, chunk, planned.object)
    failures = context.ledger.read_failures.list(chunk.name)
    earlier = failures.get(_identity(planned))
    times = earlier.times if earlier else 0
    if earlier is None or earlier.last_run != context.holder.run:
        objects = read_chunk_objects(Path(chunk.plan_folder), chunk.number)
        behind = islice(dropwhile(lambda candidate: candidate != planned, objects), 1, None)
        suspects = (
            (candidate for candidate in behind if _identity(candidate) in failures)
            if earlier
            else behind
        )
        with context.waits.waiting(
            "the other objects of the chunk, which are read to find all that cannot be read",
            ends_by="the run then fails, and counts them together",
            grace=UNANSWERED_SECONDS,
        ):
            unreadable = islice(packer.find_unreadable(suspects), MAX_UNREADABLE - 1)
            failed = [planned, *unreadable]
        require_answers(context, chunk, planned.object)  # the source may have gone down meanwhile
        context.ledger.read_failures.count(
            chunk.name, [*map(_identity, failed)], context.holder.run
        )
        times += 1
    return times >= context.settings.packing.unreadable_after


def combined_read_failure(
    context: RunContext, chunk: Chunk, error: ObjectReadFailed
) -> ObjectReadFailed:
    """Return a failed run's error, with the number of objects."""
    failures = context.ledger.read_failures.list(chunk.name).values()
    limit, run = context.settings.packing.unreadable_after, context.holder.run
    count = sum(failure.last_run == run and failure.times < limit for failure in failures)
    if count < 2:
        return error
    return ObjectReadFailed(
        f"{count} objects of chunk {chunk.name} cannot be read; the first: {error}", hint=error.hint
    )


def require_answers(context: RunContext, chunk: Chunk, failed: S3Object) -> None:
    """Raise SourceUnreachable if the source does not list, or returns no object but `failed`."""
    page = next(iter(context.objects.list_pages(versions=True)), [])
    error: ObjectReadFailed | None = None
    planned = read_chunk_objects(Path(chunk.plan_folder), chunk.number)
    of_chunk = _sampled((row.object for row in planned), chunk.object_count, failed)
    for sample in chain(_sampled(page, len(page), failed), of_chunk):
        try:
            context.objects.read(sample, 0, min(sample.size_bytes, SAMPLE_BYTES))
        except ObjectUnavailable:
            return
        except ObjectReadFailed as sample_error:
            error = sample_error
        else:
            return
    if error:
        raise SourceUnreachable(
            f"{context.address} lists its objects, but every read of a sample fails: {error}",
            hint="wait, then run the chunk again",
        ) from error


def _sampled(objects: Iterable[S3Object], count: int, failed: S3Object) -> Iterator[S3Object]:
    spread = islice(objects, 0, None, max(count // SAMPLED_OBJECTS, 1))
    readable = (
        obj
        for obj in spread
        if obj.key != failed.key and not obj.is_delete_marker and is_supported(obj.key)
    )
    return islice(readable, SAMPLED_OBJECTS)


def _identity(planned: PlannedObject) -> tuple[str, str]:
    return planned.object.key.decode(), planned.object.object_version
