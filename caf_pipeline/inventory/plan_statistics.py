"""Sizes, storage classes and requests of a plan's objects, in bounded memory."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from caf_pipeline.errors import IntegrityError
from caf_pipeline.inventory.objects import CHECKSUMS
from caf_pipeline.inventory.plan import (
    CHUNKS_FILE,
    OBJECTS_FILE,
    read_parts,
    split_counts,
    unreadable,
)
from caf_pipeline.system.parquet import DEFAULT_BUDGET, Query, translate_errors
from caf_pipeline.system.quantities import show_size

EXAMPLE_COUNT: Final = 5

_BITS_A_STEP: Final = 2
_FIRST_BITS: Final = 10
"""Steps end at 1 KiB, and then at four times the step before; 32 GiB is in the 14th."""

_STEPS: Final = f"""
    SELECT
        storage_class,
        CASE
            WHEN size_bytes = 0 THEN -1
            WHEN size_bytes < {1 << _FIRST_BITS} THEN 0
            ELSE (floor(log2(size_bytes))::INTEGER - {_FIRST_BITS}) // {_BITS_A_STEP} + 1
        END AS step,
        count(*) AS objects,
        sum(size_bytes)::BIGINT AS bytes,
        sum(greatest(1, (size_bytes + {{part_bytes}} - 1) // {{part_bytes}}))
            FILTER (NOT is_split) AS gets,
        count(*) FILTER (
            size_bytes > {{part_bytes}}
            AND NOT is_split
            AND checksum IN {tuple(CHECKSUMS)}
        ) AS checksums
    FROM planned
    GROUP BY ALL
    ORDER BY ALL"""


_Name = TypeVar("_Name", int, str)


@dataclass(frozen=True, slots=True)
class SizeStep:
    """Objects of `from_bytes` up to less than `below_bytes`.

    Empty objects are in the step from 0 to 1.
    """

    from_bytes: int
    below_bytes: int
    objects: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PlanStatistics:
    """Statistics of planned objects.

    Larger objects are read in pieces, each by a GET.
    """

    objects: int
    size_bytes: int
    sizes: Sequence[SizeStep]
    storage_classes: Mapping[str, tuple[int, int]]
    largest: Sequence[tuple[str, int]]
    smallest: Sequence[tuple[str, int]]
    get_requests: int
    checksum_requests: int
    split_objects: int = 0
    parts: int = 0

    def as_json(self) -> dict[str, object]:
        return {
            "sizes": [
                {
                    "from": step.from_bytes,
                    "below": step.below_bytes,
                    "objects": step.objects,
                    "bytes": step.size_bytes,
                }
                for step in self.sizes
            ],
            "storage_classes": {
                name: {"objects": n, "bytes": size}
                for name, (n, size) in self.storage_classes.items()
            },
            "largest": [{"key": key, "bytes": size} for key, size in self.largest],
            "smallest": [{"key": key, "bytes": size} for key, size in self.smallest],
            "split_objects": self.split_objects,
            "parts": self.parts,
        }


def plan_statistics(folders: Sequence[Path], *, part_bytes: int) -> PlanStatistics:
    """Compute the statistics of plans; spills go to the first folder.

    `part_bytes` is the size of one GET. Raises CafError and StagingError.
    """
    if not folders:
        return PlanStatistics(0, 0, (), {}, (), (), 0, 0)
    try:
        return _query_statistics(folders, part_bytes)
    except IntegrityError as error:
        raise unreadable(
            f"the plan in {', '.join(map(str, folders))}", error.__cause__ or error
        ) from error


def _query_statistics(folders: Sequence[Path], part_bytes: int) -> PlanStatistics:
    beside = folders[0] / OBJECTS_FILE
    split = [split_counts(folder) for folder in folders]
    in_parts = sum(
        -(-part.size_bytes // part_bytes) for folder in folders for _, part in read_parts(folder)
    )
    with translate_errors(beside), Query(beside, DEFAULT_BUDGET, functions={}, macros=()) as query:
        for number, folder in enumerate(folders):
            query.table(f"objects_{number}", folder / OBJECTS_FILE)
            query.table(f"chunks_{number}", folder / CHUNKS_FILE)
        # Chunks of parts come first. Objects that wait for the next plan follow the last chunk.
        planned = (
            f"""SELECT key, size_bytes, storage_class, checksum, chunk_number <= {parts} AS is_split
            FROM objects_{number}
            WHERE chunk_number <= (SELECT count(*) FROM chunks_{number})"""
            for number, (_, parts) in enumerate(split)
        )
        query.view("planned", " UNION ALL ".join(planned))
        rows = query.rows(_STEPS.format(part_bytes=part_bytes))
        largest, smallest = (
            query.rows(
                f"""SELECT key, size_bytes
                FROM planned
                ORDER BY size_bytes {order}, key
                LIMIT {EXAMPLE_COUNT}"""
            )
            for order in ("DESC", "ASC")
        )
    totals = _totals((row[1], row[2], row[3]) for row in rows)
    steps = range(min(totals), max(totals) + 1) if totals else ()
    return PlanStatistics(
        objects=sum(row[2] for row in rows),
        size_bytes=sum(row[3] for row in rows),
        sizes=[
            SizeStep(_first_size(step), _first_size(step + 1), *totals.get(step, (0, 0)))
            for step in steps
        ],
        storage_classes=_totals((str(row[0]), row[2], row[3]) for row in rows),
        largest=[(bytes(key).decode(), size) for key, size in largest],
        smallest=[(bytes(key).decode(), size) for key, size in smallest],
        get_requests=sum(int(row[4] or 0) for row in rows) + in_parts,
        checksum_requests=sum(row[5] for row in rows),
        split_objects=sum(objects for objects, _ in split),
        parts=sum(parts for _, parts in split),
    )


def _totals(rows: Iterable[tuple[_Name, int, int]]) -> dict[_Name, tuple[int, int]]:
    totals: dict[_Name, tuple[int, int]] = {}
    for name, objects, size_bytes in rows:
        before = totals.get(name, (0, 0))
        totals[name] = before[0] + objects, before[1] + size_bytes
    return totals


def _first_size(step: int) -> int:
    return step + 1 if step < 1 else 1 << (_FIRST_BITS + _BITS_A_STEP * (step - 1))


BAR_CHARACTERS: Final = 40
"""Lines fit 80 columns."""


def histogram_lines(sizes: Sequence[SizeStep]) -> Sequence[str]:
    """Draw a line for each step."""
    most = max((step.objects for step in sizes), default=0)
    lines = []
    for step in sizes:
        below = f"< {show_size(step.below_bytes).replace('.0 ', ' ')}"
        name = below if step.from_bytes else "empty"
        bar = "█" * round(BAR_CHARACTERS * step.objects / most) or ("▏" if step.objects else "")
        lines.append(
            f"{name:>10} {bar:<{BAR_CHARACTERS}} {step.objects:>13,} "
            f"{show_size(step.size_bytes):>10}"
        )
    return lines


_COLUMN: Final = 5
_HEADINGS: Final = ("below", "objects", "bytes")
_HEADING: Final = 8

_PIXELS: Final = 6
"""A character's width, to which the text is stretched in every font."""

_HIGHEST: Final = 80


def histogram_svg(sizes: Sequence[SizeStep]) -> str:
    """Draw a histogram of object counts as SVG, readable on white and on black.

    It is short and has no double quotes, so that Markdown can embed it.
    """
    most = max((step.objects for step in sizes), default=0)
    column, margin = _COLUMN * _PIXELS, _HEADING * _PIXELS
    bars = ""
    for number, step in enumerate(sizes):
        if step.objects:
            height = max(1, round(_HIGHEST * step.objects / most))
            bars += f"M{margin + (number + 0.5) * column:.0f} 84v-{height}"
    numbers = (
        ["empty" if not step.from_bytes else _in_four(step.below_bytes, 1024) for step in sizes],
        [_in_four(step.objects, 1000) for step in sizes],
        [_in_four(step.size_bytes, 1024) for step in sizes],
    )
    width = margin + len(sizes) * column
    rows = ""
    for y, heading, row in zip((96, 109, 122), _HEADINGS, numbers, strict=True):
        cells = "".join(f"{number:^{_COLUMN}}" for number in row)
        rows += f"<text y='{y}' textLength='{width}'>{heading:<{_HEADING}}{cells}</text>"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='126' "
        "font-family='monospace' font-size='10'"
        " fill='gray'><style>text{white-space:pre}</style><path stroke='slateblue' "
        f"stroke-width='24' d='{bars}'/>{rows}</svg>"
    )


def _in_four(number: float, base: int) -> str:
    units, unit = iter("KMGTP"), ""
    while number >= 999.5:
        number, unit = number / base, next(units)
    return (f"{number:.1f}" if number < 9.95 else f"{number:.0f}").removesuffix(".0") + unit
