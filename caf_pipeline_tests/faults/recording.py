"""The fixture `fault`, which counts the cases of a session over all test processes.

Each case is one line of JSON in a shared file.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from caf_pipeline_tests.faults.matrix import known
from caf_pipeline_tests.faults.world import Counts, Verdict, World

LOG_VARIABLE: Final = "CAF_TEST_FAULT_LOG"
"""The file of the session's cases. Processes of pytest-xdist inherit the variable."""


@dataclass(kw_only=True)
class Case(Counts):
    """One fault and its result. A case of many inputs states their number."""

    group: str
    what: str
    tried: int = 1
    survived: int = 0

    def check(self, world: World) -> Verdict:
        """Examine a world; raise AssertionError if anything is wrong."""
        verdict = world.examine()
        self.add(verdict)
        verdict.require()
        return verdict


FaultMaker = Callable[[str, str], AbstractContextManager[Case]]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("faults", "the fault matrix")
    group.addoption(
        "--soak", action="store_true", help="the long form: 1,000 kills, 10^6 hostile inputs"
    )
    group.addoption("--faults", action="store_true", help="only tests of the fault matrix")
    group.addoption(
        "--fault-log", metavar="FILE", help="keep the counts of the fault matrix in this file"
    )
    group.addoption(
        "--go-on",
        action="store_true",
        help="leave out tests that passed by the file of --fault-log",
    )


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # a process of pytest-xdist
        return
    named = config.getoption("--fault-log")
    if named:
        path = Path(named).absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        if config.getoption("--go-on"):
            _drop_failed(path)
        else:
            path.write_bytes(b"")
    else:
        descriptor, name = tempfile.mkstemp(prefix="caf-faults-", suffix=".jsonl")
        os.close(descriptor)
        path = Path(name)
        config.add_cleanup(lambda: path.unlink(missing_ok=True))
    os.environ[LOG_VARIABLE] = str(path)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    faults = {item for item in items if _is_of_the_matrix(item)}
    for item in faults:
        if not item.get_closest_marker("sample"):
            item.add_marker("thorough")
    passed = (
        {case["test"] for case in _cases(Path(os.environ[LOG_VARIABLE]))}
        if config.getoption("--go-on")
        else set()
    )
    only = config.getoption("--faults")
    kept = {
        item
        for item in items
        if item.nodeid not in passed
        and (item in faults if only else not item.get_closest_marker("soak"))
    }
    if dropped := [item for item in items if item not in kept]:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item in kept]


def _is_of_the_matrix(item: pytest.Item) -> bool:
    return "fault" in getattr(item, "fixturenames", ()) and "fault" not in getattr(
        getattr(item, "callspec", None), "params", ()
    )


def _cases(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _drop_failed(path: Path) -> None:
    """Keep only the cases of tests that passed."""
    cases = _cases(path)
    failed = {case["test"] for case in cases if case["survived"] < case["tried"]}
    path.write_text(
        "".join(json.dumps(case) + "\n" for case in cases if case["test"] not in failed)
    )


def _append(path: Path, record: dict[str, Any]) -> None:
    line = json.dumps(record).encode() + b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line)  # one write: lines of several processes do not mix
    finally:
        os.close(descriptor)


@pytest.fixture
def soak(request: pytest.FixtureRequest) -> bool:
    """True in the long form."""
    return bool(request.config.getoption("--soak"))


@pytest.fixture
def fault(request: pytest.FixtureRequest) -> FaultMaker:
    """Makes cases: `with fault("group", "what") as case:`. A case without an error is survived."""

    @contextmanager
    def made(group: str, what: str) -> Iterator[Case]:
        assert known(group, what), f"'{group}': '{what}' is not in faults/matrix.py"
        case = Case(group=group, what=what)
        try:
            yield case
            case.survived = case.tried
        except pytest.skip.Exception:
            case.tried = 0
            raise
        finally:
            _append(Path(os.environ[LOG_VARIABLE]), vars(case) | {"test": request.node.nodeid})

    return made
