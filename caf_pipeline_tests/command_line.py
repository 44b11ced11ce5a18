"""The installed `caf`, run as a user runs it: a folder with a caf.toml, a process, its output and exit status."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CAF = str(Path(sys.executable).with_name("caf"))
SECONDS = 180  # for one command on a busy machine; a hang fails the test instead of the whole suite

FOLDER_STORE = {"CAF_STORE__KIND": "directory"}
FOREIGN = ("AWS_", "CAF_", "DAGSTER_", "JACKAL_")  # a developer's own settings, which no test may see


@dataclass(frozen=True)
class Done:
    """What a command said."""

    status: int
    out: bytes
    err: str


@dataclass(frozen=True)
class CommandLine:
    """A folder to work in, and the environment's variables. Chunks are kept in a folder, unless these say otherwise."""

    folder: Path
    environment: dict[str, str]

    def settings(self, text: str) -> None:
        (self.folder / "caf.toml").write_text(text, encoding="utf-8")

    def start(self, *arguments: str, **more: str) -> "subprocess.Popen[bytes]":
        environment = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        return subprocess.Popen(
            [CAF, *arguments],
            cwd=self.folder,
            env=environment | FOLDER_STORE | self.environment | more,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def __call__(self, *arguments: str, **more: str) -> Done:
        process = self.start(*arguments, **more)
        out, err = process.communicate(timeout=SECONDS)
        return Done(process.returncode, out, err.decode())


def source_text(endpoint: str, bucket: str, **more: str) -> str:
    """A source `src` of small chunks, as TOML."""
    lines = {"bucket": bucket, "endpoint_url": endpoint, "target_size": "1MiB"} | more
    return "[sources.src]\n" + "".join(f'{name} = "{value}"\n' for name, value in lines.items())
