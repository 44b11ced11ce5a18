"""Files that the store lists for an archive and the ledger has no chunk for: chunks are restored,
other files are reported.

Nothing is ever deleted at a store: what is told of takes its space until that ends.
"""

from collections.abc import Iterator
from functools import partial
from typing import Final

from caf_pipeline.chunk_state import CLAIMING, IN_GOOD_STANDING
from caf_pipeline.errors import (
    ArchiveError,
    ClaimConflict,
    IllegalMove,
    IntegrityError,
    NotLocated,
    SettingsError,
    StoreError,
    with_hint,
)
from caf_pipeline.ledger.records import chunk_lease, plan_lease
from caf_pipeline.maintenance import rebuild
from caf_pipeline.maintenance.doctor.findings import (
    NO_LONGER_THERE,
    Actor,
    Examination,
    Finding,
    Kind,
    Mended,
    mendable,
    not_checked,
)
from caf_pipeline.maintenance.rebuild import FileKind
from caf_pipeline.system.quantities import counted

_DOUBTFUL: Final = frozenset({FileKind.UNREADABLE, FileKind.CONFLICTING})
"""Files of our own that may be chunks: another look, later or of the whole file, may tell."""


def listed_files(examination: Examination) -> Iterator[Finding]:
    """Find files of ours that the store lists under the source's archive and the ledger has no
    chunk for.

    Others may post as many files as they like under our note; those are not told of, since nothing
    is to be done about them.
    """
    context = examination.context
    if context.source not in context.settings.sources:
        found = (
            "caf.toml does not have this source, so that the store was not asked for chunks "
            "that the ledger does not know"
        )
        yield Finding(
            Kind.UNSEEN,
            context.source,
            found,
            "set its bucket, endpoint and prefix to have its files checked",
            Actor.NOBODY,
        )
        return
    sound = {chunk.name for chunk in context.ledger.chunks.list(context.source, IN_GOOD_STANDING)}
    try:
        for file in rebuild.find_chunks(
            context, left=context.ledger.rebuilds.left_posts(context.source)
        ):
            if file.kind is not FileKind.FOREIGN and (
                file.kind is not FileKind.KNOWN or file.name not in sound
            ):
                yield from _finding(examination, file)
        if unknown := context.ledger.rebuilds.unknown_posts(context.source):
            fault = (
                f"{counted(unknown, 'post')} unknown to the ledger when a run last looked: "
                "nothing is packed or posted"
            )
            yield mendable(
                Kind.FILE,
                context.source,
                fault,
                "looked at again",
                partial(_look_again, examination),
            )
    except (StoreError, SettingsError) as error:
        yield not_checked(f"what the store lists of {context.source}", error)


def _finding(examination: Examination, file: rebuild.FileFinding) -> Iterator[Finding]:
    if file.kind is FileKind.CHUNK:
        members = file.chunk.member_count if file.chunk else 0
        has = f"has it as '{file.replaces.state}'" if file.replaces else "does not"
        fault = (
            f"the store has this chunk of {counted(members, 'member')} ({_place(file)}), and "
            f"the ledger {has}"
        )
        yield mendable(
            Kind.FILE,
            file.name,
            fault,
            _remedy(examination, file),
            partial(_restore, examination, file),
        )
        return
    if file.kind is FileKind.KNOWN:
        yield from _known(examination, file)
        return
    where, name = (
        (f"{_place(file)}: {file.why}", file.name) if file.name else (file.why, _place(file))
    )
    if file.kind is FileKind.DIFFERING:
        yield Finding(
            Kind.FILE,
            name,
            where,
            "not restored; 'caf rebuild --whole' finds which copies are right",
            Actor.OPERATOR,
        )
    elif file.kind in _DOUBTFUL:
        yield Finding(Kind.FILE, name, where, "not restored; look again later", Actor.OPERATOR)
    else:
        yield Finding(Kind.FILE, name, where, f"left; {_space(examination, file)}", Actor.NOBODY)


def _place(file: rebuild.FileFinding) -> str:
    posting = file.file.posting
    return f"root {posting.merkle_root.hex()[:16]}…, block {posting.start}"


def _space(examination: Examination, file: rebuild.FileFinding) -> str:
    size_bytes = file.file.posting.stored_size_bytes
    if examination.context.settings.store.kind == "jackal":
        return f"each of its copies takes {size_bytes} bytes until the bought space ends"
    return f"it takes {size_bytes} bytes of the store"


def _known(examination: Examination, file: rebuild.FileFinding) -> Iterator[Finding]:
    """Report a file whose chunk the ledger has in a state that does not account for it."""
    try:
        chunk = examination.context.ledger.chunks.get(file.name)
    except NotLocated:
        return
    recorded = (chunk.merkle_root, chunk.start) == (
        file.file.posting.merkle_root,
        file.file.posting.start,
    )
    if chunk.state in CLAIMING:
        if not recorded and chunk_lease(chunk.name) not in examination.leases_of_live_runs():
            found = f"it is posted ({_place(file)}), and the ledger has it as '{chunk.state}'"
            yield Finding(
                Kind.FILE, chunk.name, found, f"'caf run {chunk.source}' goes on with it", Actor.RUN
            )
    elif chunk.state not in IN_GOOD_STANDING:
        yield Finding(
            Kind.FILE,
            chunk.name,
            f"posted ({_place(file)}) and {chunk.state}",
            f"left; {_space(examination, file)}",
            Actor.NOBODY,
        )


def _remedy(examination: Examination, file: rebuild.FileFinding) -> str:
    fault = rebuild.fault_of(examination.context, file.chunk) if file.chunk else ""
    return (
        f"restored as damaged ({fault}); 'caf repair {file.name}' stores it again"
        if fault
        else "restored"
    )


def _restore(examination: Examination, file: rebuild.FileFinding) -> Mended:
    context = examination.context
    with examination.lease(plan_lease(context.source)):
        if file.replaces is None and _is_known(examination, file.name):
            return NO_LONGER_THERE
        if file.replaces is not None:
            examination.require_free(chunk_lease(file.name))
        # The ledger may have been rebuilt for other sources only, and not know this one.
        context.ledger.sources.register(context.source, context.archive_id, context.address)
        try:
            rows = rebuild.import_found_chunk(context, file)
        except (ArchiveError, ClaimConflict, IllegalMove, IntegrityError) as error:
            return Mended(f"not restored: {with_hint(error)}", Actor.OPERATOR)
        if not rows:
            return Mended(f"left: {rebuild.ELSEWHERE}; {_space(examination, file)}", Actor.NOBODY)
        remedy = _remedy(examination, file)
        return Mended(
            f"{remedy}, with {counted(rows, 'location')}",
            Actor.MENDED if remedy == "restored" else Actor.OPERATOR,
        )


def _is_known(examination: Examination, name: str) -> bool:
    try:
        examination.context.ledger.chunks.get(name)
    except NotLocated:
        return False
    return True


def _look_again(examination: Examination) -> Mended:
    """Ask the store again.

    If it has no unknown post any more, chunks of the source are launched again.
    """
    context = examination.context
    roots = context.store.unknown_posts(
        context.archive_id, context.ledger.transactions(context.holder)
    )
    if not roots:
        return Mended("the ledger knows all posts now: the next run goes on")
    again = f"'caf run {context.source} --new-archive' archives their objects again"
    return Mended(
        f"{counted(len(roots), 'post')} still unknown; look again later, or {again}", Actor.OPERATOR
    )
