"""Tar archives for tests: written by tarfile, and the vectors of the cotar index."""

import gzip
import io
import tarfile
from pathlib import Path

LONG = "d" * 60 + "/" + "e" * 90 + "/" + "f" * 120


def made(members, tar_format=tarfile.PAX_FORMAT, **more) -> bytes:
    """Return an archive of `(name, body)` pairs or TarInfo objects."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tar_format, **more) as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
                continue
            info = tarfile.TarInfo(member[0])
            info.size = len(member[1])
            tar.addfile(info, io.BytesIO(member[1]))
    return file.getvalue()


def info(name, kind, link="") -> tarfile.TarInfo:
    each = tarfile.TarInfo(name)
    each.type, each.linkname = kind, link
    return each


VECTORS = Path(__file__).parents[1] / "vectors" / "cotar"


SAME = [
    "basic",
    "one_file",
    "hardlink",
    "hardlink_same_name_twice",
    "symlink",
    "old_v7_type_nul",
    "no_eof_blocks",
    "tenk",
]
"""Archives that the real builder indexes correctly."""


def vector(name: str) -> bytes:
    path = VECTORS / name
    return (
        path.read_bytes()
        if path.exists()
        else gzip.decompress((VECTORS / f"{name}.gz").read_bytes())
    )
