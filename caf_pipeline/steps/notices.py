"""Takes S3's event notifications from a queue into the ledger, and scans for the named keys."""

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
"""Noticed keys per scan, which lists everything between them."""


@dataclass(frozen=True, slots=True)
class DrainedMessages:
    """Messages of a queue: recorded and deleted ones, and those that did not fit."""

    taken: int = 0
    rest: int = 0


@dataclass(frozen=True, slots=True)
class NoticedScan:
    """A scan of the keys greater than `after`, up to and including `until` (None: to the end).

    `to_plan` is True if there are objects to plan, or a noticed key is missing.
    """

    to_plan: bool
    after: bytes
    until: bytes | None


def drain_queue(
    context: RunContext, queue: EventQueue, *, enough: Callable[[], bool]
) -> DrainedMessages:
    """Take messages until the queue is empty, or `enough` returns True.

    A message is deleted once the ledger has recorded it.
    """
    taken = rest = 0
    context.ledger.notices.record_queue(context.source, read=False)
    read = False
    while not enough():
        messages, read = queue.receive(), True
        if not messages:
            break
        durable = context.ledger.notices.take_messages(context.source, messages)
        queue.delete([message for message in messages if message.message_id in durable])
        taken += len(durable)
        rest += len(messages) - len(durable)
    if read:
        context.ledger.notices.record_queue(context.source, read=True)
    return DrainedMessages(taken, rest)


def scan_noticed(
    context: RunContext, *, after: bytes, max_pages: int, enough: Callable[[], bool]
) -> NoticedScan | None:
    """List up to `max_pages` pages from the first noticed key after `after`.

    Returns None if no key is noticed. Starts over behind the last key. Forgets the scanned keys if
    there is nothing to plan. Ends and counts pages like `inventories.scan_for_new`.
    """
    noticed = context.ledger.notices.noticed_keys(context.source, after, KEYS_PER_SCAN)
    noticed = noticed or context.ledger.notices.noticed_keys(context.source, b"", KEYS_PER_SCAN)
    if not noticed:
        return None
    start, end, listing = just_before(noticed[0]), noticed[-1], f"look {uuid4().hex}"
    began = datetime.now(UTC)
    context.ledger.notices.mark_noticed(context.source, listing, start, end)
    existing, unsettled, reached, pages = set[bytes](), list[bytes](), start, 0
    filters = current_filters(context)
    try:
        for page in context.objects.list_pages(after=start, in_order=True, versions=True):
            objects, _ = drop_old_versions(page, all_versions=context.all_versions)
            existing |= {obj.key for obj in page if obj.is_latest and not obj.is_delete_marker}
            unsettled += [obj.key for obj in unsettled_objects(context, objects, filters)]
            reached, pages = page[-1].key, pages + bool(objects)
            if reached > end or pages == max_pages or enough():
                break
        else:
            reached = end + b"\0"
    except ListingUnordered:  # such a bucket can only be listed as a whole
        return NoticedScan(to_plan=True, after=b"", until=None)
    # The next page may have more versions of the last listed key.
    scanned = [key for key in noticed if key < reached]
    if not scanned:
        return NoticedScan(to_plan=True, after=start, until=noticed[0])
    until = scanned[-1]
    to_plan = any(key <= until for key in unsettled) or not existing.issuperset(scanned)
    if not to_plan:
        context.ledger.notices.forget_noticed(context.source, listing, began, start, until)
    return NoticedScan(to_plan, start, until)
