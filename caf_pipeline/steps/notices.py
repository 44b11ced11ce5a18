"""What S3's event notifications name: taken from a source's queue into the ledger, and looked for
in the bucket.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final
from uuid import uuid4

from caf_pipeline.errors import ListingUnordered
from caf_pipeline.inventory.key_split import just_before
from caf_pipeline.run_context import RunContext
from caf_pipeline.source.protocol import EventQueue
from caf_pipeline.steps.inventories import current_filters, unsettled_objects
from caf_pipeline.steps.list_source import drop_old_versions

KEYS_PER_SCAN: Final = 10_000
"""Of one look: what lies between the first and the last of them is listed."""


@dataclass(frozen=True, slots=True)
class Drained:
    """What was taken from a queue: messages that are durable and deleted, and those that stay there
    for want of room.
    """

    taken: int = 0
    left: int = 0


@dataclass(frozen=True, slots=True)
class NoticedScan:
    """A look at a part of the bucket that has keys which events named.

    Attributes:
        to_plan: whether it has what a plan would take, or lacks a key of which there was an event.
        after, until: the part: keys greater than, up to and including; `until` None: to the end.
    """

    to_plan: bool
    after: bytes
    until: bytes | None


def drain_queue(context: RunContext, queue: EventQueue, *, enough: Callable[[], bool]) -> Drained:
    """Take messages until there are none, or `enough` says so.

    A message is deleted once the ledger has what it says.
    """
    taken = left = 0
    context.ledger.notices.record_queue(context.source, read=False)
    read = False
    while not enough():
        messages, read = queue.receive(), True
        if not messages:
            break
        durable = context.ledger.notices.take_messages(context.source, messages)
        queue.delete([message for message in messages if message.message_id in durable])
        taken += len(durable)
        left += len(messages) - len(durable)
    if read:
        context.ledger.notices.record_queue(context.source, read=True)
    return Drained(taken, left)


def scan_noticed(
    context: RunContext, *, after: bytes, max_pages: int, enough: Callable[[], bool]
) -> NoticedScan | None:
    """List at most `max_pages` pages, from the first noticed key after `after` on; None where no
    key is noticed.

    After the last one it begins again from the first. Where there is nothing to plan, the keys that
    it came to are forgotten. It ends after a page where `enough` says so. Pages with nothing that
    is kept do not count, as in `inventories.scan_for_new`.
    """
    noticed = context.ledger.notices.noticed_keys(context.source, after, KEYS_PER_SCAN)
    noticed = noticed or context.ledger.notices.noticed_keys(context.source, b"", KEYS_PER_SCAN)
    if not noticed:
        return None
    start, end, listing = just_before(noticed[0]), noticed[-1], f"look {uuid4().hex}"
    began = datetime.now(UTC)
    context.ledger.notices.mark_noticed(context.source, listing, start, end)
    there, unsettled, reached, pages = set[bytes](), list[bytes](), start, 0
    filters = current_filters(context)
    try:
        for page in context.objects.list_pages(after=start, in_order=True, versions=True):
            objects, _ = drop_old_versions(page, all_versions=context.all_versions)
            there |= {obj.key for obj in page if obj.is_latest and not obj.is_delete_marker}
            unsettled += [obj.key for obj in unsettled_objects(context, objects, filters)]
            reached, pages = page[-1].key, pages + bool(objects)
            if reached > end or pages == max_pages or enough():
                break
        else:  # the listing's end
            reached = end + b"\0"
    except ListingUnordered:  # no part of such a bucket can be listed
        return NoticedScan(to_plan=True, after=b"", until=None)
    # Of the last key that was listed, the next page may have further versions.
    come_to = [key for key in noticed if key < reached]
    if not come_to:
        return NoticedScan(to_plan=True, after=start, until=noticed[0])
    until = come_to[-1]
    to_plan = any(key <= until for key in unsettled) or not there.issuperset(come_to)
    if not to_plan:
        context.ledger.notices.forget_noticed(context.source, listing, began, start, until)
    return NoticedScan(to_plan, start, until)
