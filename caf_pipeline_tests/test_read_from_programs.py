"""docs/how-to/read-from-programs.md, run on the demo's own objects."""

import re
import shlex
from pathlib import Path

import dagster as dg
import duckdb
import pytest

from caf_pipeline_tests.support.command_line import KEYS, CommandLine, archive_source
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.private_source import IDENTITY, WITH_IDENTITY

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "how-to" / "read-from-programs.md").read_text(encoding="utf-8")
FOLDERS = ("packages/rich/", "packages/pyarrow/tests/data/parquet/")
"""The objects of the demo that the page reads."""

SETTINGS = f"""
[encryption]
recipients = ["{IDENTITY.recipient}"]
[sources.demo]
bucket = "demo"
target_size = "1MiB"
[sources.web]
bucket = "web"
target_size = "1MiB"
public = true
"""


@pytest.fixture(scope="module")
def bodies():
    """The bodies of the objects that `make demo` archives, by key."""
    with pytest.MonkeyPatch.context() as patches:
        patches.syspath_prepend(ROOT / "demo")
        patches.setenv("CAF_CONFIG", str(ROOT / "caf.toml"))
        from server import python_files

        files = python_files()
    return {key: path.read_bytes() for path, key in files if key.startswith(FOLDERS)}


@pytest.fixture(scope="module")
def caf(tmp_path_factory, databases, bodies):
    """A folder with the private source `demo` and the public source `web`."""
    environment = KEYS | WITH_IDENTITY | {"CAF_DATABASE_URL": databases.take().url}
    caf = CommandLine(tmp_path_factory.mktemp("programs"), environment)
    caf.settings(SETTINGS)
    for source in ("demo", "web"):
        archive_source(caf, source, objects=MemorySource(bodies))
    return caf


@pytest.fixture
def run(caf):
    """Run the only program of the page that contains a text; return its names."""

    def run_program(text):
        programs = re.findall(r"```py(?:thon)?\n(.*?)```", PAGE, re.DOTALL)
        (program,) = [program for program in programs if text in program]
        names = {}
        exec(program.replace("/srv/archive/", f"{caf.folder}/"), names)
        return names

    with caf.surroundings():
        yield run_program


def test_archive_reads_objects(run, bodies, capsys):
    names = run("open_archive()")
    table = bodies["packages/rich/table.py"]
    assert (names["everything"], names["tail"]) == (table, table[-8:])
    listed = [key for key in sorted(bodies) if key.startswith("packages/rich/")]
    *printed, empty, part = capsys.readouterr().out.splitlines()
    assert printed == [f"{key} {len(bodies[key])} current" for key in listed]
    assert {empty, part} == {"packages/rich/py.typed 0 0", "packages/rich/table.py 0 4"}


def test_libraries_read_tables(run):
    names = run("import duckdb")
    tables = names["tables"]
    assert len(tables.files) == 4
    assert tables.count_rows() > 0
    duckdb.unregister_filesystem("caf")


def test_references_are_read_without_caf(run, caf, bodies):
    (command,) = re.findall(r"^(caf export-references .*?) *#", PAGE, re.MULTILINE)
    _, *arguments = shlex.split(command)
    assert caf(*arguments).status == 0
    fs = run('"reference"')["fs"]
    assert fs.cat("packages/rich/table.py") == bodies["packages/rich/table.py"]


def test_an_asset_reads_objects(run):
    definitions = run("ObjectReader")["defs"]
    assert dg.materialize(list(definitions.assets), resources=definitions.resources).success
