"""Objects that cannot be read although their source answers: which they are, and after how many
runs they are skipped.

A run that meets such an object reads on, without writing, to find the others of its chunk, and
counts all of them together. Only then does it fail. The journal still ends at the first, so that
the order of the members is the plan's.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, dropwhile, islice
from pathlib import Path
from typing import Final

from caf_pipeline.errors import ObjectReadFailed, ObjectUnavailable, SourceUnreachable
from caf_pipeline.inventory.objects import S3Object, is_supported
from caf_pipeline.inventory.plan import PlannedObject, read_chunk_objects
from caf_pipeline.ledger.records import Chunk
from caf_pipeline.packing.packer import Packer
from caf_pipeline.run_context import RunContext
from caf_pipeline.waits import UNANSWERED_SECONDS

MOST_UNREADABLE: Final = 1_000
"""Unreadable objects that one run looks for. Each costs all attempts of its request, some
seconds.
"""

SAMPLED_OBJECTS: Final = 8
"""Other objects of the source's first page, and of the chunk, that are tried before the source
counts as down.
"""

SAMPLE_BYTES: Final = 64 << 10


def give_up_on(context: RunContext, chunk: Chunk, packer: Packer, planned: PlannedObject) -> bool:
    """Count a run that failed on this object; return whether enough runs did to skip it as
    unreadable.

    If no run failed on the object before, the run reads the objects behind it in the chunk, too.
    Objects that cannot be read are counted together. If an earlier run failed on the object, it has
    read all of them: only objects that failed then are read again.

    Raises: SourceUnreachable: the source gives no object at all; nothing is counted. And as
        `Packer.find_unreadable`.
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
        failed = [planned, *_unreadable_among(context, packer, suspects)]
        require_answers(context, chunk, planned.object)  # it may have gone down meanwhile
        context.ledger.read_failures.count(
            chunk.name, [*map(_identity, failed)], context.holder.run
        )
        times += 1
    return times >= context.settings.packing.unreadable_after


def named_together(context: RunContext, chunk: Chunk, error: ObjectReadFailed) -> ObjectReadFailed:
    """Return the error of a run that failed on an object; if it failed on several, their number is
    in it.
    """
    failures = context.ledger.read_failures.list(chunk.name).values()
    limit, run = context.settings.packing.unreadable_after, context.holder.run
    count = sum(failure.last_run == run and failure.times < limit for failure in failures)
    if count < 2:
        return error
    return ObjectReadFailed(
        f"{count} objects of chunk {chunk.name} cannot be read; the first: {error}", hint=error.hint
    )


def require_answers(context: RunContext, chunk: Chunk, failed: S3Object) -> None:
    """Return if the source lists its objects and answers for an object other than `failed`.

    A source that has no other object only has to list it.

    Raises:
        SourceUnreachable: it does not. And as `ObjectSource.list_pages` and `read`.
    """
    page = next(iter(context.objects.list_pages(versions=True)), [])
    error: ObjectReadFailed | None = None
    for sample in chain(_sampled(page, len(page), failed), _sampled_of_chunk(chunk, failed)):
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
            f"{context.address} lists its objects, but none of the tried objects can be read: "
            f"{error}",
            hint="wait, and run the chunk again",
        ) from error


def _sampled_of_chunk(chunk: Chunk, failed: S3Object) -> Iterator[S3Object]:
    objects = read_chunk_objects(Path(chunk.plan_folder), chunk.number)
    return _sampled((planned.object for planned in objects), chunk.object_count, failed)


def _sampled(objects: Iterable[S3Object], count: int, failed: S3Object) -> Iterator[S3Object]:
    """Yield a few of the objects, evenly spread."""
    spread = islice(objects, 0, None, max(count // SAMPLED_OBJECTS, 1))
    readable = (
        obj
        for obj in spread
        if obj.key != failed.key and not obj.is_delete_marker and is_supported(obj.key)
    )
    return islice(readable, SAMPLED_OBJECTS)


def _unreadable_among(
    context: RunContext, packer: Packer, suspects: Iterable[PlannedObject]
) -> Sequence[PlannedObject]:
    with context.waits.waiting(
        "the other objects of the chunk, which are read to find all that cannot be read",
        ends_by="the run then fails, and counts them together",
        grace=UNANSWERED_SECONDS,
    ):
        return list(islice(packer.find_unreadable(suspects), MOST_UNREADABLE - 1))


def _identity(planned: PlannedObject) -> tuple[str, str]:
    return planned.object.key.decode(), planned.object.object_version
