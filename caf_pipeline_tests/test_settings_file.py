"""Sources are added to caf.toml, and what is there stays."""

import pytest

from caf_pipeline.errors import SettingsError
from caf_pipeline.settings import load_settings
from caf_pipeline.settings_file import add_source, source_name


@pytest.fixture
def file(tmp_path):
    return tmp_path / "caf.toml"


def test_a_new_file_can_be_loaded(file):
    assert add_source(file, "photos", "my-photos")
    settings = load_settings(file)
    assert settings.source("photos").bucket == "my-photos"
    assert (settings.store.kind, settings.recipients_of("photos")) == ("jackal", ())


def test_a_store_folder_is_relative_to_the_file(file):
    add_source(file, "photos", "my-photos", store_folder="kept")
    store = load_settings(file).store
    assert (store.kind, store.folder) == ("directory", file.parent / "kept")


@pytest.mark.parametrize("before", ["", "# mine\r\nhome = 'h'\r\n", "[sources.a]\nbucket = 'a'"])
def test_a_source_is_added_after_the_existing_text(file, before):
    file.write_bytes(before.encode())
    assert add_source(file, "photos", "my-photos")
    assert file.read_bytes().decode().startswith(before.rstrip())
    assert load_settings(file).source("photos").bucket == "my-photos"


def test_an_existing_source_changes_nothing(file):
    add_source(file, "photos", "my-photos")
    before = file.read_bytes()
    assert not add_source(file, "photos", "my-photos")
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "text",
    ["[sources.photos]\nbucket = 'others'", "sources = {a = {bucket = 'b'}}", "[sources", "\xff"],
)
def test_a_file_that_takes_no_source_stays(file, text):
    file.write_text(text, encoding="latin-1")
    with pytest.raises(SettingsError):
        add_source(file, "photos", "my-photos")
    assert file.read_text(encoding="latin-1") == text


def test_another_store_than_the_files_is_refused(file):
    add_source(file, "photos", "my-photos")
    with pytest.raises(SettingsError):
        add_source(file, "videos", "my-videos", store_folder="kept")


def test_a_linked_file_stays_a_link(file):
    (file.parent / "real.toml").touch()
    file.symlink_to("real.toml")
    add_source(file, "photos", "my-photos")
    assert file.is_symlink()
    assert load_settings(file).source("photos").bucket == "my-photos"


@pytest.mark.parametrize(
    ("bucket", "name"),
    [
        ("my-photos", "my-photos"),
        ("My_Photos.2024", "my-photos-2024"),
        ("arn:aws:s3:eu-west-1:123456789012:accesspoint/team", "team"),
        ("x" * 60, "x" * 30),
        ("...", "bucket"),
    ],
)
def test_a_source_is_named_after_its_bucket(bucket, name):
    assert source_name(bucket) == name
