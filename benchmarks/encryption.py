"""Encrypted chunks against plain ones, and against the age tool."""

import os
import subprocess
from collections.abc import Iterator

from benchmarks import inputs
from benchmarks.case import Bench, ours
from benchmarks.inputs import MIB
from benchmarks.pairs import Command
from benchmarks.server import TOOLS
from caf_pipeline.formats import age

GIB = 1 << 30
AGE_PACKAGE = "filippo.io/age/cmd/age@v1.3.2"

Sides = Iterator[tuple[Command, Command]]


def packing_encrypted(bench: Bench) -> Sides:
    """Pack 8 objects of 256 MiB, encrypted and plain."""
    size_bytes = bench.pick(256 * MIB, 32 * MIB, MIB)
    prefix, server = f"large-{size_bytes}", bench.s3()
    server.fill(prefix, inputs.fixed(8, size_bytes))
    recipient = str(age.new_identity().recipient)
    encrypted, plain = bench.folder / "encrypted", bench.folder / "plain"
    yield (
        ours(
            "pack",
            server.endpoint,
            f"{prefix}/",
            encrypted,
            "left",
            "kept",
            recipient,
            removed=[encrypted, plain],
        ),
        ours("pack", server.endpoint, f"{prefix}/", plain, "left", removed=[encrypted, plain]),
    )


def age_tool() -> str:
    """Return the path of age 1.3.2. Go builds it once."""
    path = TOOLS.resolve() / "age"
    if not path.exists():
        environment = {**os.environ, "GOBIN": str(path.parent)}
        subprocess.run(["go", "install", AGE_PACKAGE], env=environment, check=True)
    return str(path)


def seal_file(bench: Bench) -> Sides:
    """Encrypt a cached file of 1 GiB to /dev/null, in two threads."""
    size_bytes = bench.pick(GIB, GIB // 4, MIB)
    path = inputs.one_file(f"file-{size_bytes}", size_bytes)
    recipient = str(age.new_identity().recipient)
    yield (
        ours("seal", path, recipient),
        Command([age_tool(), "-r", recipient, "-o", "/dev/null", str(path)]),
    )


def open_file(bench: Bench) -> Sides:
    """Decrypt a cached file of 1 GiB to /dev/null, in two threads."""
    size_bytes = bench.pick(GIB, GIB // 4, MIB)
    path = inputs.one_file(f"file-{size_bytes}", size_bytes)
    identity, sealed = age.new_identity(), bench.folder / "sealed.age"
    key = bench.folder / "identity"
    key.write_text(identity.reveal())
    recipient = str(identity.recipient)
    subprocess.run([age_tool(), "-r", recipient, "-o", sealed, path], check=True)
    yield (
        ours("open-file", sealed, key),
        Command([age_tool(), "-d", "-i", str(key), "-o", "/dev/null", str(sealed)]),
    )
