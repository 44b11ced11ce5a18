"""`caf version`, `caf help` and `caf completion`."""

import shutil
import subprocess

import pytest

from caf_pipeline_tests.support.command_line import CAF, CommandLine

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


@pytest.mark.parametrize(
    ("words", "position", "completed"),
    [("caf ke", 1, "keys"), ("caf keys n", 2, "new"), ("caf ls --rec", 2, "--recursive")],
)
@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
def test_bash_completes_a_command_line(tmp_path, words, position, completed):
    folder = str(CAF).rpartition("/")[0]
    done = subprocess.run(
        ["bash", "-c", COMPLETED.format(words=words, position=position)],
        env={"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [completed], done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_names_the_variable_that_caf_reads(tmp_path, shell):
    done = CommandLine(tmp_path, {}).process("completion", shell)
    assert (done.status, b"_CAF_COMPLETE=complete_" in done.out) == (0, True)
