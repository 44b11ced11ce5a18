"""The archive opened from settings, on a network: what providers are asked for, and those that are slow."""

import os

import pytest

from caf_pipeline.ledger.database import parse_url
from caf_pipeline.store.jackal import provider
from caf_pipeline.wiring import open_archive
from caf_pipeline_tests.support.command_line import archive_source, source_text
from caf_pipeline_tests.support.jackal_command_line import jackal_command_line, wallet_with_space
from caf_pipeline_tests.support.postgres import copy_template
from caf_pipeline_tests.support.s3_server import make_bucket

BODIES = {f"dir/{number:02}": os.urandom(50_000 + number) for number in range(15)} | {"dir/empty": b"", "a b#ü%41": b"odd"}


@pytest.fixture(scope="module")
def caf(tmp_path_factory, network, s3_server, postgres_url, template_database):
    copy_template(postgres_url, template_database, "read_on_a_network")
    url = parse_url(postgres_url).set(drivername="postgresql", database="read_on_a_network")
    words = wallet_with_space(network).words
    folder = tmp_path_factory.mktemp("read")
    caf = jackal_command_line(folder, network, words, CAF_DATABASE_URL=url.render_as_string(hide_password=False))
    bucket = make_bucket(s3_server)
    for key, body in BODIES.items():
        bucket.put(key, body)
    caf.settings(source_text(s3_server, bucket.name) + "public = true\n")
    archive_source(caf)
    return caf


@pytest.fixture
def archive(caf):
    with caf.surroundings(), open_archive() as archive:
        yield archive


def downloads(network):
    return sum(one["downloads"] for one in network.state()["providers"])


def test_an_object_is_exactly_one_request_and_many_are_fewer(archive, network):
    before = downloads(network)
    assert archive.read("src", "dir/03") == BODIES["dir/03"]
    assert downloads(network) == before + 1
    with archive.open("src", "dir/04") as file:
        file.seek(-10, os.SEEK_END)
        assert file.read() == BODIES["dir/04"][-10:]
    assert downloads(network) == before + 2
    assert {one.key: one.body for one in archive.read_many("src", BODIES)} == BODIES
    assert downloads(network) == before + 3


def test_providers_that_trickle_are_left_for_one_that_does_not(archive, network, monkeypatch):
    monkeypatch.setattr(provider, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(provider, "MAX_RESUMED", 1)
    posting = archive.find("src", "dir/05").location.posting
    *slow, _ = archive.store.holders(posting)
    for one in slow:
        network.misbehave(provider=network.provider_addresses.index(one), download_rate=1000)
    assert archive.read("src", "dir/05") == BODIES["dir/05"]
    assert {one.key: one.body for one in archive.read_many("src", BODIES)} == BODIES
