"""Every command of the installed `caf`, as a process of its own."""

import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from caf_pipeline.cli.app import build
from caf_pipeline.formats.chunkio import LogWriter
from caf_pipeline_tests.support.command_line import CAF, CommandLine, source_text
from caf_pipeline_tests.support.jackal_command_line import jackal_command_line, wallet_with_space

VECTORS = Path(__file__).parents[1] / "vectors"

COMMANDS = {
    "create": ("create", "made.caf", "folder"),
    "list": ("list", "made.caf"),
    "cat": ("cat", "made.caf", "folder/file"),
    "verify": ("verify", "made.caf"),
    "merkle": ("merkle", "made.caf"),
    "extract": ("extract", "made.caf", "-C", "extracted"),
    "convert": ("convert", "made.caf", "made.tar.co"),
    "cotar index": ("cotar", "index", "made.tar.co", "-o", "made.index"),
    "cotar list": ("cotar", "list", "made.tar.co"),
    "cotar cat": ("cotar", "cat", "made.tar.co", "folder/file"),
    "cotar verify": ("cotar", "verify", "made.tar.co"),
    "init": ("init", "--celery", "--kubernetes"),
    "policy": ("policy", "src"),
    "version": ("version",),
    "help": ("help", "keys", "new"),
    "completion": ("completion", "fish"),
    "keys new": ("keys", "new", "-o", "key.txt"),
    "keys show": ("keys", "show"),
    "keys worker": ("keys", "worker"),
    "plan": ("plan", "src", "--dry-run"),
    "setup": ("setup",),
    "ui": ("ui", "--port", "0"),
    "run": ("run",),
    "backfill": ("backfill", "src", "--dry-run"),
    "plans": ("plans", "src"),
    "keys check": ("keys", "check", "src"),
    "get": ("get", "src", "key"),
    "ls": ("ls", "src"),
    "find": ("find", "src", "k*"),
    "du": ("du", "src"),
    "restore": ("restore", "src", "restored"),
    "check": ("check", "src", "--full"),
    "export-references": ("export-references", "src", "-o", "references.json"),
    "status": ("status",),
    "runs": ("runs",),
    "queue": ("queue", "src"),
    "metrics": ("metrics",),
    "unpark": ("unpark", "src-00000000-00001"),
    "withdraw": ("withdraw", "src-00000000-00001"),
    "remove": ("remove", "src", "--yes"),
    "safe-to-delete": ("safe-to-delete", "src"),
    "doctor": ("doctor",),
    "backup": ("backup", "ledger.dump"),
    "rebuild": ("rebuild", "--dry-run"),
    "adopt": ("adopt", "src", "--from-chain", "--dry-run"),
    "clps inspect": ("clps", "inspect", "folder/archive.clp"),
    "logs search": ("logs", "search", "src", "key", "level: ERROR"),
    "chunkio list": ("chunkio", "list", "folder/log"),
    "chunkio cat": ("chunkio", "cat", "folder/log", "0"),
    "chunkio verify": ("chunkio", "verify", "folder/log"),
    "chunkio salvage": ("chunkio", "salvage", "folder/log", "-o", "saved.log"),
    "jackal wallet": ("jackal", "wallet"),
    "jackal wallet new": ("jackal", "wallet", "new"),
    "jackal price": ("jackal", "price", "1TB"),
    "jackal buy": ("jackal", "buy", "--bytes", "2GB", "--days", "30", "--yes"),
    "jackal files": ("jackal", "files"),
    "prove": ("prove", "src"),
    "repair": ("repair", "src"),
    "limit": ("limit", "--bandwidth", "20MiB/s"),
    "pause": ("pause",),
    "resume": ("resume",),
}
"""Each command finds what earlier ones made."""

STATUS = {
    "ui": 2,
    "keys check": 3,
    "unpark": 11,
    "withdraw": 11,
    "remove": 6,
    "safe-to-delete": 1,
}
"""Exit statuses other than 0.

There is a caf.toml, no such port, no identity, no such chunk, an archived source, and nothing
proven in two windows.
"""

SAID = {
    "cat": b"bytes",
    "cotar cat": b"bytes",
    "cotar list": b"folder/file",
    "get": b"body",
    "ls": b"key",
    "find": b"key",
    "du": b"1 object",
    "check": b"1 object of 1 read, 0 wrong",
    "clps inspect": b"70 records",
    "chunkio cat": b"entry",
    "jackal price": b"ujkl",
    "status": b"located",
    "runs": b"success",
    "queue": b"no message",
    "metrics": b"caf_paused 0.0",
    "plans": b"located",
    "list": b"folder/file",
}


def names(of, before=()):
    for command in of.registered_commands:
        yield " ".join((*before, command.name or command.callback.__name__.replace("_", "-")))
    for group in of.registered_groups:
        words = (*before, group.name or group.typer_instance.info.name)
        if before:  # a command with commands of its own
            yield " ".join(words)
        yield from names(group.typer_instance, words)


def test_no_command_is_left_out_here():
    assert sorted(names(build())) == sorted(COMMANDS)


@pytest.mark.thorough
def test_each_command_does_its_work_as_it_is_installed(
    tmp_path, network, database_url, s3_server, new_bucket
):
    new_bucket.put("key", b"body" * 10_000)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"bytes")
    (tmp_path / "folder" / "log").write_bytes(LogWriter().entry(bytes(16), b"entry"))
    shutil.copy(VECTORS / "clps" / "two_files_0.12.1b0.clps", tmp_path / "folder" / "archive.clp")
    caf = jackal_command_line(
        tmp_path, network, wallet_with_space(network).words, CAF_DATABASE_URL=database_url
    )
    caf.settings(source_text(s3_server, new_bucket.name))
    for name, arguments in COMMANDS.items():
        done = caf.process(*arguments)
        assert done.status == STATUS.get(name, 0), (name, done.err)
        assert SAID.get(name, b"") in done.out, name
    assert (tmp_path / "restored" / "key").read_bytes() == b"body" * 10_000
    assert (tmp_path / "extracted" / "folder" / "file").read_bytes() == b"bytes"


DEFINITIONS = """
from importlib import metadata, resources
from caf_pipeline.cli import about
from caf_pipeline.definitions import defs

print(defs.resolve_job_def("caf_archive_src").name)
print(resources.files("caf_pipeline").joinpath("py.typed").is_file())
print(about._page("docs/how-to/connect-jackal.md").splitlines()[0])
print(metadata.metadata("caf-pipeline")["License-Expression"])
print([file.name for file in metadata.files("caf-pipeline") if "licenses" in file.parts])
"""


@pytest.mark.thorough
def test_installed_package_has_definitions_types_and_license(tmp_path, s3_server):
    caf = CommandLine(tmp_path, {})
    caf.settings(source_text(s3_server, "bucket"))
    run = subprocess.run(
        [Path(CAF).with_name("python"), "-I", "-c", DEFINITIONS],
        cwd=tmp_path,
        env=caf.variables({}),
        capture_output=True,
        text=True,
        check=False,
    )
    lines = run.stdout.splitlines()
    assert lines == [
        "caf_archive_src",
        "True",
        "# Connect to Jackal",
        "Apache-2.0",
        "['LICENSE']",
    ], run.stderr


def test_the_summaries_are_those_of_the_commands():
    """The summaries exist twice, so that help loads no command."""
    runner = CliRunner()
    assert runner.invoke(build(""), ["--help"]).output == runner.invoke(build(), ["--help"]).output


@pytest.mark.parametrize(
    "group", [(), ("jackal",), ("cotar",), ("clps",), ("logs",), ("chunkio",)], ids="/".join
)
def test_the_help_cuts_no_summary(tmp_path, group):
    """typer ends a summary with dots if it is longer than 80 columns."""
    listed = CommandLine(tmp_path, {"COLUMNS": "80"})(*group, "--help").out.partition(b"Commands:")[
        2
    ]
    assert listed
    assert b"..." not in listed


@pytest.mark.parametrize(
    "arguments", [(), ("--help",), ("--version",)], ids=["alone", "--help", "--version"]
)
def test_a_process_prints_the_same_as_a_call(tmp_path, arguments):
    caf = CommandLine(tmp_path, {})
    assert caf.process(*arguments) == caf(*arguments)
