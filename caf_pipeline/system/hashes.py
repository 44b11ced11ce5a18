"""The type of a running hash. hashlib's own classes have no public name."""

from typing import Protocol, Self

from typing_extensions import Buffer


class RunningHash(Protocol):
    """A hash that accepts bytes in pieces, like `hashlib.sha256()`."""

    def update(self, data: Buffer, /) -> None: ...

    def digest(self) -> bytes: ...

    def hexdigest(self) -> str: ...

    def copy(self) -> Self: ...
