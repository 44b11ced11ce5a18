"""Archives S3 objects on Jackal: inventory, chunks, proofs, and one look-up for each object.

The names of this module are for other projects. Paths below it may change in any version.
Modules beside the folders serve several of them, start a process, or open what the settings name.
`docs/explanation/architecture.md` describes the folders, and which may import which.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from caf_pipeline.component import S3ArchiveComponent as S3ArchiveComponent
    from caf_pipeline.defs.build import build_defs as build_defs
    from caf_pipeline.defs.object_reader import ObjectReader as ObjectReader
    from caf_pipeline.defs.partitions import chunk_partitions as chunk_partitions
    from caf_pipeline.settings import load_settings as load_settings
    from caf_pipeline.wiring import open_archive as open_archive

_MODULES: Final = {
    "ObjectReader": "defs.object_reader",
    "S3ArchiveComponent": "component",
    "build_defs": "defs.build",
    "chunk_partitions": "defs.partitions",
    "load_settings": "settings",
    "open_archive": "wiring",
}
"""Imported when they are used, since a command needs few of them."""


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})  # `dg` finds the component here
