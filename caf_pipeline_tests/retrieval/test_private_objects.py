"""Programs read private objects with the identity of the settings."""

import os

import fsspec
import pytest

from caf_pipeline.defs.object_reader import ObjectReader
from caf_pipeline.errors import IdentityMissing
from caf_pipeline.retrieval.archive import Archive
from caf_pipeline.settings import load_settings
from caf_pipeline.store.directory import DirectoryStore
from caf_pipeline.wiring import open_archive
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.private_source import (
    IDENTITY,
    WITH_IDENTITY,
    private_command_line,
)
from caf_pipeline_tests.support.run_contexts import a_run_context, archive_everything

BODIES = {f"key-{number:02}": os.urandom(64 << 10) for number in range(9)}


@pytest.fixture(scope="module")
def caf(tmp_path_factory, databases):
    return private_command_line(tmp_path_factory.mktemp("private"), databases.take().url, BODIES)


@pytest.fixture
def reader(caf):
    """The settings file of a process with the identity."""
    with caf.surroundings(**WITH_IDENTITY):
        yield caf.folder / "caf.toml"


def test_fsspec_reads_private_objects(reader):
    fs = fsspec.filesystem("caf", config=str(reader), skip_instance_cache=True)
    assert fs.cat_file("src/key-03") == BODIES["key-03"]
    assert fs.cat_file("src/key-03", 1000, 2000) == BODIES["key-03"][1000:2000]


def test_an_archive_reads_private_objects(reader):
    with open_archive(load_settings(reader)) as archive:
        assert archive.read("src", "key-04") == BODIES["key-04"]
        assert {read.key: read.body for read in archive.read_many("src", BODIES)} == BODIES


def test_the_object_reader_reads_private_objects(reader):
    archived = ObjectReader(settings_file=str(reader))
    with archived.archive:
        assert archived.read("src", "key-05") == BODIES["key-05"]


def test_programs_without_an_identity_read_nothing(caf):
    with caf.surroundings(), open_archive(load_settings()) as archive:
        assert archive.find("src", "key-06").location.size_bytes == 64 << 10
        with pytest.raises(IdentityMissing):
            archive.read("src", "key-06")
        with pytest.raises(IdentityMissing) as missing:
            fsspec.filesystem("caf", skip_instance_cache=True).cat("src/key-06")
        assert isinstance(missing.value, OSError)


class CountedReads(DirectoryStore):
    """A store that records the ranges that it reads."""

    def __init__(self, folder):
        super().__init__(folder)
        self.asked = []

    def read(self, posting, start_byte, end_byte, *, provider=None):
        self.asked.append((start_byte, end_byte))
        return super().read(posting, start_byte, end_byte, provider=provider)


@pytest.fixture
def private(tmp_path, ledger):
    encryption = {"recipients": [str(IDENTITY.recipient)], "identity": IDENTITY.reveal()}
    context = a_run_context(
        tmp_path,
        MemorySource(dict(BODIES)),
        ledger,
        public=False,
        encryption=encryption,
        store=CountedReads(tmp_path / "store"),
    )
    archive_everything(context)
    context.store.asked.clear()
    return context


def test_a_read_is_one_range_request_of_whole_segments(private):
    archive = Archive(private.ledger.lookup, private.opened)
    assert archive.read("src", "key-07") == BODIES["key-07"]
    ((start_byte, end_byte),) = private.store.asked
    assert end_byte - start_byte <= 2 * (64 * 1024 + 16)
