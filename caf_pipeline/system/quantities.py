"""Numbers as messages and commands say them: with their noun, or with a unit of bytes."""


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return `1 chunk`, `2 chunks`, `1,000 copies`; `plural` where it is not the noun and an s."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def show_size(size_bytes: int) -> str:
    """Return a size for people, e.g.

    "29.8 GiB": exact below 1 KiB, else in the unit that keeps it below 1,024.
    """
    if size_bytes < 1024:
        return f"{size_bytes} B"
    size = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"
