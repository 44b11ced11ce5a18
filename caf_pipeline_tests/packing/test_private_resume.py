"""Killed private packings resume under the worker key; nothing is sealed twice under one nonce."""

import hashlib
import os
from pathlib import Path

import pytest

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.encryption.entry_cipher import EntryCipher
from caf_pipeline.errors import LeaseLost, LedgerError
from caf_pipeline.formats.chunkio import LogReader, LogWriter
from caf_pipeline.inventory.manifest import HEAD_SIZE_BYTES
from caf_pipeline.inventory.plan import read_chunk_plan
from caf_pipeline.ledger import backup, chunk_moves
from caf_pipeline.ledger.runs import Staging
from caf_pipeline.maintenance.remove_source import find_leftovers, remove_leftovers
from caf_pipeline.packing import pack_chunk
from caf_pipeline.packing.journal.format import Checkpoint, Journal, PackedMember
from caf_pipeline.packing.journal.takeover import find_earlier
from caf_pipeline.packing.packer import remove_staged
from caf_pipeline.packing.staging import leftovers
from caf_pipeline.retrieval.reader import fetch
from caf_pipeline.steps import chunk_steps
from caf_pipeline.steps.audit import account_for_chunk
from caf_pipeline_tests.support import steady_source
from caf_pipeline_tests.support.broken_packings import broken_chunk
from caf_pipeline_tests.support.doctors import mended
from caf_pipeline_tests.support.encrypted_staging import (
    IDENTITY,
    WORKER_KEY,
    StagingCopies,
    a_changing_source,
    packing_secrets,
    private_settings,
    sealed_segments,
)
from caf_pipeline_tests.support.journaled_packing import Packing, a_source
from caf_pipeline_tests.support.kills import KILLED, Fatal, call
from caf_pipeline_tests.support.run_contexts import a_run_context, archive_chunk, plan
from caf_pipeline_tests.support.steady_source import a_steady_source

PACKING = 270
"""About the moments of packing the changing source; its object is rolled back in the middle."""

SEAL = call(chunk_moves.ChunkMoves.seal)
SECRET = call(Staging.packing_secret)


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """Let this process, too, take checkpoints inside the large object."""
    monkeypatch.setattr("caf_pipeline.packing.packer.pace_of", lambda settings: steady_source.OFTEN)


def a_worker(folder, ledger, source=None, **settings):
    return a_run_context(
        folder, source or a_steady_source(), ledger, **private_settings() | settings
    )


def killed(context, url, chunk, *fatal, source=a_steady_source):
    """Kill a run of the chunk at a moment."""
    fatal = Fatal(*fatal)
    folder = context.settings.home.parent
    options = {"fatal": fatal, "source": source} | private_settings()
    assert steady_source.run(folder, url, chunk.name, **options) == KILLED


def sealed(context, name):
    archive_chunk(context, name, until=chunk_steps.pack_chunk)
    return chunk_steps.seal_chunk(context, name)


def opened_earlier(context, name):
    """Return the packing that a next run would resume."""
    (secret,) = packing_secrets(context.ledger)
    cipher = EntryCipher(bytes.fromhex(WORKER_KEY), secret, name)
    earlier, _ = find_earlier(leftovers(context, name), opening_of_chunk(context, name), cipher)
    return earlier


def opening_of_chunk(context, name):
    chunk = context.ledger.chunks.get(name)
    chunk_plan = read_chunk_plan(Path(chunk.plan_folder), chunk.number)
    return pack_chunk.packer_of(context, None, chunk, chunk_plan, [IDENTITY.recipient]).opening


def safe_bytes(context, name):
    if earlier := opened_earlier(context, name):
        earlier.close()
    return earlier.size_bytes if earlier else 0


def ends_right(context, name):
    """Every archived object reads back with the identity, and nothing stays in staging."""
    settings = private_settings()
    settings["encryption"] = settings["encryption"] | {"identity": IDENTITY.reveal()}
    reader = a_run_context(
        context.settings.home.parent, context.objects, context.ledger, **settings
    )
    assert context.ledger.chunks.get(name).state is ChunkState.LOCATED
    assert account_for_chunk(context, name).agrees
    assert list(context.staging().iterdir()) == []
    for key, body in context.objects.bodies.items():
        if key not in context.objects.unavailable:
            archived = fetch(context.ledger.lookup, reader.opened, "src", key)
            assert b"".join(archived.pieces) == body


def copied_at_each_entry(context, folder, monkeypatch):
    """Copy the staging folder at each entry of a journal."""
    copies, append = StagingCopies(context.staging(), folder), Journal.append

    def append_and_copy(journal, entry):
        append(journal, entry)
        copies.take()

    monkeypatch.setattr(Journal, "append", append_and_copy)
    return copies


def assert_no_nonce_repeats(copies):
    """Nowhere were two plaintexts sealed under one file key, payload nonce and number."""
    sealed_at = {}
    for segment in copies.segments():
        assert sealed_at.setdefault(segment.place, segment.ciphertext) == segment.ciphertext
    return {file_key for file_key, *_ in sealed_at}


# --- resuming


@pytest.mark.thorough
def test_killed_packing_fetches_no_journaled_byte_again(tmp_path, ledger, database_url):
    context = a_worker(tmp_path, ledger)
    (chunk,) = plan(context).chunks
    killed(context, database_url, chunk, "pack_chunk", 160)
    report = sealed(context, chunk.name)
    read_bytes = sum(end - start for _, start, end in context.objects.reads)
    assert report.resumed_bytes > 500_000
    assert report.not_resumed == ""
    assert report.resumed_bytes + read_bytes == HEAD_SIZE_BYTES + report.chunk.member_bytes
    archive_chunk(context, chunk.name)
    ends_right(context, chunk.name)


@pytest.mark.thorough
@pytest.mark.parametrize("fatal", range(10, PACKING, 40))
def test_no_kill_lets_nonce_meet_two_plaintexts(tmp_path, ledger, database_url, fatal):
    context = a_worker(tmp_path, ledger, a_changing_source())
    (chunk,) = plan(context).chunks
    copies = StagingCopies(context.staging(), tmp_path / "copies")
    for moment in (fatal, PACKING - fatal, 60):
        killed(context, database_url, chunk, "pack_chunk", moment, source=a_changing_source)
        copies.take()
    archive_chunk(context, chunk.name, until=chunk_steps.seal_chunk)
    copies.take()
    assert_no_nonce_repeats(copies)
    archive_chunk(context, chunk.name)
    ends_right(context, chunk.name)


@pytest.mark.thorough
@pytest.mark.parametrize("second", range(1, 80, 10))
def test_kill_while_resuming_keeps_safe_bytes(tmp_path, ledger, database_url, second):
    context = a_worker(tmp_path, ledger)
    (chunk,) = plan(context).chunks
    killed(context, database_url, chunk, "pack_chunk", 160)
    before = safe_bytes(context, chunk.name)
    assert before > 500_000
    killed(context, database_url, chunk, "pack_chunk", second)
    assert safe_bytes(context, chunk.name) >= before
    assert sealed(context, chunk.name).resumed_bytes >= before


@pytest.mark.thorough
def test_rolled_back_object_gives_rest_a_new_key(tmp_path, ledger, monkeypatch):
    context = a_worker(tmp_path, ledger, a_changing_source())
    (chunk,) = plan(context).chunks
    copies = copied_at_each_entry(context, tmp_path / "copies", monkeypatch)
    archive_chunk(context, chunk.name, until=chunk_steps.seal_chunk)
    assert len(assert_no_nonce_repeats(copies)) == 2
    archive_chunk(context, chunk.name)
    ends_right(context, chunk.name)


@pytest.mark.thorough
@pytest.mark.parametrize("fatal", range(100, 142, 6))
def test_kill_while_rolling_back_leaves_a_pair(tmp_path, ledger, database_url, fatal):
    context = a_worker(tmp_path, ledger, a_changing_source())
    (chunk,) = plan(context).chunks
    killed(context, database_url, chunk, "pack_chunk", fatal, source=a_changing_source)
    before = safe_bytes(context, chunk.name)
    assert before > 1_000_000
    # The next run rolls the object back again if the kill came first.
    assert 1_000_000 < sealed(context, chunk.name).resumed_bytes <= before
    archive_chunk(context, chunk.name)
    ends_right(context, chunk.name)


def test_journal_goes_on_after_rolled_back_object(tmp_path, ledger):
    context = a_worker(tmp_path, ledger, a_changing_source())
    chunk = broken_chunk(context)
    report = sealed(context, chunk.name)
    assert report.not_resumed == ""
    assert {key for key, _, _ in context.objects.reads} == {f"key-{n:03d}" for n in range(50, 60)}


def test_finished_file_without_seal_is_resumed_without_get(tmp_path, ledger, database_url):
    context = a_worker(tmp_path, ledger)
    (chunk,) = plan(context).chunks
    killed(context, database_url, chunk, SEAL, 1)
    assert sealed(context, chunk.name).not_resumed == ""
    assert context.objects.reads == []


def test_run_killed_after_the_seal_leaves_no_journal(tmp_path, ledger, database_url):
    context = a_worker(tmp_path, ledger)
    (chunk,) = plan(context).chunks
    killed(context, database_url, chunk, SEAL, 2)
    assert list(context.staging().glob("*.journal"))
    sealed(context, chunk.name)
    assert {file.kind for file in leftovers(context, chunk.name)} == {"sealed", "record"}


def test_damaged_segment_ends_what_is_resumed(tmp_path, ledger):
    context = a_worker(tmp_path, ledger)
    chunk = broken_chunk(context)
    (part,) = context.staging().glob("*.part")
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    report = sealed(context, chunk.name)
    assert 0 < report.resumed_bytes <= len(data) // 2
    assert "do not match" in report.not_resumed
    archive_chunk(context, chunk.name)
    ends_right(context, chunk.name)


# --- nothing to resume


@pytest.mark.thorough
@pytest.mark.parametrize("key", ["", "a1" * 32])
def test_without_the_worker_key_nothing_is_resumed(tmp_path, ledger, key):
    chunk = broken_chunk(a_worker(tmp_path, ledger))
    context = a_worker(tmp_path, ledger, worker_key=key or None)
    report = sealed(context, chunk.name)
    assert report.resumed_bytes == 0
    assert "key" in report.not_resumed.lower()
    archive_chunk(context, chunk.name)
    ends_right(context, chunk.name)


def test_without_room_for_both_the_chunk_starts_again(tmp_path, ledger):
    limited = {"part_size": "64KiB", "staging_limit": "5MiB"}
    context = a_worker(tmp_path, ledger, packing=limited)
    chunk = broken_chunk(context)
    report = sealed(context, chunk.name)
    assert report.resumed_bytes == 0
    assert "room" in report.not_resumed
    archive_chunk(context, chunk.name)
    ends_right(context, chunk.name)


def test_journal_of_another_chunk_resumes_nothing(tmp_path, ledger):
    context = a_worker(tmp_path, ledger)
    chunk = broken_chunk(context)
    (path,) = context.staging().glob("*.journal")
    (secret,) = packing_secrets(ledger)
    cipher = EntryCipher(bytes.fromhex(WORKER_KEY), secret, "other")
    path.write_bytes(rewritten(path.read_bytes(), cipher))
    report = sealed(context, chunk.name)
    assert report.resumed_bytes == 0
    assert report.not_resumed


# --- the journal's entries


def rewritten(log, cipher):
    """The same number of entries, sealed by another cipher."""
    writer = LogWriter()
    entries = LogReader(lambda start, end: log[start:end], len(log)).entries()
    return b"".join(
        writer.entry(cipher.salt, cipher.seal(number, b"planted"))
        for number, _ in enumerate(entries)
    )


@pytest.fixture(scope="module")
def opening(tmp_path_factory):
    return Packing(tmp_path_factory.mktemp("opening"), a_source()).packer().opening


def a_cipher(chunk="src-00000000-00001", key=b"k" * 32, secret=b"s" * 32):
    return EntryCipher(key, secret, chunk)


def a_journal(path, opening, cipher, count=5):
    """Write a journal; return its sealed entries."""
    journal = Journal.open(path, opening, cipher)
    journal.append(opening)
    for number in range(count):
        start = HEAD_SIZE_BYTES + number
        member = PackedMember(start, start + 1, bytes(32), bytes(8))
        journal.append(Checkpoint([member], bytes(32), start + 1, b"", start + 1))
    journal.close()
    log = path.read_bytes()
    reader = LogReader(lambda start, end: log[start:end], len(log))
    return [(entry.user_data, reader.content(entry)) for entry in reader.entries()]


def accepted(path, opening, cipher, entries):
    """Return how many checkpoints of these entries are accepted."""
    writer = LogWriter()
    path.write_bytes(b"".join(writer.entry(*entry) for entry in entries))
    journal = Journal.open(path, opening, cipher)
    try:
        return len(list(journal.checkpoints()))
    finally:
        journal.close()


def test_a_sealed_journal_reads_back(tmp_path, opening):
    entries = a_journal(tmp_path / "own", opening, a_cipher())
    assert accepted(tmp_path / "read", opening, a_cipher(), entries) == 5


OTHERS = [
    a_cipher("src-00000000-00002"),
    a_cipher(),
    a_cipher(key=b"x" * 32),
    a_cipher(secret=b"x" * 32),
]


@pytest.mark.parametrize("other", OTHERS, ids=["chunk", "journal", "worker key", "secret"])
def test_a_planted_entry_is_refused(tmp_path, opening, other):
    own = a_journal(tmp_path / "own", opening, a_cipher())
    planted = a_journal(tmp_path / "other", opening, other)
    salt = own[0][0]
    for user_data, content in (planted[3], (salt, planted[3][1])):
        entries = [*own[:3], (user_data, content), *own[4:]]
        assert accepted(tmp_path / "read", opening, a_cipher(), entries) == 2


@pytest.mark.parametrize("order", [[0, 1, 3, 2], [0, 1, 1, 2], [0, 1, 3], [0, 1, 0, 1]])
def test_a_moved_entry_is_refused(tmp_path, opening, order):
    entries = a_journal(tmp_path / "entries", opening, a_cipher())
    moved = [entries[number] for number in order]
    assert accepted(tmp_path / "read", opening, a_cipher(), moved) == 1


def test_every_flipped_byte_of_an_entry_is_refused(tmp_path, opening):
    entries = a_journal(tmp_path / "own", opening, a_cipher())
    salt, content = entries[3]
    for at in range(len(content)):
        flipped = bytearray(content)
        flipped[at] ^= 1
        changed = [*entries[:3], (salt, bytes(flipped)), *entries[4:]]
        assert accepted(tmp_path / "read", opening, a_cipher(), changed) == 2


def test_no_entry_repeats_a_nonce(tmp_path, opening):
    contents = [content for _, content in a_journal(tmp_path / "own", opening, a_cipher(), 200)]
    assert len({content[:12] for content in contents}) == len(contents)


# --- what a stolen staging disk has


@pytest.mark.thorough
@pytest.mark.parametrize("fatal", [100, 150])
def test_killed_run_leaves_nothing_in_the_clear(tmp_path, ledger, database_url, fatal):
    context = a_worker(tmp_path, ledger)
    (chunk,) = plan(context).chunks
    copies = StagingCopies(context.staging(), tmp_path / "copies")
    for moment in (fatal, 40):
        killed(context, database_url, chunk, "pack_chunk", moment)
        copies.take()
    secrets = [IDENTITY.seed, bytes.fromhex(WORKER_KEY), *packing_secrets(ledger)]
    for path in copies.files():
        secrets += [segment.place[0] for segment in sealed_segments(path)]
    for key, body in context.objects.bodies.items():
        secrets += [key.encode(), hashlib.sha256(body).digest()]
        secrets += [body[at : at + 32] for at in range(0, len(body) - 32, 4096)]
    assert any(path.suffix == ".journal" for path in copies.files())
    for path in copies.files():
        content = path.read_bytes()
        for secret in secrets:
            assert secret not in content
            assert secret.hex().encode() not in content


def test_disk_and_worker_key_open_the_chunk_being_packed(tmp_path, ledger):
    context = a_worker(tmp_path, ledger)
    chunk = broken_chunk(context)
    copies = StagingCopies(context.staging(), tmp_path / "copies")
    copies.take()
    part_keys = {segment.place[0] for segment in copies.segments()}
    assert stolen_file_keys(context, copies, chunk.name) == part_keys != set()


def test_disk_and_worker_key_open_nothing_without_the_ledger(tmp_path, ledger):
    context = a_worker(tmp_path, ledger)
    chunk = broken_chunk(context)
    copies = StagingCopies(context.staging(), tmp_path / "copies")
    copies.take()
    assert stolen_file_keys(context, copies, chunk.name, secrets=[b"", bytes(32)]) == set()


def test_sealed_chunk_opens_with_no_journal_and_worker_key(tmp_path, ledger, monkeypatch):
    context = a_worker(tmp_path, ledger, a_changing_source())
    (chunk,) = plan(context).chunks
    copies = copied_at_each_entry(context, tmp_path / "copies", monkeypatch)
    archive_chunk(context, chunk.name, until=chunk_steps.pack_chunk)
    copies.take()
    assert any(path.suffix == ".journal" for path in copies.files())
    assert stolen_file_keys(context, copies, chunk.name) == set()


def stolen_file_keys(context, copies, name, secrets=None):
    """The file keys in all journals that a thief of disk, worker key and database opens.

    A thief who lacks the database guesses `secrets`.
    """
    opening = opening_of_chunk(context, name)
    worker_key, keys = bytes.fromhex(WORKER_KEY), set()
    for secret in secrets or [b"", bytes(32), *packing_secrets(context.ledger)]:
        for path in copies.files():
            if path.suffix == ".journal":
                journal = Journal.open(path, opening, EntryCipher(worker_key, secret, name))
                keys |= {
                    entry.sealed.file_key for _, entry in journal.checkpoints() if entry.sealed
                }
                journal.close()
    return keys


def continues(context, chunk):
    sealed(context, chunk.name)


def is_withdrawn(context, chunk):
    chunk_steps.withdraw(context, chunk.name)


def is_withdrawn_elsewhere(context, chunk):
    settings = {**private_settings(), "staging": context.settings.home / "other machine"}
    there = a_run_context(context.settings.home.parent, context.objects, context.ledger, **settings)
    chunk_steps.withdraw(there, chunk.name)
    assert mended(context)


def is_removed(context, chunk):
    remove_leftovers(find_leftovers(context.settings, context.ledger, "src"))


@pytest.mark.parametrize("end", [continues, is_withdrawn, is_withdrawn_elsewhere, is_removed])
def test_a_journal_is_overwritten_before_it_is_removed(tmp_path, ledger, end):
    context = a_worker(tmp_path, ledger)
    chunk = broken_chunk(context)
    (journal,) = context.staging().glob("*.journal")
    with journal.open("rb") as blocks:
        size_bytes = os.fstat(blocks.fileno()).st_size
        end(context, chunk)
        assert not journal.exists()
        assert blocks.read() == bytes(size_bytes)


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_in_place_of_a_journal_is_not_followed(tmp_path, link):
    file, name = tmp_path / "file", tmp_path / "c.1.journal"
    file.write_bytes(b"content")
    link(file, name)
    remove_staged(name)
    assert file.read_bytes() == b"content"
    assert list(tmp_path.iterdir()) == [file]


# --- the secret of a packing


def test_the_seal_deletes_the_secret_in_its_transaction(tmp_path, ledger, monkeypatch):
    context = a_worker(tmp_path, ledger)
    chunk = broken_chunk(context)
    (secret,) = packing_secrets(ledger)

    def fail(*arguments):
        raise LedgerError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(chunk_moves, "record_header_sets", fail)
        with pytest.raises(LedgerError):
            chunk_steps.pack_chunk(context, chunk.name)
    assert packing_secrets(ledger) == [secret]
    context.objects.reads.clear()
    assert sealed(context, chunk.name).not_resumed == ""
    assert context.objects.reads == []
    assert packing_secrets(ledger) == []


@pytest.mark.parametrize("before", [True, False])
def test_run_killed_at_the_secret_starts_again(tmp_path, ledger, database_url, before):
    context = a_worker(tmp_path, ledger)
    (chunk,) = plan(context).chunks
    killed(context, database_url, chunk, SECRET, 1 if before else 2)
    assert len(packing_secrets(ledger)) == (not before)
    archive_chunk(context, chunk.name)
    ends_right(context, chunk.name)
    assert packing_secrets(ledger) == []


def test_a_parked_chunk_resumes_with_its_secret(tmp_path, ledger):
    context = a_worker(tmp_path, ledger)
    chunk = broken_chunk(context)
    chunk_steps.park(context, chunk.name, "a test")
    chunk_steps.unpark(context, chunk.name)
    chunk_steps.load_batch(context, chunk.name)
    report = sealed(context, chunk.name)
    assert report.resumed_bytes > 0
    assert report.not_resumed == ""


def test_a_withdrawn_chunk_has_no_secret(tmp_path, ledger):
    context = a_worker(tmp_path, ledger)
    chunk = broken_chunk(context)
    chunk_steps.withdraw(context, chunk.name)
    assert packing_secrets(ledger) == []


def test_a_lost_lease_gives_no_secret(tmp_path, ledger):
    context = a_worker(tmp_path, ledger)
    (chunk,) = plan(context).chunks
    chunk_steps.load_batch(context, chunk.name)
    with chunk_steps.lease_chunk(context, chunk.name) as old:
        pass
    with chunk_steps.lease_chunk(context, chunk.name), pytest.raises(LeaseLost):
        ledger.staging.packing_secret(old, chunk.name)
    assert packing_secrets(ledger) == []


def test_two_machines_share_the_secret_until_the_seal(tmp_path, ledger):
    here = a_worker(tmp_path, ledger)
    chunk = broken_chunk(here)
    secret = packing_secrets(ledger)
    there = a_worker(tmp_path, ledger, staging=tmp_path / "other machine")
    copies = StagingCopies(here.staging(), tmp_path / "copies")
    copies.take()
    assert stolen_file_keys(here, copies, chunk.name)
    assert sealed(there, chunk.name).resumed_bytes == 0
    assert secret != packing_secrets(ledger) == []
    assert stolen_file_keys(here, copies, chunk.name) == set()


def test_no_backup_has_the_secret(tmp_path, ledger):
    context = a_worker(tmp_path, ledger)
    chunk = broken_chunk(context)
    path = tmp_path / "ledger.dump"
    backup.back_up(ledger.database, path, embedded=True)
    programs = backup.Programs(ledger.database, embedded=True)
    backup.restore(programs, path, reason="a test")
    assert packing_secrets(ledger) == []
    report = sealed(a_worker(tmp_path, ledger), chunk.name)
    assert (report.resumed_bytes, bool(report.not_resumed)) == (0, True)
    archive_chunk(context, chunk.name)
    ends_right(context, chunk.name)


def test_a_plain_part_is_not_resumed_encrypted(tmp_path, ledger):
    public = a_run_context(tmp_path, a_steady_source(), ledger, target="8MiB")
    chunk = broken_chunk(public)
    context = a_worker(tmp_path, ledger)
    report = sealed(context, chunk.name)
    assert report.resumed_bytes == 0
    assert ledger.chunks.get(chunk.name).encrypted
    assert os.listdir(context.staging())
