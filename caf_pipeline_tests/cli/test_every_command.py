"""Commands fail alike if things are missing, servers are away, or arguments are wrong."""

import json
import shlex
from dataclasses import dataclass, field

import pytest

from caf_pipeline.errors import (
    CafError,
    ChainUnreachable,
    LedgerUnreachable,
    NotLocated,
    SettingsError,
    SourceUnreachable,
    UsageError,
)
from caf_pipeline_tests.support.command_line import (
    KEYS,
    CommandLine,
    archive_source,
    expect_error,
    source_text,
)
from caf_pipeline_tests.support.jackal_network import WORDS
from caf_pipeline_tests.support.memory_source import MemorySource

NOWHERE = "127.0.0.1:9"
SETTINGS = f"""
[packing]
request_attempts = 1
{source_text(f"http://{NOWHERE}", "b")}
[sources.empty]
bucket = "e"
[sources.new]
bucket = "n"
"""
ON_JACKAL = {
    "CAF_STORE__KIND": "jackal",
    "CAF_JACKAL__LCD": json.dumps([f"http://{NOWHERE}"]),
    "CAF_JACKAL__ALLOW_PRIVATE_ADDRESSES": "true",
    "JACKAL_MNEMONIC": WORDS,
}


@dataclass(frozen=True)
class Situation:
    """In this environment each command fails with this error, which has these words."""

    error: type[CafError]
    words: tuple[str, ...]
    commands: str
    environment: dict[str, str] = field(default_factory=dict)

    def check(self, caf, command):
        before = sorted(caf.folder.iterdir())
        done = caf(*shlex.split(command), **self.environment)
        expect_error(done, self.error.exit_code, *self.words)
        assert not done.out
        assert set(caf.folder.iterdir()) - {caf.folder / ".caf"} <= set(before)


UNKNOWN_SOURCE = Situation(
    SettingsError,
    ("no source 'scr'", "/caf.toml", "'src'?"),
    """
    run scr
    run --source scr
    plan scr --dry-run
    plans scr
    get scr key
    status scr
    status scr --watch
    runs scr
    backfill scr
    ls scr
    find scr
    du scr
    check scr
    restore scr folder
    export-references scr -o out.json
    safe-to-delete scr
    doctor scr
    rebuild scr
    queue scr
    remove scr --yes
    jackal files scr
    prove scr
    repair scr
    jackal price scr
    """,
)
WITHOUT_SETTINGS = """
    run --all
    status
    doctor
    rebuild
    unpark c
    withdraw c
    jackal wallet
    jackal price 1TB
    jackal buy --bytes 1TB --days 30 --yes
    jackal files
    pause
    resume
    limit
    keys new
"""
SITUATIONS = {
    "unknown source": UNKNOWN_SOURCE,
    "bad setting": Situation(
        SettingsError,
        ("sources.src.target_size",),
        "run\nstatus\nget src a",
        {"CAF_SOURCES__SRC__TARGET_SIZE": "1XB"},
    ),
    "database away": Situation(
        LedgerUnreachable,
        ("database 'd' at 127.0.0.1:9",),
        """
        run src
        status
        get src a
        ls src
        check src
        doctor
        restore src out
        restore src s3://b/x
        """,
        {"CAF_DATABASE_URL": f"postgresql://u:hush@{NOWHERE}/d"},
    ),
    "bucket away": Situation(
        SourceUnreachable,
        (NOWHERE,),
        f"run src\nplan src\nrestore src s3://b/x --endpoint-url http://{NOWHERE}",
    ),
    "chain away": Situation(
        ChainUnreachable,
        (NOWHERE,),
        """
        jackal wallet
        jackal price 1TB
        jackal buy --bytes 1TB --days 30 --yes
        jackal files src
        rebuild src
        """,
        ON_JACKAL,
    ),
    "store without a wallet": Situation(
        SettingsError,
        ("store.kind", "directory"),
        "jackal wallet\njackal price 1TB\njackal files src\nsafe-to-delete src",
    ),
    "nothing archived": Situation(
        NotLocated,
        ("'empty'", "caf rebuild empty", "caf plan empty"),
        "get empty key\nls empty\nfind empty\ndu empty\ncheck empty\nrestore empty out",
    ),
    "no inventory": Situation(
        NotLocated,
        ("'new'",),
        "plan new --last-inventory\njackal price new\nadopt new --from-chain",
        ON_JACKAL,
    ),
    "unknown prefix": Situation(
        NotLocated,
        ("'nope/'",),
        """
        ls src nope/
        du src nope/
        check src nope/
        export-references src nope/ -o out.json
        logs search src nope/ 'n: 1'
        """,
    ),
    "unknown key": Situation(
        NotLocated,
        ("'nope'",),
        """
        get src nope
        get src nope --object-version v
        get src nope --as-of 2099-01-01
        clps inspect src nope
        chunkio list src nope
        """,
    ),
    "before anything was archived": Situation(
        NotLocated,
        ("as of 2020-01-01",),
        "ls src --as-of 2020-01-01\ndu src --as-of 2020-01-01\nrestore src . --as-of 2020-01-01",
    ),
    "unknown plan": Situation(NotLocated, ("12345678",), "plans show 12345678"),
    "unknown chunk": Situation(
        NotLocated,
        ("src-00000000-00001",),
        """
        unpark src-00000000-00001
        withdraw src-00000000-00001
        repair src-00000000-00001
        plans chunk src-00000000-00001
        """,
    ),
}


def lines(text):
    return [line.strip() for line in text.strip().splitlines()]


@pytest.fixture(scope="module")
def caf(tmp_path_factory, databases):
    """An archived source whose bucket is away, and two that are not archived."""
    folder = tmp_path_factory.mktemp("home")
    caf = CommandLine(folder, KEYS | {"CAF_DATABASE_URL": databases.take().url})
    caf.settings(SETTINGS)
    archive_source(caf, objects=MemorySource({"key": b"body", "some/key": b"body"}))
    return caf


@pytest.mark.parametrize(
    ("situation", "command"),
    [
        pytest.param(
            situation,
            command,
            id=f"{name}: {command}",
            marks=[pytest.mark.thorough]
            * (situation.error in (ChainUnreachable, SourceUnreachable)),
        )
        for name, situation in SITUATIONS.items()
        for command in lines(situation.commands)
    ],
)
def test_a_command_that_cannot_work_is_one_error(caf, situation, command):
    situation.check(caf, command)


@pytest.mark.parametrize("command", [*lines(WITHOUT_SETTINGS), *lines(UNKNOWN_SOURCE.commands)])
def test_a_missing_caf_toml_is_an_error_without_side_effects(tmp_path, command):
    missing = Situation(SettingsError, ("caf.toml", str(tmp_path), "CAF_CONFIG"), "")
    missing.check(CommandLine(tmp_path, KEYS), command)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["run", "plan"])
def test_settings_without_a_source_name_the_table_to_add(tmp_path, command):
    (tmp_path / "caf.toml").write_text("")
    Situation(SettingsError, ("[sources.NAME]",), "").check(CommandLine(tmp_path, KEYS), command)


WRONG = {
    "nonsense": "nonsense",
    "list": "FILE",
    "list --nonsense x": "--nonsense",
    "create '' folder": "A path is empty",
    "create x.caf ''": "A path is empty",
    "create x.caf folder -C ''": "A path is empty",
    "extract x.caf -C ''": "A path is empty",
    "get src key -o ''": "A path is empty",
    "export-references src -o ''": "A path is empty",
    "merkle file --proof-type 7": "'--proof-type': '7' is not one of '0', '3'",
    "clps inspect src a b": "3 arguments",
    "find src ''": "PATTERN is empty",
    "find src --larger 1XB": "'1XB' is not a size",
    "find src --larger ''": "'' is not a",
    "find src --smaller ''": "'' is not a",
    "find src --newer yesterday": "'yesterday' is not a time",
    "find src --newer ''": "'' is not a",
    "find src --older ''": "'' is not a",
    "find src --as-of ''": "'' is not a",
    "get src key --as-of ''": "'' is not a time",
    "ls src --as-of 0001-01-01T00:00+14:00": "is not a time",  # before the year 1
    "ls src --as-of yesterday": "'yesterday' is not a time",
    "du src --as-of yesterday": "'yesterday' is not a time",
    "ls src --as-of 2099-01-01 --current": "exclude each other",
    "find src --as-of 2099-01-01 --current": "exclude each other",
    "du src --as-of 2099-01-01 --current": "exclude each other",
    "get src key --as-of 2099-01-01 --object-version v": "exclude each other",
    "get src -key": "caf get SOURCE -- -KEY",
    "check src --sample 5": "'5' is not a share",
    "check src --sample 0%": "is not a share",
    "check src --sample ''": "'' is not a share",
    "check src --sample 5% --full": "exclude each other",
    "check src --sample '' --full": "exclude each other",
    "restore src some/": "DEST is missing",
    "restore src a b c": "more arguments",
    "restore src a ''": "s3://BUCKET/PREFIX",
    "restore src a s3:/bucket/x": "s3://BUCKET/PREFIX",
    "restore src a S3://bucket": "s3://BUCKET/PREFIX",
    "restore src a file:///srv/x": "s3://BUCKET/PREFIX",
    "restore src s3:///x": "s3://BUCKET",
    "restore src 's3://b c/x'": "give s3://BUCKET or",
    "restore src s3://bucket/then --versions all": "--as-of",
    "restore src folder --profile p": "are for a bucket",
    "run src src": "one source",
    "run src other": "one source",
    "run src --source src": "one source",
    "run": "name a source: empty, new, src",
    "run --json": "--all",
    "run --report 2026-11-21": "name a source",
    "run --all --report 2026-11-21": "exclude each other",
    "run --all --new-archive": "exclude each other",
    "run --new-archive": "name a source",
    "run --all src": "exclude each other",
    "plan": "caf plan SOURCE",
    "run src --report 2026-11-21 --list": "exclude each other",
    "run src --report ''": "--report is empty",
    "plan src --report ''": "--report is empty",
    "plan src --report 2026-11-21 --list": "exclude each other",
    "plans show a b": "caf plans show PLAN",
    "plans chunk x": "is not a chunk's id",
    "metrics --serve 9180": "9180",
    "metrics --serve localhost:": "localhost:",
    "metrics --serve localhost:x": "localhost:x",
    "metrics --serve localhost:70000": "localhost:70000",
    "metrics --serve 192.0.2.1:9180": "192.0.2.1:9180",
    "prove src --limit x": "'--limit': it must be a whole number",
    "prove src --limit 0": "'--limit': it must be at least 1",
    "limit --bandwidth fast": "fast",
    "limit --bandwidth 0": "--bandwidth",
    "limit --spend-cap -1": "-1",
    "limit --spend-cap 1.5": "1.5",
    "doctor --add-unknown-posts --leave-unknown-posts": "--leave-unknown-posts",
    "rebuild src --owner jkl1": "--owner",
    "jackal price 1TB --days 40000": "'--days': it must be at most 36500",
    "jackal buy --bytes 999999999 --days 30 --yes": "953.7 MiB",
    "jackal buy --bytes 1GB --days 29 --yes": "'--days': it must be at least 30",
    "jackal buy --bytes much --days 30 --yes": "much",
}
"""Command lines, and what the error names."""


UNWRITABLE = {
    "get src key -o no/such": 2,
    "get src key -o folder": 2,
    "export-references src -o no/such.json": 8,
    "restore src file": 8,
    "restore src file/below": 8,
    "backup no/such.dump": 8,
    "backup file": 2,
    "keys new -o no/such": 1,
    "keys new -o file": 2,
    "jackal wallet new -o no/such": 1,
    "jackal wallet new -o file": 2,
    "create no/such.caf file": 8,
    "create folder file": 2,
}
"""Command lines, and the exit status. `file` is a file, `folder` a folder."""


@pytest.mark.parametrize("command", UNWRITABLE)
def test_an_unusable_destination_stays_as_it_was(caf, command):
    (caf.folder / "file").write_text("kept")
    (caf.folder / "folder").mkdir(exist_ok=True)
    done = caf(*shlex.split(command))
    expect_error(done, UNWRITABLE[command], shlex.split(command)[-1].split("/")[0])
    assert (caf.folder / "file").read_text() == "kept"
    assert [path.name for path in (caf.folder / "folder").iterdir()] == []
    assert not (caf.folder / "no").exists()


@pytest.mark.parametrize("command", WRONG)
def test_wrong_arguments_are_named(caf, command):
    Situation(UsageError, (WRONG[command],), "").check(caf, command)
