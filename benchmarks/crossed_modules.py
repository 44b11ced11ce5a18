"""Count the modules of `caf_pipeline` that a command crosses.

`python -m benchmarks.crossed_modules [--list]`. A module is crossed if one of its functions is
called in any process that the command starts. A module that is only imported does not count. The
commands are `caf get` from a folder store, `caf run`, and one tick of the new-objects sensor and of
the launch sensor.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

from dagster import DagsterInstance

from benchmarks.case import CAF
from caf_pipeline.defs.build import build_defs
from caf_pipeline.naming import LAUNCH_SENSOR, new_objects_name
from caf_pipeline.settings import load_settings
from caf_pipeline_tests.support.s3_server import KEY_ID, SECRET, make_bucket, running_moto
from caf_pipeline_tests.support.ticks import evaluate_tick

OBJECTS = 30
OBJECT_BYTES = 50_000
SOURCE = "src"
SETTINGS = """home = "{home}"
[store]
kind = "directory"
folder = "{home}/store"
[sources.src]
bucket = "{bucket}"
endpoint_url = "{endpoint}"
target_size = "1MiB"
public = true
automatic = true
"""
FOLDER_VARIABLE = "PYTHON_CROSSED_MODULES"
"""Names the folder to which each process writes its list of modules.

caf passes variables that begin with PYTHON on to its child processes.
"""

PROFILER = f'''
import json, os, sys, threading, uuid

FUNCTION = 0x1  # inspect.CO_OPTIMIZED: neither a module nor the body of a class
codes, modules = set(), set()

def crossed(frame, event, argument):
    code = frame.f_code
    if event == "call" and code not in codes:
        codes.add(code)
        if code.co_flags & FUNCTION:
            name = frame.f_globals.get("__name__", "")
            if name.startswith("caf_pipeline."):
                modules.add(name)

def write():
    with open(os.path.join(os.environ["{FOLDER_VARIABLE}"], uuid.uuid4().hex), "w") as file:
        json.dump(sorted(modules), file)

def leave(status, end=os._exit):
    write()
    end(status)

def begin():
    threading.setprofile(crossed)
    sys.setprofile(crossed)

if "{FOLDER_VARIABLE}" in os.environ:
    import atexit
    os._exit = leave  # `caf` exits with os._exit
    atexit.register(write)
    if os.environ["{FOLDER_VARIABLE}_AT"] == "start":
        begin()
'''
"""Each process runs this text as `sitecustomize`."""


def crossed_by(
    folder: Path, command: list[str], environment: Mapping[str, str], *, at: str = "start"
) -> list[str]:
    """Return the names of the modules that a command crosses, sorted.

    Args:
        folder: Working folder. Contains the profiler.
        command: The command and its arguments.
        environment: Additional environment variables.
        at: When counting begins. "start": when a process starts. "call": when the process calls
            `sitecustomize.begin`.
    """
    with tempfile.TemporaryDirectory(dir=folder) as written:
        profiled = {FOLDER_VARIABLE: written, f"{FOLDER_VARIABLE}_AT": at}
        path = os.pathsep.join([str(folder / "profiler"), os.getcwd()])
        subprocess.run(
            command,
            env=os.environ | environment | profiled | {"PYTHONPATH": path},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        lists = [json.loads(file.read_text(encoding="utf-8")) for file in Path(written).iterdir()]
    return sorted({module for modules in lists for module in modules})


def measure() -> dict[str, list[str]]:
    """Return the modules that each command or tick crosses."""
    with tempfile.TemporaryDirectory() as name, running_moto() as endpoint:
        folder = Path(name).resolve()
        (folder / "profiler").mkdir()
        (folder / "profiler" / "sitecustomize.py").write_text(PROFILER, encoding="utf-8")
        bucket = make_bucket(endpoint)
        for number in range(OBJECTS):
            bucket.put(f"some/key-{number:02}", os.urandom(OBJECT_BYTES))
        text = SETTINGS.format(home=folder / "home", bucket=bucket.name, endpoint=endpoint)
        (folder / "caf.toml").write_text(text, encoding="utf-8")
        environment = {
            "CAF_CONFIG": str(folder / "caf.toml"),
            "CAF_SOURCES__SRC__ACCESS_KEY_ID": KEY_ID,
            "CAF_SOURCES__SRC__SECRET_ACCESS_KEY": SECRET,
        }
        run = crossed_by(folder, [CAF, "run", "--source", SOURCE], environment)
        get = crossed_by(
            folder, [CAF, "get", SOURCE, "some/key-03", "-o", str(folder / "fetched")], environment
        )
        bucket.put("later", b"later")  # a new object for the sensor
        sensors = {"tick: new objects": new_objects_name(SOURCE), "tick: launching": LAUNCH_SENSOR}
        module = [sys.executable, "-m", "benchmarks.crossed_modules", "--tick"]
        ticks = {
            title: crossed_by(folder, [*module, sensor], environment, at="call")
            for title, sensor in sensors.items()
        }
    return {"caf get": get, **ticks, "caf run": run}


def tick(sensor: str) -> None:
    """Evaluate one tick of a sensor and count the modules that the tick crosses.

    Loading the definitions does not count: a code server loads them before its first tick.
    """
    from sitecustomize import begin  # noqa: PLC0415 - written by `measure`

    settings = load_settings()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with DagsterInstance.ephemeral(folder) as instance:
            pipeline = argparse.Namespace(
                settings=settings, instance=instance, defs=build_defs(settings)
            )
            pipeline.defs.resolve_sensor_def(sensor)
            begin()
            evaluate_tick(pipeline, sensor)
            sys.setprofile(None)


def main() -> None:
    """Print the number of modules for each command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="also print the names of the modules")
    parser.add_argument("--tick", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tick:
        tick(arguments.tick)
        return
    for title, modules in measure().items():
        print(f"{title}: {len(modules)}")
        if arguments.list:
            print(
                "".join(f"    {module.removeprefix('caf_pipeline.')}\n" for module in modules),
                end="",
            )


if __name__ == "__main__":
    main()
