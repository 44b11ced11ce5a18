"""What the store lists of an archive and no chunk of the ledger stands for: restored where it is a chunk of ours, else told.

Nothing is ever deleted at a store: what is told of takes its space until that ends.
"""

from collections.abc import Iterator
from functools import partial
from typing import Final

from caf_pipeline.chunk_state import CLAIMING, IN_GOOD_STANDING
from caf_pipeline.errors import ArchiveError, CafError, ClaimConflict, IntegrityError, NotLocated, SettingsError, StoreError
from caf_pipeline.ledger.records import chunk_lease, plan_lease
from caf_pipeline.maintenance import rebuild
from caf_pipeline.maintenance.doctor.findings import GONE, Finding, Kind, Mended, Turn, Ward, mendable, told, unseen
from caf_pipeline.maintenance.rebuild import FindingKind
from caf_pipeline.system.plurals import counted

_DOUBTFUL: Final = frozenset({FindingKind.UNREADABLE, FindingKind.CONFLICTING})
"""Files of our own that may be chunks: who looks again later, or closer, may find out."""


def listed_files(ward: Ward) -> Iterator[Finding]:
    """Find files of ours that the store lists under the source's archive and the ledger has no chunk for.

    Others may post as many files as they like under our note; those are not told of, since nothing is to be done about them.
    """
    work = ward.work
    if work.source not in work.settings.sources:
        found = "caf.toml does not have this source, so that the store was not asked for chunks that the ledger does not know"
        yield told(Kind.UNSEEN, work.source, found, "set its bucket, endpoint and prefix to have that looked at", Turn.NOBODY)
        return
    sound = {chunk.name for chunk in work.ledger.chunks(work.source, IN_GOOD_STANDING)}
    try:
        for file in rebuild.find_chunks(work):
            if file.kind is FindingKind.CONFLICTING and file.name in sound:
                # Beside a second copy that was ordered: the chunk of the ledger is in good standing, so that nothing is missing.
                yield told(Kind.FILE, file.name, f"{_place(file)}: {file.why}", f"left; {_space(file)}", Turn.NOBODY)
            elif file.kind is not FindingKind.FOREIGN and (file.kind is not FindingKind.KNOWN or file.name not in sound):
                yield from _finding(ward, file)
    except (StoreError, SettingsError) as error:
        yield unseen(f"what the store lists of {work.source}", error)


def _finding(ward: Ward, file: rebuild.Finding) -> Iterator[Finding]:
    if file.kind is FindingKind.CHUNK:
        members = file.chunk.member_count if file.chunk else 0
        found = f"the store has this chunk of {counted(members, 'member')} ({_place(file)}), and the ledger does not"
        yield mendable(Kind.FILE, file.name, found, _remedy(ward, file), partial(_restore, ward, file))
        return
    if file.kind is FindingKind.KNOWN:
        yield from _known(ward, file)
        return
    where, name = f"{_place(file)}: {file.why}", file.name or _place(file)
    if file.kind is FindingKind.DIFFERING:
        yield told(Kind.FILE, name, where, "not restored; 'caf rebuild --whole' finds which copies are right", Turn.OPERATOR)
    elif file.kind in _DOUBTFUL:
        yield told(Kind.FILE, name, where, "not restored; look again later", Turn.OPERATOR)
    else:
        yield told(Kind.FILE, name, where, f"left; {_space(file)}", Turn.NOBODY)


def _place(file: rebuild.Finding) -> str:
    posting = file.file.posting
    return f"root {posting.merkle_root.hex()[:16]}…, block {posting.start}"


def _space(file: rebuild.Finding) -> str:
    return f"each of its copies takes {file.file.posting.stored_size_bytes} bytes until the bought space ends"


def _known(ward: Ward, file: rebuild.Finding) -> Iterator[Finding]:
    """Tell of a file whose chunk the ledger has in a state that does not stand for it."""
    try:
        chunk = ward.work.ledger.chunk(file.name)
    except NotLocated:
        return
    recorded = (chunk.merkle_root, chunk.start) == (file.file.posting.merkle_root, file.file.posting.start)
    if chunk.state in CLAIMING:
        if not recorded and chunk_lease(chunk.name) not in ward.in_hands():
            found = f"it is posted ({_place(file)}), and the ledger has it as '{chunk.state}'"
            yield told(Kind.FILE, chunk.name, found, f"'caf run --source {chunk.source}' goes on with it", Turn.RUN)
    elif chunk.state not in IN_GOOD_STANDING:
        yield told(Kind.FILE, chunk.name, f"posted ({_place(file)}) and {chunk.state}", f"left; {_space(file)}", Turn.NOBODY)


def _remedy(ward: Ward, file: rebuild.Finding) -> str:
    fault = rebuild.fault_of(ward.work, file.chunk) if file.chunk else ""
    return f"restored as damaged ({fault}); 'caf jackal repair {file.name}' stores it again" if fault else "restored"


def _restore(ward: Ward, file: rebuild.Finding) -> Mended:
    work = ward.work
    with ward.lease(plan_lease(work.source)):
        try:
            work.ledger.chunk(file.name)
        except NotLocated:
            # The ledger may have been rebuilt for other sources only, and not know this one.
            work.ledger.register_source(work.source, work.archive_id, work.address)
            try:
                rows = rebuild.restore(work, file)
            except (ArchiveError, ClaimConflict, IntegrityError) as error:
                return Mended(f"not restored: {_said(error)}", Turn.OPERATOR)
            if not rows:
                return Mended(f"left: {rebuild.ELSEWHERE}; {_space(file)}", Turn.NOBODY)
            remedy = _remedy(ward, file)
            return Mended(f"{remedy}, with {counted(rows, 'location')}", Turn.MENDED if remedy == "restored" else Turn.OPERATOR)
        return GONE


def _said(error: CafError) -> str:
    return f"{error}; {error.hint}" if error.hint else str(error)
