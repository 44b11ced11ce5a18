"""The chain's records, their state after a block, and the database that stores them.

A `World` is immutable: each block makes a new one. So readers need no lock, and a lagging node
answers from an older one. A `Draft` collects changes on a world or another draft, and is merged or
dropped as a whole.
"""

import sqlite3
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Account:
    """An address that ever received anything. `balance` is in ujkl."""

    address: str
    number: int
    sequence: int = 0
    balance: int = 0
    public_key: bytes = b""


@dataclass(frozen=True, slots=True)
class Plan:
    """Bought space."""

    address: str
    space_bytes: int
    used_bytes: int
    start: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class PostedFile:
    """A posted file. `provers` are the addresses with listed proofs, oldest first."""

    merkle: bytes
    owner: str
    start: int
    expires: int
    size_bytes: int
    proof_interval: int
    proof_type: int
    max_proofs: int
    note: str
    provers: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The file's identity, and its position in lists."""
        return f"{self.merkle.hex()}/{self.owner}/{self.start}/"


@dataclass(frozen=True, slots=True)
class Proof:
    """One provider's proof of one file.

    `last_proven` is the height of its last proof or of its joining. `to_prove` is the next leaf.
    """

    provider: str
    file: str
    last_proven: int
    to_prove: int = 0

    @property
    def key(self) -> str:
        """The proof's identity."""
        return f"{self.provider}/{self.file}"


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a transaction: a type and named values."""

    type: str
    attributes: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Included:
    """A transaction in a block, with the events of each message. A failed one has no events."""

    hash: str
    body: bytes
    height: int
    time: datetime
    code: int
    codespace: str
    log: str
    data: bytes
    gas_wanted: int
    gas_used: int
    events: tuple[tuple[Event, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Pending:
    """A transaction in the mempool, included at `due_height` or later."""

    hash: str
    body: bytes
    address: str
    order: int
    due_height: int


@dataclass(frozen=True, slots=True)
class Holding:
    """A file that a provider took, whether it is listed or not.

    It is proven from block `ready_height` on.
    """

    provider: str
    file: str
    root: str
    ready_height: int

    @property
    def key(self) -> str:
        """The holding's identity."""
        return f"{self.provider}/{self.file}"


WORLD_KINDS: Final[Mapping[str, type]] = {
    "account": Account,
    "plan": Plan,
    "file": PostedFile,
    "proof": Proof,
    "transaction": Included,
}

Changes = dict[tuple[str, str], Any]
"""New records by kind and key. None deletes a record."""


@dataclass(frozen=True, slots=True)
class World:
    """The state after one block."""

    height: int
    time: datetime
    tables: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: {kind: MappingProxyType({}) for kind in WORLD_KINDS}
    )

    def get(self, kind: str, key: str) -> Any:
        """Return a record or None."""
        return self.tables[kind].get(key)

    @property
    def accounts(self) -> Mapping[str, Account]:
        return self.tables["account"]

    @property
    def plans(self) -> Mapping[str, Plan]:
        return self.tables["plan"]

    @property
    def files(self) -> Mapping[str, PostedFile]:
        return self.tables["file"]

    @property
    def proofs(self) -> Mapping[str, Proof]:
        return self.tables["proof"]

    @property
    def transactions(self) -> Mapping[str, Included]:
        return self.tables["transaction"]

    def after(self, changes: Changes, *, height: int, time: datetime) -> "World":
        """Return the next state. Unchanged tables are shared."""
        tables = dict(self.tables)
        for kind in {kind for kind, _ in changes}:
            table = dict(tables[kind])
            for (record_kind, key), value in changes.items():
                if record_kind == kind and value is None:
                    table.pop(key, None)
                elif record_kind == kind:
                    table[key] = value
            tables[kind] = MappingProxyType(table)
        return World(height, time, tables)


class Draft:
    """Changes on top of a world or another draft."""

    def __init__(self, base: "World | Draft") -> None:
        self._base = base
        self.changes: Changes = {}

    def get(self, kind: str, key: str) -> Any:
        """Return a record including the changes, or None."""
        if (kind, key) in self.changes:
            return self.changes[kind, key]
        return self._base.get(kind, key)

    def put(self, kind: str, key: str, value: Any) -> None:
        """Change a record. None deletes it."""
        self.changes[kind, key] = value

    def merge(self) -> None:
        """Apply the changes to the draft below."""
        assert isinstance(self._base, Draft)
        self._base.changes.update(self.changes)


class Database:
    """The records on disk. Every `save` is one transaction and survives a killed process.

    A power cut may lose the last blocks: waiting for the disk would stall blocks behind gigabytes
    of uploads.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = NORMAL")
        self._connection.execute(
            "CREATE TABLE IF NOT EXISTS records (kind TEXT, key TEXT, value BLOB, PRIMARY KEY "
            "(kind, key)) WITHOUT ROWID"
        )
        self._connection.execute(
            "CREATE TABLE IF NOT EXISTS blocks (height INTEGER PRIMARY KEY, time TEXT NOT NULL)"
        )
        self._connection.execute(
            "CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER) WITHOUT "
            "ROWID"
        )

    def load(self, kind: str, type_: type[T]) -> dict[str, T]:
        """Return all records of a kind, by key."""
        with self._lock:
            rows = self._connection.execute(
                "SELECT key, value FROM records WHERE kind = ? ORDER BY key", (kind,)
            ).fetchall()
        return {key: msgspec.json.decode(value, type=type_) for key, value in rows}

    def save(self, changes: Changes, *, block: tuple[int, datetime] | None = None) -> None:
        """Write the changes, and a block, in one transaction."""
        gone = [name for name, value in changes.items() if value is None]
        new = [
            (*name, msgspec.json.encode(value))
            for name, value in changes.items()
            if value is not None
        ]
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany("DELETE FROM records WHERE kind = ? AND key = ?", gone)
            self._connection.executemany("INSERT OR REPLACE INTO records VALUES (?, ?, ?)", new)
            if block:
                self._connection.execute(
                    "INSERT INTO blocks VALUES (?, ?)", (block[0], block[1].isoformat())
                )
            self._connection.execute("COMMIT")

    def block_time(self, height: int) -> datetime | None:
        """Return the time of a block."""
        with self._lock:
            row = self._connection.execute(
                "SELECT time FROM blocks WHERE height = ?", (height,)
            ).fetchone()
        return datetime.fromisoformat(row[0]) if row else None

    def last_block(self) -> int:
        """Return the height of the newest block, 0 if there is none."""
        with self._lock:
            return int(
                self._connection.execute("SELECT coalesce(max(height), 0) FROM blocks").fetchone()[
                    0
                ]
            )

    def count(self, names: Iterable[str]) -> None:
        """Add one to each counter."""
        statement = (
            "INSERT INTO counters VALUES (?, 1) ON CONFLICT (name) DO UPDATE SET value = value + 1"
        )
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany(statement, [(name,) for name in names])
            self._connection.execute("COMMIT")

    def counters(self) -> dict[str, int]:
        """Return all counters."""
        with self._lock:
            return dict(self._connection.execute("SELECT name, value FROM counters").fetchall())


def utc_now() -> datetime:
    """Return the time."""
    return datetime.now(UTC)
