"""What holds of each module by itself: what the core may see, what a module may be called, and that
it says what it holds.
"""

import ast
import re
import sys
from pathlib import Path

import pytest

from caf_pipeline_tests.support.package_modules import MODULES, RANK, imports_of, top

PURE = {"errors", "chunk_state", "caf", "formats", "inventory"}
COMPUTING = {
    "bech32",
    "cryptography",
    "pyarrow",
    "numpy",
    "duckdb",
    "msgspec",
    "blake3",
    "awscrt",
    "siphash24",
    "typing_extensions",
    "caf_native",
}

DEMO = sorted(Path(__file__).parents[1].glob("demo/*.py"))
FORKING = {"user", "group", "extra_groups", "preexec_fn", None}
"""Options of `subprocess`; None is a mapping of options."""
WITHOUT_LIBRARIES = {"ledger.server_keeper"}
"""Programs that load no library, so a fork of their process runs no handler."""
FORKS = {"os.fork", "os.forkpty", "pty.fork", "multiprocessing.Process", "multiprocessing.Pool"}


@pytest.mark.parametrize("module", [module for module in MODULES if top(module) in PURE])
def test_the_core_sees_no_network_no_clock_and_no_environment(module):
    outside = {top(name) for name in imports_of(module) if not name.startswith("urllib.parse.")} - {
        "caf_pipeline"
    }
    assert outside - set(sys.stdlib_module_names) <= COMPUTING
    assert not outside & {"socket", "urllib", "http", "subprocess", "asyncio"}
    text = MODULES[module].read_text(encoding="utf-8")
    assert not [
        forbidden
        for forbidden in ("time.time", "datetime.now", "os.environ", "getenv", "utcnow")
        if forbidden in text
    ]


def test_a_fork_of_our_process_is_recognised():
    for call in (
        "subprocess.run([], user=0)",
        "subprocess.Popen([], preexec_fn=f)",
        "subprocess.Popen([], **more)",
        "os.fork()",
        "multiprocessing.Process(target=f)",
        "ProcessPoolExecutor()",
    ):
        assert list(_forks(call)), call
    assert not list(_forks("require_free(1, user='x'); subprocess.run([], process_group=0)"))


@pytest.mark.parametrize(
    "path",
    [*(path for name, path in MODULES.items() if name not in WITHOUT_LIBRARIES), *DEMO],
    ids=lambda path: path.stem,
)
def test_no_process_runs_the_fork_handlers_of_libraries(path):
    """gRPC has handlers that crash a process. `subprocess` uses vfork if it has no such option."""
    assert list(_forks(path.read_text(encoding="utf-8"))) == []


def _forks(text):
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name.startswith("subprocess."):
            yield from FORKING & {option.arg for option in node.keywords}
        if name in FORKS or name.rpartition(".")[2] == "ProcessPoolExecutor":
            yield name


@pytest.mark.parametrize("module", WITHOUT_LIBRARIES)
def test_a_program_without_libraries_imports_none(module):
    assert {top(name) for name in imports_of(module)} <= set(sys.stdlib_module_names)


def test_no_module_is_named_after_nothing():
    names = {name for module in MODULES for name in module.split(".")}
    assert not names & {"utils", "helpers", "common", "models", "constants", "misc"}


@pytest.mark.parametrize("module", MODULES)
def test_every_module_and_folder_says_what_it_holds(module):
    text = ast.get_docstring(ast.parse(MODULES[module].read_text(encoding="utf-8")))
    assert text
    if module.endswith(".__init__"):
        named = {name.partition(".")[0] for name in re.findall(r"`([a-z_.0-9]+)`", text)}
        assert named & (set(RANK) - {top(module)}), (
            f"{module} does not say where that is which does not belong there"
        )
