"""`caf version`, `caf help` and `caf completion`."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import caf_pipeline
from caf_pipeline_tests.support.command_line import CAF, CommandLine
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.run_contexts import a_run_context, archive_everything

COMPLETED = """
source <(caf completion bash)
COMP_WORDS=({words}) COMP_CWORD={position}
_caf_completion caf
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("version",), ("--version",)),
        (("help",), ("--help",)),
        (("help", "jackal"), ("jackal", "--help")),
        (("help", "keys", "new"), ("keys", "new", "--help")),
    ],
)
def test_a_command_prints_what_its_option_prints(tmp_path, command, option):
    caf = CommandLine(tmp_path, {})
    assert caf(*command) == caf(*option)


def test_help_of_an_unknown_command_fails(tmp_path):
    assert CommandLine(tmp_path, {})("help", "nope").status == 2


def test_every_page_that_a_text_names_can_be_printed(tmp_path):
    caf, package = CommandLine(tmp_path, {}), Path(caf_pipeline.__file__).parent
    text = "".join(path.read_text() for path in package.rglob("*.py"))
    for name in {"docs", *re.findall(r"docs/[\w/.-]+\.md", text)}:
        done = caf("help", name)
        assert (done.status, done.out[:2]) == (0, b"# "), (name, done.err)


@pytest.mark.parametrize("name", ["docs/none.md", "docs/../pyproject.toml", "docs/schema_page.py"])
def test_only_pages_of_the_documentation_are_printed(tmp_path, name):
    assert CommandLine(tmp_path, {})("help", name).status == 2


@pytest.mark.parametrize(
    ("words", "position", "completed"),
    [("caf ke", 1, "keys"), ("caf keys n", 2, "new"), ("caf ls --rec", 2, "--recursive")],
)
@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
def test_bash_completes_a_command_line(tmp_path, words, position, completed):
    assert completed_by_bash(tmp_path, words, position) == [completed]


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
def test_bash_completes_sources_and_keys(tmp_path, ledger, database_url):
    source = MemorySource(dict.fromkeys(("2024/a", "2024/b/c", "2025/a"), b"x"))
    archive_everything(a_run_context(tmp_path, source, ledger))
    url = database_url
    caf = CommandLine(tmp_path, {"CAF_DATABASE_URL": url})
    caf.settings('[sources.src]\nbucket = "b"\npublic = true\n')
    assert completed_by_bash(tmp_path, "caf get s", 2, CAF_DATABASE_URL=url) == ["src"]
    for words, keys in (
        ("caf get src 202", ["2024/", "2025/"]),
        ("caf ls src 2024/", ["2024/a", "2024/b/"]),
        ("caf get src z", []),
        ("caf get other 2", []),
    ):
        assert completed_by_bash(tmp_path, words, 3, CAF_DATABASE_URL=url) == keys
    assert completed_by_bash(tmp_path, "caf get src 2", 3, CAF_DATABASE_URL="no URL") == []


def completed_by_bash(folder, words, position, **variables):
    """Return what bash completes for the last word; nothing may be on stderr."""
    programs = str(CAF).rpartition("/")[0]
    done = subprocess.run(
        ["bash", "-c", COMPLETED.format(words=words, position=position)],
        env={"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(folder), **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_names_the_variable_that_caf_reads(tmp_path, shell):
    done = CommandLine(tmp_path, {}).process("completion", shell)
    assert (done.status, b"_CAF_COMPLETE=complete_" in done.out) == (0, True)
