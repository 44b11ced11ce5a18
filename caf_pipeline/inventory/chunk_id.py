"""A chunk's id, `<source>-<plan>-<number>`, which is also its partition key: the one place that
writes and reads it.
"""

import re
from dataclasses import dataclass
from typing import Final, Self

PLAN_NAME: Final = r"[0-9a-f]{8}|[0-9a-f]{12}"
"""A plan's name, as a regular expression."""

_CHUNK_ID: Final = re.compile(
    rf"(?P<source>[a-z0-9-]+)-(?P<plan>{PLAN_NAME})-(?P<number>[0-9]{{5}})"
)


@dataclass(frozen=True, slots=True)
class ChunkId:
    """What a chunk's id tells. `number` counts the chunks of a plan, from 1."""

    source: str
    plan: str
    number: int

    def __str__(self) -> str:
        """Return the id as it is written."""
        return f"{self.source}-{self.plan}-{self.number:05d}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read an id; None where the text is none."""
        found = _CHUNK_ID.fullmatch(text)
        return found and cls(found["source"], found["plan"], int(found["number"]))
