"""The packing journal: only a valid prefix is accepted, whatever the damage."""

import os
from dataclasses import fields, replace

import msgspec
import pytest

from caf_pipeline.formats.chunkio import LogReader, LogWriter
from caf_pipeline.inventory.headers import ObjectHeaders
from caf_pipeline.inventory.objects import SkipReason
from caf_pipeline.packing.journal.format import (
    MAX_ENTRY_BYTES,
    MAX_OUTCOMES,
    Journal,
    OpenMember,
    PackedMember,
    SkippedObject,
)
from caf_pipeline.packing.journal.writer import CheckpointPace
from caf_pipeline_tests.support.journaled_packing import IDENTITY, Packing, a_source
from caf_pipeline_tests.support.peak_memory import peak_bytes


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A complete packing with a checkpoint for each object and part."""
    packing = Packing(tmp_path_factory.mktemp("whole"), a_source())
    packing.packed = packing.run()
    packing.opening = packing.packer().opening
    packing.bytes, packing.log = packing.files()
    packing.said = [checkpoint for _, checkpoint in checkpoints(packing.journal, packing.opening)]
    return packing


def read(path, opening):
    """Return the accepted checkpoints, and why no more."""
    journal = Journal.open(path, opening)
    try:
        return list(journal.checkpoints()), journal.broken
    finally:
        journal.close()


def checkpoints(path, opening):
    accepted, _ = read(path, opening)
    return accepted


def written(path, says):
    """Write a journal of these entries, correctly numbered."""
    path.unlink(missing_ok=True)
    journal = Journal.open(path, says[0])
    for record in says:
        journal.append(record)
    journal.close()
    return path


def entries(log):
    return list(LogReader(lambda start, end: log[start:end], len(log)).entries())


def goes_on_right(whole, folder, part, journal):
    """Resume from these files; the chunk must be the same. Return the resumed bytes."""
    packing = Packing(folder, a_source())
    packing.put(part, journal)
    packed = packing.run()
    assert packing.part.read_bytes() == whole.bytes
    assert packed.merkle_root == whole.packed.merkle_root
    return packed


def test_journal_has_every_object_and_durable_size(whole):
    assert len(whole.said) > 20
    outcomes = [outcome for checkpoint in whole.said for outcome in checkpoint.outcomes]
    assert len(outcomes) == len(whole.source.bodies)
    assert whole.said[-1].durable_bytes == whole.said[-1].boundary == outcomes[-1].end_byte
    inside = [checkpoint.open.size_bytes for checkpoint in whole.said if checkpoint.open]
    assert inside == sorted(inside)
    assert len(inside) >= 4


def test_a_finished_part_is_resumed_without_a_get(whole, tmp_path):
    packing = Packing(tmp_path, a_source())
    packing.put(whole.bytes, whole.log)
    packed = packing.run()
    assert packing.read_bytes() == 0
    assert packed.resumed_bytes == whole.said[-1].durable_bytes
    assert packing.part.read_bytes() == whole.bytes


def test_a_journal_cut_at_any_byte_tells_a_prefix(whole, tmp_path):
    ends = {place.end for place, _ in checkpoints(whole.journal, whole.opening)}
    path = tmp_path / "cut.journal"
    path.write_bytes(whole.log)
    for size in range(len(whole.log) - 1, -1, -1):
        os.truncate(path, size)
        if size % 13 and size not in ends and size + 1 not in ends:
            continue  # any byte of an entry is like another
        accepted = [checkpoint for _, checkpoint in checkpoints(path, whole.opening)]
        assert accepted == whole.said[: sum(1 for end in ends if end <= size)]


def test_a_flipped_byte_anywhere_in_a_journal_leaves_a_prefix(whole, tmp_path):
    path = tmp_path / "flipped.journal"
    for at in range(0, len(whole.log), 5):
        log = bytearray(whole.log)
        log[at] ^= 0x10
        path.write_bytes(log)
        accepted = [checkpoint for _, checkpoint in checkpoints(path, whole.opening)]
        assert accepted == whole.said[: len(accepted)]
        assert len(accepted) < len(whole.said) or at < 16  # the log's own header does not matter


@pytest.mark.parametrize("tenth", range(0, 10, 3))
def test_packing_goes_on_right_from_a_damaged_journal(whole, tmp_path, tenth):
    at = 20 + (len(whole.log) - 40) * tenth // 9
    flipped = bytearray(whole.log)
    flipped[at] ^= 1
    goes_on_right(whole, tmp_path / "cut", whole.bytes, whole.log[:at])
    goes_on_right(whole, tmp_path / "flipped", whole.bytes, bytes(flipped))


@pytest.mark.parametrize("tenth", range(0, 10, 3))
def test_flipped_byte_ends_prefix_at_checkpoint_before(whole, tmp_path, tenth):
    at = (whole.said[-1].durable_bytes - 1) * tenth // 9
    part = bytearray(whole.bytes)
    part[at] ^= 1
    packed = goes_on_right(whole, tmp_path / "chunk", bytes(part), whole.log)
    assert packed.resumed_bytes == max(
        (checkpoint.durable_bytes for checkpoint in whole.said if checkpoint.durable_bytes <= at),
        default=0,
    )
    assert packed.not_resumed


@pytest.mark.parametrize("tenth", range(0, 10, 3))
def test_part_shorter_than_journal_is_resumed_where_whole(whole, tmp_path, tenth):
    size = whole.said[-1].durable_bytes * tenth // 10
    packed = goes_on_right(whole, tmp_path / "chunk", whole.bytes[:size], whole.log)
    assert packed.resumed_bytes == max(
        (checkpoint.durable_bytes for checkpoint in whole.said if checkpoint.durable_bytes <= size),
        default=0,
    )


def test_journal_continued_after_crash_is_read_completely(whole, tmp_path):
    packing = Packing(tmp_path, a_source())
    place, _ = checkpoints(whole.journal, whole.opening)[9]
    packing.put(whole.bytes, whole.log[: place.end])
    packing.run()
    accepted = checkpoints(packing.journal, whole.opening)
    assert [checkpoint for _, checkpoint in accepted[:10]] == whole.said[:10]
    assert accepted[-1][1].durable_bytes == whole.said[-1].durable_bytes
    assert packing.part.read_bytes() == whole.bytes


# --- journals that lie ----------------------------------------------------------------------------


def changed(said, **changes):
    return msgspec.structs.replace(said, **changes)


def lies(whole):
    """Correctly numbered but false entries in place of the fifth checkpoint."""
    true = whole.said[4]
    (member,) = true.outcomes
    inside = next(
        number for number, checkpoint in enumerate(whole.said) if checkpoint.open and number > 5
    )
    yield "another sha256", 4, changed(true, outcomes=[changed(member, sha256=bytes(32))])
    yield "another tree", 4, changed(true, tree=whole.said[-1].tree)
    yield "a tree that is none", 4, changed(true, tree=b"")
    yield "other objects", 4, changed(true, objects_sha256=bytes(32))
    yield "a gap", 4, changed(true, outcomes=[changed(member, start_byte=member.start_byte + 1)])
    yield (
        "an end before its start",
        4,
        changed(true, outcomes=[changed(member, end_byte=member.start_byte - 1)]),
    )
    yield (
        "a longer member",
        4,
        changed(
            true,
            outcomes=[changed(member, end_byte=member.end_byte + 1)],
            boundary=true.boundary + 1,
        ),
    )
    yield "more than is staged", 4, changed(true, durable_bytes=1 << 34)
    yield "less than its members", 4, changed(true, durable_bytes=1)
    yield (
        "more objects than the plan has",
        4,
        changed(true, outcomes=[SkippedObject(SkipReason.DELETED, "")] * 500),
    )
    yield "an open member of none", 4, changed(true, open=OpenMember(0, bytes(32)))
    yield (
        "an open member larger than the object",
        4,
        changed(true, open=OpenMember(1 << 20, bytes(32)), durable_bytes=true.boundary + (1 << 20)),
    )
    yield (
        "an open member that shrinks",
        inside,
        changed(
            whole.said[inside],
            open=OpenMember(1, bytes(32)),
            durable_bytes=whole.said[inside].boundary + 1,
        ),
    )
    yield "another opening in its middle", 4, whole.opening


@pytest.mark.parametrize("number", range(14))
def test_a_lying_journal_is_believed_up_to_the_lie(whole, tmp_path, number):
    what, at, lie = list(lies(whole))[number]
    log = written(
        tmp_path / "lying.journal", [whole.opening, *whole.said[:at], lie, *whole.said[at + 1 :]]
    ).read_bytes()
    packed = goes_on_right(whole, tmp_path / "chunk", whole.bytes, log)
    assert packed.resumed_bytes == whole.said[at - 1].durable_bytes, what


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("journal_format", 1),
        ("software", "caf-pipeline/1 pyarrow 0"),
        ("identity", bytes(32)),
        ("chunk_row", bytes(32)),
        ("proof_type", 0),
        ("limit_bytes", 1),
        ("compare_checksums", False),
    ],
)
def test_a_journal_of_another_opening_is_not_resumed(whole, tmp_path, field, value):
    path = written(
        tmp_path / "foreign.journal", [changed(whole.opening, **{field: value}), *whole.said]
    )
    accepted, why = read(path, whole.opening)
    assert accepted == []
    assert field.replace("_", " ") in why
    assert (
        goes_on_right(whole, tmp_path / "chunk", whole.bytes, path.read_bytes()).resumed_bytes == 0
    )


def test_the_opening_tells_chunks_of_one_plan_apart(whole):
    other = replace(IDENTITY, chunk="src-00000000-00002")
    assert Packing(whole.folder, a_source(), proof_type=0).packer().opening != whole.opening
    assert Packing(whole.folder, a_source(), identity=other).packer().opening != whole.opening


def test_journal_is_accepted_up_to_entries_of_another(whole, tmp_path):
    """A loss of power may leave old blocks of a deleted file in place of new ones."""
    other = Packing(
        tmp_path / "other", a_source(), identity=replace(IDENTITY, chunk="src-00000000-00002")
    )
    other.run()
    own_entries, foreign = entries(whole.log), entries(other.journal.read_bytes())
    assert [entry.end for entry in own_entries] == [
        entry.end for entry in foreign
    ]  # so that both have the same size
    mixed = whole.log[: own_entries[9].end] + other.journal.read_bytes()[foreign[9].end :]
    path = tmp_path / "mixed.journal"
    path.write_bytes(mixed)
    accepted, why = read(path, whole.opening)
    assert [checkpoint for _, checkpoint in accepted] == whole.said[:9]
    assert "entry 10" in why
    assert (
        goes_on_right(whole, tmp_path / "chunk", whole.bytes, mixed).resumed_bytes
        == whole.said[8].durable_bytes
    )


def test_reordered_and_repeated_entries_end_the_prefix(whole, tmp_path):
    log, log_entries = whole.log, entries(whole.log)
    reader = LogReader(lambda start, end: log[start:end], len(log))
    kept = [(entry.user_data, reader.content(entry)) for entry in log_entries[:10]]
    for order in ([0, 1, 2, 4, 3, 5], [0, 1, 2, 2, 3], [0, 2, 3], [1, 2, 3], [0, 1, 2, 1, 2, 3]):
        writer = LogWriter()
        path = tmp_path / "reordered.journal"
        path.write_bytes(b"".join(writer.entry(*kept[number]) for number in order))
        accepted = [accepted for _, accepted in checkpoints(path, whole.opening)]
        assert accepted == whole.said[: len(accepted)]
        assert len(accepted) <= 2


@pytest.mark.thorough
def test_huge_claims_cost_no_memory(whole, tmp_path):
    before = peak_bytes()
    huge = tmp_path / "huge.journal"
    huge.write_bytes(whole.log)
    os.truncate(huge, 1 << 40)
    assert len(checkpoints(huge, whole.opening)) == len(whole.said)
    crowded = msgspec.msgpack.encode(
        [1, [[1, "deleted", ""]] * (MAX_OUTCOMES + 1), bytes(32), 512, b"", 512, None]
    )
    too_long = msgspec.msgpack.encode(
        [1, [], bytes(32), 512, b"x" * (MAX_ENTRY_BYTES // 2), 512, None]
    )
    for content in (
        crowded,
        too_long,
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,
    ):
        writer, path = LogWriter(), tmp_path / "claims.journal"
        path.write_bytes(writer.entry(bytes(16), content))
        assert checkpoints(path, whole.opening) == []
    assert peak_bytes() - before < 256 << 20


@pytest.mark.parametrize("field", [field.name for field in fields(ObjectHeaders)])
def test_a_checkpoint_is_due_where_headers_are_long(tmp_path, field):
    """Entries longer than `MAX_ENTRY_BYTES` would not be read."""
    source = a_source(small=20, large=0)
    value = {"k": "x" * 8000} if field == "user_metadata" else "x" * 8000
    source.headers = {key: ObjectHeaders(**{field: value}) for key in source.bodies}
    packing = Packing(
        tmp_path, source, pace=CheckpointPace(due_outcomes_bytes=20_000, due_seconds=3600)
    )
    packing.run()
    accepted = [
        checkpoint for _, checkpoint in checkpoints(packing.journal, packing.packer().opening)
    ]
    assert max(len(checkpoint.outcomes) for checkpoint in accepted) <= 6
    assert all(
        outcome.headers == ObjectHeaders(**{field: value})
        for checkpoint in accepted
        for outcome in checkpoint.outcomes
    )


def test_an_append_that_failed_leaves_no_half_entry(whole, tmp_path):
    journal = Journal.open(tmp_path / "torn.journal", whole.opening)
    journal.append(whole.opening)
    journal.append(whole.said[0])
    with (tmp_path / "torn.journal").open("ab") as file:
        file.write(b"half an entry")
    journal.cut()
    journal.close()
    assert len(checkpoints(tmp_path / "torn.journal", whole.opening)) == 1


def test_a_journal_is_a_small_part_of_the_chunk(tmp_path):
    packing = Packing(tmp_path, a_source(small=2000, large=0), pace=CheckpointPace())
    packing.run()
    assert packing.journal.stat().st_size < 100 * 2003
    assert isinstance(
        checkpoints(packing.journal, packing.packer().opening)[0][1].outcomes[0], PackedMember
    )
