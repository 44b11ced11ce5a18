"""A chunk's id and partition key: `<source>-<plan>-<number>`."""

import re
from dataclasses import dataclass
from typing import Final, Self

PLAN_NAME: Final = r"[0-9a-f]{8}|[0-9a-f]{12}"

_CHUNK_ID: Final = re.compile(
    rf"(?P<source>[a-z0-9-]+)-(?P<plan>{PLAN_NAME})-(?P<number>[0-9]{{5}})"
)


@dataclass(frozen=True, slots=True)
class ChunkId:
    """A chunk's id. `number` counts the chunks of a plan, from 1."""

    source: str
    plan: str
    number: int

    def __str__(self) -> str:
        return f"{self.source}-{self.plan}-{self.number:05d}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        match = _CHUNK_ID.fullmatch(text)
        return match and cls(match["source"], match["plan"], int(match["number"]))
