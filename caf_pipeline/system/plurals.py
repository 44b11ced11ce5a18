"""A number with its noun, as messages and commands say it."""


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return `1 chunk`, `2 chunks`, `1,000 copies`; `plural` where it is not the noun and an s."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
