"""Numbers with a noun, sizes with a unit, ages, and tables of them."""

from collections.abc import Container, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return `1 chunk`, `2 chunks`, `1,000 copies`. `plural` is for irregular nouns."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def show_age(age: timedelta) -> str:
    """Return an age such as "5 minutes ago"."""
    hours = age / timedelta(hours=1)
    if hours < 2:
        return f"{counted(int(hours * 60), 'minute')} ago"
    return f"{hours:.0f} hours ago" if hours < 48 else f"{hours / 24:.0f} days ago"


def show_size(size_bytes: int) -> str:
    """Return a size such as "29.8 GiB", exact below 1 KiB."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    size = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def show_coins(amount: int) -> str:
    """Format an amount of ujkl: 1 JKL is 1,000,000 ujkl."""
    return (
        f"{amount:,} ujkl ({amount / 1_000_000:,.2f} JKL)"
        if amount >= 10_000
        else f"{amount:,} ujkl"
    )


def show_time(moment: datetime) -> str:
    """Format a time in UTC, to the second."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def table_lines(
    names: Sequence[str], rows: Iterable[Sequence[str]], *, right: Container[str] = ()
) -> Iterator[str]:
    """Yield the lines of a table. No cell is cut or wrapped, because users copy ids.

    The columns named in `right` are aligned at the right.
    """
    table = [names, *rows]
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    for row in table:
        cells = (
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(names, row, widths, strict=True)
        )
        yield "  ".join(cells).rstrip()
