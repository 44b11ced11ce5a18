"""Each test acts out an attack of the table in docs/explanation/security.md.

Thieves use what the event gives them, and code of their own or the age format.
"""

import os
import re
from pathlib import Path

import pytest

from caf_pipeline.errors import (
    IntegrityError,
    NoMatchingIdentity,
    ObjectReadFailed,
    StoreUnreachable,
)
from caf_pipeline.formats import age
from caf_pipeline.ledger.database import Database
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.packing.staging import leftovers
from caf_pipeline.retrieval.reader import fetch
from caf_pipeline.steps import chunk_steps
from caf_pipeline_tests.support.encrypted_staging import packing_secrets
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.postgres import connected
from caf_pipeline_tests.support.private_contexts import (
    IDENTITY,
    a_private_context,
    encrypt,
    sealed_again,
)
from caf_pipeline_tests.support.roles import granted_roles
from caf_pipeline_tests.support.run_contexts import a_run_context, archive_everything, plan
from caf_pipeline_tests.support.several_folders import SeveralFolders

ROOT = Path(__file__).parents[1]
BODIES = {f"secret-name-{number}": os.urandom(90_000) for number in range(9)}
WORKER_KEY = "a7" * 32


class WatchingStore(SeveralFolders):
    """Providers that note what is asked of them."""

    def __init__(self, folder):
        super().__init__(folder)
        self.asked = []

    def read(self, posting, start_byte, end_byte, *, provider=None):
        self.asked.append((start_byte, end_byte))
        return super().read(posting, start_byte, end_byte, provider=provider)


@pytest.fixture
def store(tmp_path):
    return WatchingStore(tmp_path / "store")


@pytest.fixture
def worker(tmp_path, ledger, store):
    """A machine with public keys and a worker key."""
    source = MemorySource(dict(BODIES))
    return a_private_context(tmp_path, source, ledger, store=store, worker_key=WORKER_KEY)


@pytest.fixture
def reader(tmp_path, ledger, store):
    """A machine with the identity."""
    source = MemorySource({})
    return a_private_context(tmp_path / "reader", source, ledger, store=store, identity=IDENTITY)


def archive_for(folder, ledger, store, *identities, bodies=BODIES):
    recipients = [str(identity.recipient) for identity in identities]
    source, encryption = MemorySource(dict(bodies)), {"recipients": recipients}
    archive_everything(
        a_run_context(folder, source, ledger, store=store, public=False, encryption=encryption)
    )


def pack_a_part(context):
    """Let a packing fail near its end, and return the chunk's name."""
    (chunk,) = plan(context).chunks
    chunk_steps.load_batch(context, chunk.name)
    context.objects.failing = {"secret-name-8": 0}
    with pytest.raises(ObjectReadFailed):
        chunk_steps.pack_chunk(context, chunk.name)
    return chunk.name


def read(context, key):
    return b"".join(fetch(context.ledger.lookup, context.opened, "src", key).pieces)


def stored_files(store):
    return [path for path in store.folders["anna"].folder.glob("chunks/*.caf")]


def in_every_copy(store, change):
    for folder in store.folders.values():
        for path in folder.folder.glob("chunks/*.caf"):
            path.write_bytes(change(path.read_bytes()))


def file_keys(store):
    headers = [age.parse_header(path.read_bytes()) for path in stored_files(store)]
    return [age.open_header(header, [IDENTITY]) for header in headers]


def rows_as_text(ledger):
    """All that a thief of the database has."""
    with connected(ledger.database) as connection:
        tables = connection.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
        ).fetchall()
        rows = [
            connection.execute(f"SELECT {table.tablename}::text FROM {table.tablename}").fetchall()
            for table in tables
        ]
    return str(rows)


def opens(stored, identity):
    """Open stored bytes with an identity, by the age format alone, as a thief does."""
    payload, start = age.open_file(stored, [identity])
    return bytes(payload.open(0, stored[start:], is_end=True))


# --- stolen database


def test_a_stolen_database_shows_names_sizes_and_hashes(worker, ledger):
    archive_everything(worker)
    text = rows_as_text(ledger)
    for key, body in BODIES.items():
        assert key in text
        assert str(len(body)) in text
        assert ledger.lookup.locate("src", key).row.sha256.hex() in text


@pytest.mark.parametrize("is_packing", [True, False], ids=["while packing", "afterwards"])
def test_a_stolen_database_has_no_key_of_a_chunk(worker, ledger, store, is_packing):
    if is_packing:
        pack_a_part(worker)
        (part,) = worker.staging().glob("*.part")
        keys = [age.open_header(age.parse_header(part.read_bytes()), [IDENTITY])]
    else:
        archive_everything(worker)
        keys = file_keys(store)
    text = rows_as_text(ledger)
    for secret in [IDENTITY.seed, bytes.fromhex(WORKER_KEY), *keys]:
        assert secret.hex() not in text


# --- stolen worker


def test_a_stolen_worker_reads_the_ledger(worker, database_url):
    archive_everything(worker)
    with granted_roles(database_url) as url_as:
        stolen = Ledger(Database(url_as("caf_worker")))
        assert next(iter(BODIES)) in rows_as_text(stolen)
        stolen.close()


def test_a_stolen_worker_archives_false_bytes(worker, reader, tmp_path, ledger, store):
    archive_everything(worker)
    false = MemorySource({"later": b"false bytes"})
    thief = a_private_context(tmp_path / "thief", false, ledger, store=store)
    archive_everything(thief)
    assert read(reader, "later") == b"false bytes"
    assert read(reader, "secret-name-0") == BODIES["secret-name-0"]


def test_a_stolen_worker_changes_rows_of_the_ledger(worker, reader, database_url):
    archive_everything(worker)
    with (
        granted_roles(database_url) as url_as,
        connected(Database(url_as("caf_worker"))) as connection,
    ):
        connection.execute("UPDATE file_locations SET sha256 = decode(repeat('00', 32), 'hex')")
    with pytest.raises(IntegrityError):
        read(reader, "secret-name-0")


def test_a_stolen_worker_has_no_key_of_an_older_chunk(worker, ledger, store):
    archive_everything(worker)
    settings = worker.settings.model_dump_json() + rows_as_text(ledger) + WORKER_KEY
    files = [path.read_bytes() for path in worker.settings.home.rglob("*") if path.is_file()]
    for secret in [IDENTITY.seed, *file_keys(store)]:
        assert secret.hex() not in settings
        assert not any(secret in content or secret.hex().encode() in content for content in files)
    assert packing_secrets(ledger) == []


# --- stolen staging disk


def test_a_stolen_staging_disk_shows_how_many_chunks(worker):
    name = pack_a_part(worker)
    assert {file.chunk for file in leftovers(worker)} == {name}


# --- providers


def test_a_curious_provider_sees_sizes_and_ranges(worker, reader, store, ledger):
    archive_everything(worker)
    (path, *_) = stored_files(store)
    chunk = next(row for row in ledger.chunks.list() if row.merkle_root.hex() == path.stem)
    assert path.stat().st_size == chunk.stored_size_bytes
    store.asked.clear()
    read(reader, "secret-name-3")
    assert sum(end - start for start, end in store.asked) < chunk.stored_size_bytes
    read(reader, "secret-name-4")
    assert len(set(store.asked)) > 1  # other objects are at other places


def test_a_curious_provider_reads_no_name_or_object(worker, store):
    archive_everything(worker)
    for path in stored_files(store):
        content = path.read_bytes()
        for key, body in BODIES.items():
            assert key.encode() not in content
            assert not any(body[at : at + 16] in content for at in range(0, len(body), 4096))


def test_a_provider_can_refuse_to_answer_or_lose_bytes(worker, reader, store):
    archive_everything(worker)
    store.away = {"anna", "bert"}
    store.lost["carl"] = (0, 1 << 30)
    with pytest.raises(StoreUnreachable):
        read(reader, "secret-name-0")
    store.away.remove("bert")
    assert read(reader, "secret-name-0") == BODIES["secret-name-0"]


def swapped(stored):
    start = len(age.parse_header(stored).raw) + age.NONCE_BYTES
    first, second = start + age.SEALED_SEGMENT_BYTES, start + 2 * age.SEALED_SEGMENT_BYTES
    return stored[:start] + stored[first:second] + stored[start:first] + stored[second:]


def flipped(stored):
    return stored[:5000] + bytes(byte ^ 1 for byte in stored[5000:])


@pytest.mark.parametrize("change", [swapped, flipped])
def test_lying_providers_return_no_other_bytes_as_object(worker, reader, store, change):
    archive_everything(worker)
    in_every_copy(store, change)
    with pytest.raises(IntegrityError):
        read(reader, "secret-name-0")


# --- identities


def test_a_stolen_identity_reads_each_chunk_of_its_recipient(worker, store, tmp_path, ledger):
    archive_everything(worker)
    new = {"later": b"for another recipient"}
    archive_for(tmp_path / "later", ledger, store, age.new_identity(), bodies=new)
    results = []
    for path in stored_files(store):
        try:
            results.append(opens(path.read_bytes(), IDENTITY))
        except NoMatchingIdentity:
            results.append(None)
    assert results.count(None) == 1
    text = b"".join(filter(None, results))
    assert all(body in text for body in BODIES.values())


def test_a_stolen_identity_changes_no_chunk_of_a_ledger(worker, reader, store):
    archive_everything(worker)

    def resealed(stored):
        content = bytearray(opens(stored, IDENTITY))
        content[1000:] = bytes(byte ^ 1 for byte in content[1000:])
        return sealed_again(stored, content)

    in_every_copy(store, resealed)
    for key in BODIES:
        with pytest.raises(IntegrityError):
            read(reader, key)


def test_a_recovery_identity_reads_if_the_other_is_lost(tmp_path, ledger, store):
    recovery = age.new_identity()
    archive_for(tmp_path, ledger, store, IDENTITY, recovery)
    text = b"".join(opens(path.read_bytes(), recovery) for path in stored_files(store))
    assert all(body in text for body in BODIES.values())


def test_a_chunk_does_not_open_if_all_identities_are_lost(worker, store):
    archive_everything(worker)
    for path in stored_files(store):
        with pytest.raises(NoMatchingIdentity):
            opens(path.read_bytes(), age.new_identity())


# --- quantum computer: it computes the secret key of a public X25519 key


def test_a_computed_x25519_key_opens_a_classic_chunk(tmp_path, ledger, store):
    owner = age.new_identity(hybrid=False)
    archive_for(tmp_path, ledger, store, owner)
    computed = age.X25519Identity(owner.seed)
    assert all(opens(path.read_bytes(), computed) for path in stored_files(store))


def test_a_computed_x25519_key_opens_no_hybrid_chunk(worker, store):
    class Computed(age.HybridIdentity):
        """Has the real X25519 key, and an ML-KEM key of its own."""

        _keys = age.new_identity()._keys[0], IDENTITY._keys[1]

    archive_everything(worker)
    for path in stored_files(store):
        with pytest.raises(NoMatchingIdentity):
            opens(path.read_bytes(), Computed(bytes(32)))


# --- stranger who knows a recipient


def test_a_stranger_makes_a_valid_file_for_a_recipient(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"of a stranger")
    encrypt(path, age.parse_recipient(str(IDENTITY.recipient)))
    assert opens(path.read_bytes(), IDENTITY) == b"of a stranger"


def test_a_strangers_file_is_not_read_as_a_chunk(worker, reader, store, tmp_path):
    archive_everything(worker)

    def forged(stored):
        path = tmp_path / "forged"
        path.write_bytes(bytes(age.plain_size(len(stored) - 1600)))
        encrypt(path, age.parse_recipient(str(IDENTITY.recipient)))
        return path.read_bytes().ljust(len(stored), b"\0")[: len(stored)]

    in_every_copy(store, forged)
    with pytest.raises(IntegrityError):
        read(reader, "secret-name-0")


# --- the table


def test_each_row_names_tests_of_both_its_cells():
    text = (ROOT / "docs" / "explanation" / "security.md").read_text(encoding="utf-8")
    section = text.split("## Who can do what")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    tests = "".join(path.read_text("utf-8") for path in Path(__file__).parent.rglob("test_*.py"))
    defined = set(re.findall(r"def (test_\w+)\(", tests))
    for row in rows:
        for tests in row.split("|")[4].split("not:"):
            named = set(re.findall(r"`(test_\w+)`", tests))
            assert named, row
            assert named <= defined, row
