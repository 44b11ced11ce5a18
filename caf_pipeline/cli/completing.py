"""Sources and keys that a shell completes. After an error it completes nothing.

Loads settings and ledger only then: commands that work with files need neither.
"""

from contextlib import closing, suppress
from itertools import islice
from typing import Final

import typer

from caf_pipeline.errors import CafError

SHOWN: Final = 200
"""Keys and folders that a shell shows for a choice."""


def complete_source(incomplete: str) -> list[str]:
    """Return the sources of the settings that begin so."""
    from caf_pipeline.settings import load_settings  # noqa: PLC0415

    with suppress(CafError):
        return [name for name in sorted(load_settings().sources) if name.startswith(incomplete)]
    return []


def complete_key(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return one level of the source's keys, with folders as `caf ls` shows them."""
    from caf_pipeline import wiring  # noqa: PLC0415
    from caf_pipeline.retrieval.listing import list_level  # noqa: PLC0415
    from caf_pipeline.settings import load_settings  # noqa: PLC0415

    with suppress(CafError), closing(wiring.open_lookup(load_settings())) as lookup:
        level = list_level(lookup, ctx.params.get("source") or "", incomplete)
        return [item if isinstance(item, str) else item.row.key for item in islice(level, SHOWN)]
    return []
