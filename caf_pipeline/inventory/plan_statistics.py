"""What a plan's objects come to: sizes, storage classes, requests.

One pass over the plan's files, in bounded memory.
"""

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

NAMED: Final = 5
"""Largest and smallest objects that are named."""

_BITS_A_STEP: Final = 2
_FIRST_BITS: Final = 10
"""Steps of the histogram: up to 1 KiB, then four times as much each, so that 32 GiB are the
14th.
"""

_STEPS: Final = f"""SELECT storage_class, CASE WHEN size_bytes = 0 THEN -1 WHEN size_bytes <
    {1 << _FIRST_BITS} THEN 0
        ELSE (floor(log2(size_bytes))::INTEGER - {_FIRST_BITS}) // {_BITS_A_STEP} + 1 END AS step,
        count(*) AS objects, sum(size_bytes)::BIGINT AS bytes,
        sum(greatest(1, (size_bytes + {{part_bytes}} - 1) // {{part_bytes}})) FILTER (NOT is_split)
            AS gets,
        count(*) FILTER (size_bytes > {{part_bytes}} AND NOT is_split AND checksum IN
            {tuple(CHECKSUMS)}) AS checksums
    FROM planned GROUP BY ALL ORDER BY ALL"""


_Name = TypeVar("_Name", int, str)


@dataclass(frozen=True, slots=True)
class SizeStep:
    """Objects of at least `from_bytes` and less than `below_bytes`; 0 to 1 for empty ones."""

    from_bytes: int
    below_bytes: int
    objects: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PlanStatistics:
    """What the objects in chunks of a plan, or of several, come to.

    Attributes: sizes: a histogram, from the smallest size that occurs to the largest without a gap;
        empty for no objects. storage_classes: objects and bytes by class. largest, smallest: (key,
        size) of some, in this order. get_requests: that fetch the objects, the larger ones in
        pieces. checksum_requests: that ask for S3's own checksum of objects which come in pieces,
        and are in one chunk. split_objects: of the objects, those that are larger than a chunk;
        `parts` are theirs, a chunk each.
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
        """Return what objects there are, as a program reads it."""
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
    """Return what the plans in these folders come to; spills go into the first of them.

    Args:
        folders: of plans; none gives zeros.
        part_bytes: of one GET of a larger object.

    Raises:
        CafError: a file is missing or damaged. StagingError: there is no room to spill.
    """
    if not folders:
        return PlanStatistics(0, 0, (), {}, (), (), 0, 0)
    try:
        return _counted(folders, part_bytes)
    except IntegrityError as error:
        raise unreadable(
            f"the plan in {', '.join(map(str, folders))}", error.__cause__ or error
        ) from error


def _counted(folders: Sequence[Path], part_bytes: int) -> PlanStatistics:
    beside = folders[0] / OBJECTS_FILE
    split = [split_counts(folder) for folder in folders]
    in_parts = sum(
        -(-part.size_bytes // part_bytes) for folder in folders for _, part in read_parts(folder)
    )
    with translate_errors(beside), Query(beside, DEFAULT_BUDGET, functions={}, macros=()) as query:
        for number, folder in enumerate(folders):
            query.table(f"objects_{number}", folder / OBJECTS_FILE)
            query.table(f"chunks_{number}", folder / CHUNKS_FILE)
        # What waits for the next plan is in the file, too, past the last chunk.
        planned = (
            f"SELECT key, size_bytes, storage_class, checksum, chunk_number <= {parts} AS is_split "
            f"FROM objects_{number}"
            f" WHERE chunk_number <= (SELECT count(*) FROM chunks_{number})"
            for number, (_, parts) in enumerate(split)  # whose chunks come first
        )
        query.view("planned", " UNION ALL ".join(planned))
        rows = query.rows(_STEPS.format(part_bytes=part_bytes))
        named = "SELECT key, size_bytes FROM planned ORDER BY size_bytes {order}, key LIMIT {limit}"
        largest, smallest = (
            query.rows(named.format(order=order, limit=NAMED)) for order in ("DESC", "ASC")
        )
    return PlanStatistics(
        objects=sum(row[2] for row in rows),
        size_bytes=sum(row[3] for row in rows),
        sizes=_histogram(_totals((row[1], row[2], row[3]) for row in rows)),
        storage_classes=_totals((str(row[0]), row[2], row[3]) for row in rows),
        largest=[(bytes(key).decode(), size) for key, size in largest],
        smallest=[(bytes(key).decode(), size) for key, size in smallest],
        get_requests=sum(int(row[4] or 0) for row in rows) + in_parts,
        checksum_requests=sum(row[5] for row in rows),
        split_objects=sum(objects for objects, _ in split),
        parts=sum(parts for _, parts in split),
    )


def _totals(rows: Iterable[tuple[_Name, int, int]]) -> dict[_Name, tuple[int, int]]:
    """Return objects and bytes by name."""
    totals: dict[_Name, tuple[int, int]] = {}
    for name, objects, size_bytes in rows:
        before = totals.get(name, (0, 0))
        totals[name] = before[0] + objects, before[1] + size_bytes
    return totals


def _histogram(totals: Mapping[int, tuple[int, int]]) -> Sequence[SizeStep]:
    steps = range(min(totals), max(totals) + 1) if totals else ()
    return [
        SizeStep(_first_size(step), _first_size(step + 1), *totals.get(step, (0, 0)))
        for step in steps
    ]


def _first_size(step: int) -> int:
    return step + 1 if step < 1 else 1 << (_FIRST_BITS + _BITS_A_STEP * (step - 1))


BAR_CHARACTERS: Final = 40
"""Of the longest bar: with the sizes and numbers beside it a line fits a terminal of 80 columns."""


def histogram_lines(sizes: Sequence[SizeStep]) -> Sequence[str]:
    """Draw a histogram, a line a step: the sizes, a bar by the number of objects, and the
    numbers.
    """
    most = max((step.objects for step in sizes), default=0)
    lines = []
    for step in sizes:
        name = (
            "empty"
            if not step.from_bytes
            else f"< {show_size(step.below_bytes).replace('.0 ', ' ')}"
        )
        bar = "█" * round(BAR_CHARACTERS * step.objects / most) or ("▏" if step.objects else "")
        lines.append(
            f"{name:>10} {bar:<{BAR_CHARACTERS}} {step.objects:>13,} "
            f"{show_size(step.size_bytes):>10}"
        )
    return lines


_COLUMN: Final = 5
_HEADINGS: Final = ("below", "objects", "bytes")
_HEADING: Final = 8
"""Characters that a step and what is left of the first one have; a number takes four."""

_PIXELS: Final = 6
_HIGHEST: Final = 80
"""Pixels of a character's width, to which the text is stretched whatever the font, and of the
highest bar.
"""


def histogram_svg(sizes: Sequence[SizeStep]) -> str:
    """Draw a histogram as SVG: a bar a step by the number of objects, and below it the size, the
    number and the bytes.

    Its colours are read on white and on black. It has few characters, and no double quote: see who
    shows it.
    """
    most = max((step.objects for step in sizes), default=0)
    column, left = _COLUMN * _PIXELS, _HEADING * _PIXELS
    bars = "".join(
        f"M{left + (number + 0.5) * column:.0f} 84v-{max(1, round(_HIGHEST * step.objects / most))}"
        for number, step in enumerate(sizes)
        if step.objects
    )
    numbers = (
        ["empty" if not step.from_bytes else _in_four(step.below_bytes, 1024) for step in sizes],
        [_in_four(step.objects, 1000) for step in sizes],
        [_in_four(step.size_bytes, 1024) for step in sizes],
    )
    width = left + len(sizes) * column
    rows = ""
    for y, heading, its in zip((96, 109, 122), _HEADINGS, numbers, strict=True):
        cells = "".join(f"{each:^{_COLUMN}}" for each in its)
        rows += f"<text y='{y}' textLength='{width}'>{heading:<{_HEADING}}{cells}</text>"
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='126' "
        "font-family='monospace' font-size='10'"
        " fill='gray'><style>text{white-space:pre}</style><path stroke='slateblue' "
        f"stroke-width='24' d='{bars}'/>{rows}</svg>"
    )


def _in_four(number: float, base: int) -> str:
    """Return a number in four characters, e.g. "9.9K" or "256M"."""
    units, unit = iter("KMGTP"), ""
    while number >= 999.5:
        number, unit = number / base, next(units)
    return (f"{number:.1f}" if number < 9.95 else f"{number:.0f}").removesuffix(".0") + unit
