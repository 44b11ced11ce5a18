"""Settings from the file and the environment."""

import pytest

from caf_pipeline.errors import SettingsError
from caf_pipeline.settings import load_settings


def a_file(tmp_path, text):
    path = tmp_path / "caf.toml"
    path.write_text(text)
    return path


def test_a_source_has_defaults_that_keep_its_bytes_private(tmp_path):
    settings = load_settings(a_file(tmp_path, '[sources.one]\nbucket = "b"\n'))
    source = settings.source("one")
    assert (source.public, source.target_size, source.prefix) == (False, 30 << 30, "")


def test_the_environment_wins_over_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("CAF_SOURCES__ONE__BUCKET", "other")
    monkeypatch.setenv("CAF_PACKING__FETCH_THREADS", "3")
    settings = load_settings(a_file(tmp_path, '[sources.one]\nbucket = "b"\nprefix = "p/"\n'))
    assert (settings.source("one").bucket, settings.source("one").prefix) == ("other", "p/")
    assert settings.packing.fetch_threads == 3


def test_paths_are_relative_to_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    settings = load_settings(a_file(tmp_path, 'home = "h"\n[store]\nfolder = "s"\n'))
    assert (settings.home, settings.store.folder) == (tmp_path / "h", tmp_path / "s")
    assert settings.staging_folder == tmp_path / "h" / "staging"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[sources.one]\nbuckt = "b"', "sources.one.buckt"),
        ('[sources.one]\nbucket = ""', "sources.one.bucket"),
        ('[sources.one]\nbucket = "b"\ntarget_size = "33GiB"', "sources.one.target_size"),
        ('[sources.one]\nbucket = "b"\ntarget_size = "x"', "sources.one.target_size"),
        ('[sources.one]\nbucket = "b"\npublic = "perhaps"', "sources.one.public"),
        ('[sources.One_1]\nbucket = "b"', "sources.One_1"),
        (f'[sources.{"a" * 31}]\nbucket = "b"', "a" * 31),
        ("[packing]\nfetch_threads = 0", "packing.fetch_threads"),
        ('[packing]\nwindow_size = "1MiB"\npart_size = "2MiB"', "packing"),
        ('[store]\nkind = "tape"', "store.kind"),
        ("[runs]\nattempts = 0", "runs.attempts"),
        ("surprise = 1", "surprise"),
    ],
)
def test_a_bad_setting_is_named(tmp_path, text, named):
    with pytest.raises(SettingsError) as caught:
        load_settings(a_file(tmp_path, text))
    assert named in str(caught.value)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "variable"),
    [
        ('database_url = "postgresql://u:hush@h/d"', "CAF_DATABASE_URL"),
        ('[sources.one]\nbucket = "b"\nsecret_access_key = "hush"', "CAF_SOURCES__ONE__SECRET_ACCESS_KEY"),
    ],
)
def test_a_secret_in_the_file_is_refused_without_being_shown(tmp_path, text, variable):
    with pytest.raises(SettingsError) as caught:
        load_settings(a_file(tmp_path, text))
    assert variable in caught.value.hint
    assert "hush" not in str(caught.value) + caught.value.hint


def test_secrets_are_never_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("CAF_DATABASE_URL", "postgresql://u:hush@h/d")
    monkeypatch.setenv("CAF_SOURCES__ONE__SECRET_ACCESS_KEY", "hush")
    settings = load_settings(a_file(tmp_path, '[sources.one]\nbucket = "b"'))
    assert "hush" not in repr(settings) + str(settings) + settings.model_dump_json()


def test_a_bad_secret_is_not_shown_in_the_error(tmp_path, monkeypatch):
    monkeypatch.setenv("CAF_SOURCES__ONE__SECRET_ACCESS_KEY", "hush")
    with pytest.raises(SettingsError) as caught:
        load_settings(a_file(tmp_path, '[sources.one]\nbucket = ""'))
    assert "hush" not in str(caught.value)


def test_a_missing_file_that_was_named_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("CAF_CONFIG", str(tmp_path / "nowhere.toml"))
    with pytest.raises(SettingsError, match=r"nowhere\.toml cannot be read"):
        load_settings()


def test_without_a_file_there_are_defaults(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CAF_CONFIG", raising=False)
    assert load_settings().sources == {}


def test_broken_toml_is_one_sentence(tmp_path):
    with pytest.raises(SettingsError, match="is not valid TOML"):
        load_settings(a_file(tmp_path, "[sources"))


def test_an_unknown_source_names_the_known_ones(tmp_path):
    settings = load_settings(a_file(tmp_path, '[sources.one]\nbucket = "b"'))
    with pytest.raises(SettingsError, match=r"no source 'two' \(known: one\)"):
        settings.source("two")


def test_the_documentation_lists_every_setting():
    from pathlib import Path

    from caf_pipeline.settings import Settings, SourceSettings

    text = (Path(__file__).parents[1] / "docs" / "settings.md").read_text(encoding="utf-8")
    for name, field in Settings.model_fields.items():
        section = getattr(field.annotation, "model_fields", None)
        for listed in [f"{name}.{inner}" for inner in section] if section else [name]:
            assert f"`{listed}`" in text or listed == "sources", listed
    for name in SourceSettings.model_fields:
        assert f"`{name}`" in text, name


def test_a_proof_type_may_come_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAF_JACKAL__PROOF_TYPE", "0")
    assert load_settings().jackal.proof_type == 0
    monkeypatch.setenv("CAF_JACKAL__PROOF_TYPE", "1")
    with pytest.raises(SettingsError, match="a proof type is 0 or 3"):
        load_settings()


def test_more_required_copies_than_copies_are_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAF_JACKAL__REQUIRED_COPIES", "4")
    with pytest.raises(SettingsError, match="larger than copies"):
        load_settings()
