"""Settings from the file and the environment."""

import json
import os
import re
import tempfile
import traceback
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from caf_pipeline.errors import SettingsError
from caf_pipeline.formats import age
from caf_pipeline.ledger.database import parse_url
from caf_pipeline.settings import Settings, SourceSettings, load_settings
from caf_pipeline_tests.support.dagster_private import is_valid_owner


def a_file(tmp_path, text):
    path = tmp_path / "caf.toml"
    path.write_text(text)
    return path


def test_a_source_has_defaults_that_keep_its_bytes_private(tmp_path):
    settings = load_settings(a_file(tmp_path, '[sources.one]\nbucket = "b"\n'))
    source = settings.source("one")
    assert (source.public, source.target_size, source.prefix) == (False, 30 << 30, "")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), (90, 90), ("90m", 5400), ("12h", 43_200), ("7d", 604_800), (0, 0)],
)
def test_a_time_is_seconds_or_a_number_with_a_unit(tmp_path, text, seconds):
    settings = load_settings(
        a_file(tmp_path, f'[sources.one]\nbucket = "b"\nmax_wait = {json.dumps(text)}\n')
    )
    assert settings.source("one").max_wait == seconds


def test_by_default_no_object_waits_for_a_larger_chunk():
    assert (SourceSettings(bucket="b").min_chunk_size, SourceSettings(bucket="b").max_wait) == (
        0,
        7 * 24 * 3600,
    )


def test_the_environment_wins_over_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("CAF_SOURCES__ONE__BUCKET", "other")
    monkeypatch.setenv("CAF_PACKING__MAX_REQUESTS", "3")
    settings = load_settings(a_file(tmp_path, '[sources.one]\nbucket = "b"\nprefix = "p/"\n'))
    assert (settings.source("one").bucket, settings.source("one").prefix) == ("other", "p/")
    assert settings.packing.max_requests == 3


def test_paths_are_relative_to_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    settings = load_settings(a_file(tmp_path, 'home = "h"\n[store]\nfolder = "s"\n'))
    assert (settings.home, settings.store.folder) == (tmp_path / "h", tmp_path / "s")
    assert settings.staging_folder == tmp_path / "h" / "staging"


SOURCE_TEXT = '[sources.one]\nbucket = "b"\n'


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("[sources.one]", "sources.one.bucket is missing"),
        ('[sources]\nbucket = "b"', "sources.bucket belongs below [sources.NAME]"),
        ('[source.one]\nbucket = "b"', "did you mean 'sources'?"),
        ("[packing]\ncopies = 3", "did you mean jackal.copies?"),
        ('[store]\nhome = "x"', "did you mean home, above the first [section]?"),
        ("packing = 3", "packing must be a table of settings"),
        ('_env_file = "x"', "_env_file is not a setting"),
        ('[sources.one]\nbuckt = "b"', "sources.one.buckt"),
        ('[sources.one]\nbucket = ""', "sources.one.bucket"),
        ('[sources.one]\nbucket = "b"\ntarget_size = "33GiB"', "sources.one.target_size"),
        ('[sources.One_1]\nbucket = "b"', "sources.One_1"),
        (f'[sources.{"a" * 31}]\nbucket = "b"', "a" * 31),
        (
            '[packing]\nwindow_size = "1MiB"\npart_size = "2MiB"',
            "packing: part_size, 2,097,152 bytes, is larger than window_size",
        ),
        ("[runs]\nattempts = 0", "runs.attempts"),
        ("surprise = 1", "surprise"),
        (
            "[packing]\nmax_requests = 0",
            "max_requests is 0, but must be greater than or equal to 1",
        ),
        ("[packing]\nmax_requests = true", "max_requests is true, but must be a whole number"),
        ("[packing]\nmax_requests = 3.5", "max_requests is 3.5, but must be a whole number"),
        ("[packing]\nwindow_size = inf", "window_size is inf, but must be a size such as"),
        (
            '[packing]\nwindow_size = "64 MoB"',
            "window_size is '64 MoB', but must be a size such as",
        ),
        *(
            (f"{SOURCE_TEXT}automatic = {value}", "but must be true or false")
            for value in ('"yes"', '"on"', '"1"', "1", '""')
        ),
        (f'{SOURCE_TEXT}include = ["["]', "must have '?' in place of '['"),
        (f'{SOURCE_TEXT}exclude = ["a", "[0-9]*"]', "must have '?' in place of '['"),
        ("[jackal]\ngas_price = nan", "gas_price is nan, but must be less than or equal to"),
        (
            "[jackal]\nwarn_days = 100000000000",
            "warn_days is 100000000000, but must be less than or equal to 3660",
        ),
        ("[jackal]\nproof_type = 1", "but must be a proof type, 0 or 3"),
        (
            '[sources.one]\nbucket = "b"\nmax_wait = "a week"',
            "must be a time such as 3600, 90m, 12h or 7d",
        ),
        (
            '[sources.one]\nbucket = "b"\nmax_wait = -1',
            "must be a time such as 3600, 90m, 12h or 7d",
        ),
        (
            '[sources.one]\nbucket = "b"\nmax_wait = true',
            "must be a time such as 3600, 90m, 12h or 7d",
        ),
        ('[sources.one]\nbucket = "b"\nmin_chunk_size = "31GiB"', "is larger than target_size"),
        ('[jackal]\nchain_id = "jackal 1"', "but must be a chain's id such as jackal-1"),
        ('[jackal]\nlcd = "http://node"', 'but must be a list such as ["one", "two"]'),
        (
            '[jackal]\nlcd = ["node:1317"]',
            "jackal.lcd has 'node:1317', which must begin with http:// or https://",
        ),
        ('[jackal]\nlcd = ["http://node:70000"]', "valid host and port"),
        ('[store]\nkind = "tape"', "store.kind is 'tape', but must be 'jackal' or 'directory'"),
        ('home = ""', "home is '', but must be a path"),
        ('home = "~no-such-user/x"', "must be a path"),
        ("home = 2020-01-01", "home is a date or a time, but must be a path"),
        (
            SOURCE_TEXT + 'endpoint_url = "localhost:9000"',
            "but must begin with http:// or https://",
        ),
        (SOURCE_TEXT + 'endpoint_url = "http://my_host:9000"', "without '_'"),
        (SOURCE_TEXT + 'endpoint_url = "https://"', "valid host and port"),
        (SOURCE_TEXT + 'endpoint_url = "https://h/?x=1"', "without '?'"),
        (
            SOURCE_TEXT + 'inventory = "dest/p/b/daily/"',
            "must be the folder of S3 Inventory's reports: s3://DEST-BUCKET/PREFIX/",
        ),
        (
            SOURCE_TEXT + 'inventory = "s3://dest/daily/"',
            "must be the folder of S3 Inventory's reports",
        ),
        (
            SOURCE_TEXT + 'inventory = "s3://dest/p/other/daily/"',
            "must end in SOURCE-BUCKET/CONFIG-ID/",
        ),
        (
            '[sources.one]\nbucket = "arn:aws:s3:eu-west-1:1:accesspoint/ap"\ninventory = '
            '"s3://dest/p/b/daily/"',
            "access point",
        ),
        (SOURCE_TEXT + 'region = "eu west"', "must be a region's name such as eu-central-1"),
        (
            SOURCE_TEXT + 'owner = "data"',
            "sources.one.owner is 'data', but must be team:NAME or an e-mail address",
        ),
        (
            "".join(
                f'[sources.{name}]\nbucket = "b"\nqueue = "https://sqs.example/1/q"\n'
                for name in ("one", "two")
            ),
            "sources.one and sources.two share a queue",
        ),
        (
            "".join(f'[sources.{name}]\nbucket = "b"\n' for name in ("one", "chunk-one")),
            "caf_repair_chunk_one",
        ),
        (
            SOURCE_TEXT
            + f"exclude = {json.dumps([f'tenant-{number:05d}/*' for number in range(24_000)])}",
            "24,000 patterns have 624,000 bytes",
        ),
        (
            SOURCE_TEXT + 'include = ["a/*", ""]',
            "sources.one.include has '', which must have 1 to 1,024 characters",
        ),
        (SOURCE_TEXT + "exclude = [5]", "sources.one.exclude has 5, which must be text"),
        (
            SOURCE_TEXT + 'storage_classes = ["standard"]',
            "storage_classes has 'standard', which must be a storage class",
        ),
        ('[sources.one]\nbucket = "s3://b/x"', "must be a bucket's name"),
        ('[sources.one]\nbucket = "b c"', "must be a bucket's name: 1 to 255"),
        ("[sources.one]\nbucket = 5", "sources.one.bucket is 5, but must be text"),
    ],
)
def test_message_describes_the_valid_value(tmp_path, text, fragment):
    with pytest.raises(SettingsError) as caught:
        load_settings(a_file(tmp_path, text))
    assert fragment in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/caf.toml: ")


def any_value():
    return st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=20),
        st.lists(st.text(max_size=3), max_size=2),
    )


@given(
    st.sampled_from(list(Settings.model_fields) + list(SourceSettings.model_fields)), any_value()
)
@example("lcd", ["http://node"])
def test_messages_do_not_quote_pydantic(name, value):
    sections = ["JACKAL", "PACKING", "RUNS", "STORE", "SOURCES__ONE"]
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        for section in sections:
            text = value if isinstance(value, str) else json.dumps(value)
            patch.setenv(
                f"CAF_{section}__{name.upper()}",
                text.replace("\0", "").encode("utf-8", "replace").decode(),
            )
        message = ""
        try:
            load_settings(a_file(Path(folder), SOURCE_TEXT))
        except SettingsError as error:
            message = str(error)
    assert not [
        word
        for word in ("pydantic", "Input should", "valid ", "Value error", "validation")
        if word in message
    ]


@pytest.mark.parametrize(
    "owner",
    [
        "team:x",
        "team:",
        "team:a b",
        "a@b.co",
        "a@b",
        "x",
        "%a@b.co",
        "a@b.c|",
        "a@b.company",
        "a@b.companyy",
        "team",
        "",
    ],
)
def test_owners_are_valid_if_dagster_accepts_them(owner):
    try:
        SourceSettings(bucket="b", owner=owner)
    except ValueError:
        assert not is_valid_owner(owner)
    else:
        assert is_valid_owner(owner)


@pytest.mark.parametrize(
    ("variables", "fragment"),
    [
        (
            {"CAF_PACKING__MAX_REQUESTS": "x"},
            "CAF_PACKING__MAX_REQUESTS: packing.max_requests is 'x', but must be",
        ),
        (
            {"caf_packing__max_requests": "0"},
            "CAF_PACKING__MAX_REQUESTS: packing.max_requests is '0'",
        ),
        ({"CAF_PACKING": '{"max_requests": 0}'}, "CAF_PACKING: packing.max_requests is 0"),
        ({"CAF_PACKING": "x"}, "CAF_PACKING: packing must be a table, as JSON"),
        (
            {"CAF_PACKING__MAX_REQUEST": "1"},
            "CAF_PACKING__MAX_REQUEST: packing.max_request is not a setting: did you mean",
        ),
        (
            {"CAF_SOURCES__ONE__INCLUDE": "x/*"},
            "CAF_SOURCES__ONE__INCLUDE: sources.one.include must be a list such as",
        ),
        ({"CAF_JACKAL__LCD": "http://node"}, "CAF_JACKAL__LCD: jackal.lcd must be a list such as"),
        (
            {"CAF_JACKAL__REQUIRED_COPIES": "4"},
            "CAF_JACKAL__REQUIRED_COPIES: jackal: required_copies, 4, is larger than copies, 3",
        ),
        (
            {"CAF_SOURCES__TWO__PREFIX": "p/"},
            "CAF_SOURCES__TWO__PREFIX: sources.two.bucket is missing",
        ),
        (
            {"CAF_SOURCES__MY_SOURCE__BUCKET": "b"},
            "CAF_SOURCES__MY_SOURCE__BUCKET: sources.my_source: must be a source's name",
        ),
        (
            {"CAF_SOURCES__ONE__OWNER": "me"},
            "CAF_SOURCES__ONE__OWNER: sources.one.owner is 'me', but must be team:NAME",
        ),
        ({"CAF_HOME": ""}, "CAF_HOME: home is '', but must be a path"),
        (
            {"CAF_JACKAL_SPEND_CAP": "1"},
            "CAF_JACKAL_SPEND_CAP, which is not a setting: did you mean CAF_JACKAL__SPEND_CAP?",
        ),
        (
            {"CAF_SOURCES_ONE_PREFIX": "p"},
            "CAF_SOURCES_ONE_PREFIX, which is not a setting: did you mean "
            "CAF_SOURCES__ONE__PREFIX?",
        ),
        (
            {"CAF_DATABASE_URI": "p"},
            "CAF_DATABASE_URI, which is not a setting: did you mean CAF_DATABASE_URL?",
        ),
    ],
)
def test_message_names_the_variable_with_the_bad_value(tmp_path, monkeypatch, variables, fragment):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        load_settings(a_file(tmp_path, SOURCE_TEXT))
    assert fragment in str(caught.value)
    assert "caf.toml" not in str(caught.value)


def test_variables_of_other_programs_are_left_alone(tmp_path, monkeypatch):
    for name in (
        "CAF_PORT_80_TCP",
        "CAF_SERVICE_HOST",
        "CAF_STORE_PORT",
        "CAF_DAGSTER_DATABASE_URL",
        "CAF_TRACEBACK",
    ):
        monkeypatch.setenv(name, "x")
    assert load_settings(a_file(tmp_path, SOURCE_TEXT)).source("one").bucket == "b"


@pytest.mark.parametrize(
    ("text", "variables"),
    [
        (SOURCE_TEXT, {"CAF_DATABASE_URL": "mysql://u:hush@h/d"}),
        (SOURCE_TEXT, {"CAF_DATABASE_URL": "postgresql://u:hush@h:port/d"}),
        (SOURCE_TEXT, {"CAF_DATABASE_URL": "postgresql://u:hush@h:1,other:port/d"}),
        (SOURCE_TEXT, {"CAF_DATABASE_URL": "postgresql://u:in@hush@h:1/d"}),
        (SOURCE_TEXT, {"CAF_DATABASE_URL": "postgresql://u:hush@w@h/d"}),
        (SOURCE_TEXT, {"CAF_DATABASE_URL": "postgresql://u:/hush@h/d"}),
        (SOURCE_TEXT, {"CAF_DATABASE_URL": "postgresql://u:12345/hush@h/d"}),
        (SOURCE_TEXT, {"CAF_DATABASE_URL": "postgresql://u:a@b#hush@127.0.0.1/x"}),
        (SOURCE_TEXT, {"CAF_DATABASE_URL": "postgresql://u:p@ss#wo/rd9hush@127.0.0.1/x"}),
        (SOURCE_TEXT, {"CAF_DATABASE_URL": "postgresql://u:p@ss?hush@127.0.0.1/x"}),
        (SOURCE_TEXT, {"CAF_DATABASE_URL": "postgresql://u:1?hush@127.0.0.1/x"}),
        (SOURCE_TEXT, {"CAF_DATABASE_URL": "postgresql://u:a hush@127.0.0.1/x"}),
        (SOURCE_TEXT, {"CAF_DATABASE_URL": "postgresql://u:hush@h h/d"}),
        (SOURCE_TEXT, {"CAF_DATABASE_URL": "postgresql://u:a\nhush@127.0.0.1/x"}),
        (SOURCE_TEXT, {"CAF_DATABASE_URL": "postgresql://u:%zhush@127.0.0.1/x"}),
        (SOURCE_TEXT, {"CAF_DATABASE_URL": "postgresql://h/x?password=a@hush"}),
        (SOURCE_TEXT, {"CAF_DATABASE_URL": "host=h password=hush"}),
        (SOURCE_TEXT, {"CAF_DATABASE_URL": "sqlite:///hush"}),
        (SOURCE_TEXT, {"CAF_SOURCES__ONE__ACCESS_KEY_ID": "hush"}),
        (
            SOURCE_TEXT,
            {
                "CAF_SOURCES__ONE__ACCESS_KEY_ID": "a",
                "CAF_SOURCES__ONE__SECRET_ACCESS_KEY": "hush\n",
            },
        ),
        (SOURCE_TEXT, {"CAF_SOURCES__ONE": "hush"}),
        (SOURCE_TEXT, {"CAF_SOURCES": '{"one": {"secret_access_key": "hush"'}),
        (SOURCE_TEXT, {"CAF_JACKAL_MNEMONIC": "hush"}),
        (SOURCE_TEXT + 'secret_acess_key = "hush"', {}),
        (SOURCE_TEXT + 'endpoint_url = "https://user:hush@host"', {}),
        ('[jackal]\nlcd = ["https://user:hush@host"]', {}),
        (f'[jackal]\nmnemonic_file = "{"hush " * 12}"', {}),
        ('sources.one = "hush"', {}),
        ('sources.one.secret_access_key = "hush', {}),
    ],
)
def test_no_error_shows_a_secret(tmp_path, monkeypatch, text, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        load_settings(a_file(tmp_path, text))
    assert "hush" not in "".join(traceback.format_exception(caught.value)) + caught.value.hint


@pytest.mark.parametrize(
    "hosts", ["h", "h:1", "h:1,other:2", "h,other", "[::1]:5", "[::1]:5,h", ""]
)
def test_a_database_may_have_several_hosts(tmp_path, monkeypatch, hosts):
    monkeypatch.setenv("CAF_DATABASE_URL", url := f"postgresql://u:secret@{hosts}/d")
    assert load_settings(a_file(tmp_path, SOURCE_TEXT)).database_url.get_secret_value() == url


@pytest.mark.parametrize(
    "url",
    [
        "postgresql:///d",
        "postgresql://user@/d",
        "postgresql://%2Fvar%2Frun/d",
        "postgresql://host/d",
        "postgresql://:secret@host/d",
        "postgresql://user:p:w%40%2F%23@h1:1,[::1]:2/d?sslmode=require&host=/run/postgres",
        "postgresql://user@:5432",
    ],
)
def test_user_password_and_host_may_each_be_missing(tmp_path, monkeypatch, url):
    monkeypatch.setenv("CAF_DATABASE_URL", url)
    assert load_settings(a_file(tmp_path, SOURCE_TEXT)).database_url.get_secret_value() == url
    assert parse_url(url) == url


def test_empty_key_counts_as_unset(tmp_path, monkeypatch):
    monkeypatch.setenv("CAF_SOURCES__ONE__ACCESS_KEY_ID", "")
    assert load_settings(a_file(tmp_path, SOURCE_TEXT)).source("one").access_key_id is None


@pytest.mark.parametrize(
    ("text", "variable"),
    [
        ('database_url = "postgresql://u:hush@h/d"', "CAF_DATABASE_URL"),
        (
            '[sources.one]\nbucket = "b"\nsecret_access_key = "hush"',
            "CAF_SOURCES__ONE__SECRET_ACCESS_KEY",
        ),
    ],
)
def test_a_secret_in_the_file_is_refused_without_being_shown(tmp_path, text, variable):
    with pytest.raises(SettingsError) as caught:
        load_settings(a_file(tmp_path, text))
    assert variable in caught.value.hint
    assert "hush" not in str(caught.value) + caught.value.hint


def test_secrets_are_never_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("CAF_DATABASE_URL", "postgresql://u:hush@h/d")
    monkeypatch.setenv("CAF_SOURCES__ONE__ACCESS_KEY_ID", "hush")
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


def test_missing_file_names_the_searched_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CAF_CONFIG", raising=False)
    monkeypatch.setenv("CAF_DATABASE_URL", "postgresql://h/d")
    with pytest.raises(SettingsError, match=rf"caf\.toml .*{re.escape(str(tmp_path))}.*CAF_CONFIG"):
        load_settings()


def test_a_source_of_the_environment_needs_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAF_SOURCES__ONE__BUCKET", "b")
    settings = load_settings()
    assert settings.home == tmp_path / ".caf"
    with pytest.raises(SettingsError, match=r"'two' in the environment.*: one"):
        settings.source("two")


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (b"[sources", "is not valid TOML at its end: "),
        (b"home = 'x'\n\nstaging = y\n", "is not valid TOML at line 3, column 11: invalid value"),
        (b"home = 'x'\n# \xff\n", "is not UTF-8 text, see line 2"),
        ("home = 'x'".encode("utf-16"), "is not UTF-8 text"),
    ],
)
def test_unreadable_file_is_refused_with_the_line(tmp_path, content, fragment):
    (tmp_path / "caf.toml").write_bytes(content)
    with pytest.raises(SettingsError) as caught:
        load_settings(tmp_path / "caf.toml")
    assert fragment in str(caught.value)


def test_byte_order_mark_is_skipped(tmp_path):
    (tmp_path / "caf.toml").write_bytes(b"\xef\xbb\xbf" + SOURCE_TEXT.encode())
    assert load_settings(tmp_path / "caf.toml").source("one").bucket == "b"


def test_folder_instead_of_the_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "caf.toml").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=r"caf\.toml is a folder"):
        load_settings()


def test_dangling_link_does_not_count_as_missing_file(tmp_path, monkeypatch):
    (tmp_path / "caf.toml").symlink_to("/nowhere.toml")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=r"caf\.toml cannot be read"):
        load_settings()


def test_a_path_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert load_settings(a_file(tmp_path, 'home = "~/kept"')).home == Path("/home/somebody/kept")


def test_unknown_source_names_the_existing_sources_and_the_file(tmp_path):
    settings = load_settings(a_file(tmp_path, '[sources.photos]\nbucket = "b"'))
    with pytest.raises(SettingsError, match=r"'photo' in .*/caf\.toml; .*: photos") as caught:
        settings.source("photo")
    assert caught.value.hint == "did you mean 'photos'?"


HYBRID, CLASSIC = age.new_identity(), age.new_identity(hybrid=False)
ENCRYPTION = "[encryption]\n"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (f'{ENCRYPTION}recipients = ["age1"]', "encryption.recipients"),
        (f'{ENCRYPTION}recipients = ["{CLASSIC.reveal()}"]', "encryption.recipients"),
        (f'{ENCRYPTION}recipients = ["{HYBRID.reveal().lower()}"]', "encryption.recipients"),
        (f'{ENCRYPTION}recipients = "{HYBRID.reveal()}"', "encryption.recipients"),
        (
            f'{ENCRYPTION}recipients = ["{HYBRID.recipient}", "{CLASSIC.recipient}"]',
            "encryption.recipients",
        ),
        (f'{SOURCE_TEXT}recipients = ["{HYBRID.reveal()}"]', "sources.one.recipients"),
        (
            f'{SOURCE_TEXT}public = true\nrecipients = ["{HYBRID.recipient}"]',
            "public and recipients",
        ),
        (f'{ENCRYPTION}identity_file = "{HYBRID.reveal()}"', "encryption.identity_file"),
        (f'{ENCRYPTION}identity = "{HYBRID.reveal()}"', "encryption.identity"),
        (f"{ENCRYPTION}identity_command = 'pass \"show'", "encryption.identity_command"),
        (
            f'{ENCRYPTION}identity_command = "pass"\nidentity_file = "x"',
            "identity_file and identity_command",
        ),
        (f'worker_key = "{"5e" * 32}"', "worker_key"),
    ],
)
def test_wrong_key_is_refused_without_being_shown(tmp_path, text, name):
    with pytest.raises(SettingsError, match=re.escape(name)) as refused:
        load_settings(a_file(tmp_path, text))
    shown = f"{refused.value} {refused.value.hint}".upper()
    assert "5E5E" not in shown
    assert not any(
        identity.reveal()[:20] in shown or identity.reveal()[20:30] in shown
        for identity in (HYBRID, CLASSIC)
    )


@pytest.mark.parametrize("key", ["5e" * 31, "5e" * 33, "hush" * 16])
def test_wrong_worker_key_is_refused_without_being_shown(tmp_path, monkeypatch, key):
    monkeypatch.setenv("CAF_WORKER_KEY", key)
    with pytest.raises(SettingsError, match="CAF_WORKER_KEY") as refused:
        load_settings(a_file(tmp_path, ""))
    assert key not in str(refused.value)


def test_keys_of_the_environment_are_hidden(tmp_path, monkeypatch):
    monkeypatch.setenv("CAF_WORKER_KEY", "5e" * 32)
    monkeypatch.setenv("CAF_ENCRYPTION__IDENTITY", HYBRID.reveal())
    settings = load_settings(a_file(tmp_path, ""))
    assert settings.worker_key.get_secret_value() == "5e" * 32
    assert settings.encryption.identity.get_secret_value() == HYBRID.reveal()
    assert "5e5e" not in repr(settings)
    assert "SECRET" not in repr(settings)


def test_identity_file_is_relative_to_the_settings(tmp_path):
    settings = load_settings(a_file(tmp_path, f'{ENCRYPTION}identity_file = "key"'))
    assert settings.encryption.identity_file == tmp_path / "key"


def test_a_source_may_be_called_identity(tmp_path):
    settings = load_settings(a_file(tmp_path, '[sources.identity]\nbucket = "b"'))
    assert settings.source("identity").bucket == "b"


def test_the_documentation_lists_every_setting():
    text = (Path(__file__).parents[1] / "docs" / "reference" / "settings.md").read_text(
        encoding="utf-8"
    )
    for name, field in Settings.model_fields.items():
        section = getattr(field.annotation, "model_fields", None)
        for listed in [f"{name}.{inner}" for inner in section] if section else [name]:
            assert f"`{listed}`" in text or listed == "sources", listed
    for name in SourceSettings.model_fields:
        assert f"`{name}`" in text, name


def test_a_proof_type_may_come_from_the_environment(monkeypatch, tmp_path):
    file = a_file(tmp_path, "")
    monkeypatch.setenv("CAF_JACKAL__PROOF_TYPE", "0")
    assert load_settings(file).jackal.proof_type == 0
    monkeypatch.setenv("CAF_JACKAL__PROOF_TYPE", "1")
    with pytest.raises(SettingsError, match="a proof type, 0 or 3"):
        load_settings(file)


@pytest.fixture
def subfolder(tmp_path, monkeypatch):
    """The working directory, two folders below the test's."""
    folder = tmp_path / "src" / "package"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("CAF_CONFIG", raising=False)
    return folder


def test_file_of_a_folder_above_is_read(tmp_path, subfolder):
    a_file(tmp_path, f'home = "h"\n{SOURCE_TEXT}')
    settings = load_settings()
    assert settings.source("one").bucket == "b"
    assert (settings.home, settings.folder) == (tmp_path / "h", tmp_path)


def test_nearest_file_is_read(tmp_path, subfolder):
    a_file(tmp_path, "[")
    a_file(subfolder, SOURCE_TEXT)
    assert load_settings().folder == subfolder


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_file_above_that_another_user_owns_is_refused(tmp_path, subfolder, monkeypatch):
    file = a_file(tmp_path, SOURCE_TEXT)
    os.chown(file, 12_345, -1)
    with pytest.raises(SettingsError, match="another user"):
        load_settings()
    monkeypatch.chdir(tmp_path)
    assert load_settings().source("one").bucket == "b"
