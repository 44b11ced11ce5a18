"""Rows about stores: copies of chunks, providers, space and coins, the folder, and passes.

Functions run in the caller's transaction, which has locked the chunk's row.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from sys import intern
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Interval,
    Text,
    all_,
    any_,
    bindparam,
    delete,
    exists,
    false,
    func,
    null,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY, Insert, insert

from caf_pipeline.chunk_state import GOOD, ChunkState
from caf_pipeline.errors import IllegalMove
from caf_pipeline.ledger.engine import LedgerPart, driver_connection
from caf_pipeline.ledger.moves import move_row, require_state
from caf_pipeline.ledger.records import WINDOWS_REQUIRED, CopyCheck, KnownCopy, LocatedCopies
from caf_pipeline.ledger.sql_files import query
from caf_pipeline.ledger.tables import (
    CAF_FILES,
    CHAIN_LISTINGS,
    CHUNK_COPIES,
    FOLDER_STORE,
    FULL_READS,
    PROVIDERS,
    REPLICAS,
    SOURCES,
    STORAGE_PLANS,
    TIMESTAMPTZ,
    TRANSACTIONS,
)
from caf_pipeline.ledger.views import CHUNKS
from caf_pipeline.records import Chunk, Copy, Lease, ProviderRecord, StoragePlanRow

_UNANSWERED: Final = (
    update(CHUNK_COPIES)
    .where(CHUNK_COPIES.c.caf_file_id == bindparam("id"))
    .values(unanswered_at=func.now())
)
# A full read counts as long as its copy does.
_AGREE: Final = (
    update(FULL_READS)
    .where(
        FULL_READS.c.caf_file_id == bindparam("id"),
        FULL_READS.c.merkle_root == bindparam("root"),
        FULL_READS.c.read_at == bindparam("at"),
    )
    .values(agreed_sha256=bindparam("agreed_sha256"))
)
_END_FULL_READ: Final = delete(FULL_READS).where(
    FULL_READS.c.caf_file_id == bindparam("id"),
    ~exists().where(
        REPLICAS.c.caf_file_id == bindparam("id"),
        REPLICAS.c.provider == FULL_READS.c.provider,
        REPLICAS.c.listed,
        REPLICAS.c.fault == "",
    ),
)
_READ_WHOLE: Final = (
    update(CAF_FILES).where(CAF_FILES.c.caf_file_id == bindparam("id")).values(unread=null())
)
_UNLIST: Final = (
    update(REPLICAS)
    .where(
        REPLICAS.c.caf_file_id == bindparam("id"),
        REPLICAS.c.provider != all_(bindparam("but", type_=ARRAY(Text))),
    )
    .values(listed=false(), checked_at=func.now(), windows=0, last_window=null())
)
_HAS_RIGHT_COPY: Final = select(
    exists().where(
        REPLICAS.c.caf_file_id == bindparam("id"), REPLICAS.c.listed, REPLICAS.c.fault == ""
    )
)
_COPIES: Final = (
    select(
        REPLICAS.c.provider,
        REPLICAS.c.proof,
        REPLICAS.c.listed,
        REPLICAS.c.last_proven,
        REPLICAS.c.windows,
        REPLICAS.c.fault,
        REPLICAS.c.checked_at,
        REPLICAS.c.last_window,
    )
    .join(CAF_FILES, CAF_FILES.c.caf_file_id == REPLICAS.c.caf_file_id)
    .order_by(REPLICAS.c.provider)
)
_COPIES_OF_CHUNK: Final = _COPIES.where(CAF_FILES.c.name == bindparam("chunk"))
_COPIES_OF_SOURCE: Final = (
    _COPIES.add_columns(CAF_FILES.c.name)
    .join(SOURCES, SOURCES.c.source_id == CAF_FILES.c.source_id)
    .where(SOURCES.c.name == bindparam("source"))
)


class Replicas(LedgerPart):
    """Records the copies of chunks."""

    def list(self, chunk: str) -> Sequence[KnownCopy]:
        return [KnownCopy(**row._asdict()) for row in self._rows(_COPIES_OF_CHUNK, chunk=chunk)]

    def of_source(self, source: str) -> Mapping[str, Sequence[KnownCopy]]:
        """Return the copies of each chunk of a source, by the chunk's name."""
        copies = defaultdict[str, list[KnownCopy]](list)
        for row in self._rows(_COPIES_OF_SOURCE, source=source):
            values = row._asdict()
            copies[values.pop("name")].append(KnownCopy(**values))
        return copies

    def record_verified(self, lease: Lease, chunk: str, copies: Sequence[Copy]) -> None:
        """Move uploading → verified. Unlist other copies."""
        with self._engine.begin() as connection:
            states = ChunkState.UPLOADING, ChunkState.VERIFIED
            changes = {"verified_at": func.now()}
            moved = move_row(connection, lease, chunk, *states, copy_changes=changes)
            record_verified(connection, moved.caf_file_id, copies)

    def record_checks(
        self,
        lease: Lease,
        chunk: str,
        checks: Sequence[CopyCheck],
        *,
        again_in: float | None = None,
        enough: int = 0,
    ) -> None:
        """Write the results of a check of a located or damaged chunk's copies.

        Copies without a result are no longer listed. The next proof window is due for a check in
        `again_in` seconds (None: never), unless `enough` copies have `WINDOWS_REQUIRED` windows.
        """
        with self._engine.begin() as connection:
            caf_file_id = require_state(connection, lease, chunk, GOOD, "checked")
            unlist(connection, caf_file_id, but=[check.copy.provider for check in checks])
            for check in checks:
                record_check(connection, caf_file_id, check)
            values = {
                "id": caf_file_id,
                "again_in": again_in,
                "enough": enough,
                "required": WINDOWS_REQUIRED,
                "unanswered": any(check.unanswered for check in checks),
            }
            connection.exec_driver_sql(query("record_copy_check"), values)
            connection.execute(_END_FULL_READ, {"id": caf_file_id})

    def record_fault(self, lease: Lease, chunk: str, check: CopyCheck) -> None:
        """Write a copy's fault before the other copies are known. They keep what they have."""
        with self._engine.begin() as connection:
            caf_file_id = require_state(connection, lease, chunk, GOOD, "checked")
            record_check(connection, caf_file_id, check)
            connection.execute(_END_FULL_READ, {"id": caf_file_id})

    def record_unanswered(self, lease: Lease, chunk: str) -> None:
        """No copy answered. Nothing else changes."""
        with self._engine.begin() as connection:
            caf_file_id = require_state(connection, lease, chunk, GOOD, "checked")
            connection.execute(_UNANSWERED, {"id": caf_file_id})

    def record_full_read(
        self,
        lease: Lease,
        chunk: str,
        provider: str,
        *,
        opened_with: str | None = None,
        tail_sha256: bytes | None = None,
    ) -> None:
        """Record that a provider returned all stored bytes, with the right Merkle root.

        `opened_with` is the recipient of the identity that opened them, and `tail_sha256` that of
        the manifest and all bytes behind it. The record ends with the copy, or when the chunk
        becomes damaged, or is located or posted again.
        """
        with self._engine.begin() as connection:
            caf_file_id = require_state(connection, lease, chunk, GOOD, "read back")
            values = {
                "id": caf_file_id,
                "provider": provider,
                "opened_with": opened_with,
                "tail_sha256": tail_sha256,
            }
            connection.exec_driver_sql(query("record_full_read"), values)
            connection.execute(_READ_WHOLE, {"id": caf_file_id})

    def record_agreement(self, chunk: Chunk, agreed_sha256: bytes) -> None:
        """Record that the manifest of this full read agrees with the ledger.

        Does nothing if the full read has ended or was repeated since `chunk` was read.
        """
        values = {"id": chunk.caf_file_id, "root": chunk.merkle_root, "at": chunk.read_back_at}
        self._execute(_AGREE, agreed_sha256=agreed_sha256, **values)

    def record_whole(self, lease: Lease, chunk: str) -> None:
        """Record that a restored chunk's bytes have its root, and are those that made its rows."""
        with self._engine.begin() as connection:
            caf_file_id = require_state(connection, lease, chunk, GOOD, "read as a whole")
            connection.execute(_READ_WHOLE, {"id": caf_file_id})


def record_check(connection: Connection, caf_file_id: int, check: CopyCheck) -> None:
    """Write the result of a check of one copy."""
    values = {
        **asdict(check.copy),
        "id": caf_file_id,
        "window": check.window,
        "fault": check.fault,
        "apart": check.apart,
    }
    connection.exec_driver_sql(query("record_replica_check"), values)


def forget_full_read(connection: Connection, caf_file_id: int) -> None:
    """Delete the record of the chunk's full read."""
    connection.execute(delete(FULL_READS).where(FULL_READS.c.caf_file_id == caf_file_id))


def record_verified(connection: Connection, caf_file_id: int, copies: Sequence[Copy]) -> None:
    """Write copies that were read back. Unlist others."""
    unlist(connection, caf_file_id)
    for copy in copies:
        replica = {"provider": copy.provider, "proof": copy.proof, "last_proven": copy.last_proven}
        connection.exec_driver_sql(query("record_verified"), {**replica, "id": caf_file_id})


def unlist(connection: Connection, caf_file_id: int, *, but: Sequence[str] = ()) -> None:
    """Mark copies as no longer listed."""
    connection.execute(_UNLIST, {"id": caf_file_id, "but": list(but)})


def require_right_copy(connection: Connection, caf_file_id: int, chunk: str) -> None:
    """Raise IllegalMove if no listed copy had right bytes at the last check."""
    if not connection.execute(_HAS_RIGHT_COPY, {"id": caf_file_id}).scalar_one():
        raise IllegalMove(
            f"chunk {chunk} cannot be located again: no listed copy has the right bytes",
            hint="repair it first",
        )


def _transferred(rate: Column[Any]) -> Insert:
    """The new rate is the mean of the old and this: three uploads show a slow provider."""
    statement = insert(PROVIDERS)
    measured = statement.excluded[rate.name]
    mean = func.coalesce((rate + measured) / 2, measured, rate)
    return statement.on_conflict_do_update(
        index_elements=[PROVIDERS.c.provider], set_={"failures": 0, rate: mean}
    )


_UPLOADED: Final = _transferred(PROVIDERS.c.upload_rate)
_DOWNLOADED: Final = _transferred(PROVIDERS.c.download_rate)
_FIRST_FAILURE: Final = insert(PROVIDERS).values(failures=1, failed_at=func.clock_timestamp())
_FAILED: Final = _FIRST_FAILURE.on_conflict_do_update(
    index_elements=[PROVIDERS.c.provider],
    set_={"failures": PROVIDERS.c.failures + 1, "failed_at": _FIRST_FAILURE.excluded.failed_at},
)


class ProviderRecords(LedgerPart):
    """Measured rates and failures by provider, shared by all runs. Safe in threads.

    Each count is one statement, so that concurrent runs lose none. Source: "Server limits" in the
    notes on Jackal's protocol.
    """

    def all(self) -> Mapping[str, ProviderRecord]:
        return {
            row.provider: ProviderRecord(**row._asdict())
            for row in self._rows(select(PROVIDERS).order_by(PROVIDERS.c.provider))
        }

    def uploaded(self, provider: str, size_bytes: int, seconds: float) -> None:
        self._execute(_UPLOADED, provider=provider, upload_rate=_rate(size_bytes, seconds))

    def downloaded(self, provider: str, size_bytes: int, seconds: float) -> None:
        self._execute(_DOWNLOADED, provider=provider, download_rate=_rate(size_bytes, seconds))

    def failed(self, provider: str) -> None:
        self._execute(_FAILED, provider=provider)


def _rate(size_bytes: int, seconds: float) -> float | None:
    return size_bytes / seconds if size_bytes > 0 and seconds > 0 else None


_PLAN_ROWS: Final = select(
    STORAGE_PLANS,
    exists()
    .where(
        TRANSACTIONS.c.account == STORAGE_PLANS.c.account,
        TRANSACTIONS.c.purpose == "buy",
        TRANSACTIONS.c.outcome.is_(None),
    )
    .label("purchase_pending"),
).order_by(STORAGE_PLANS.c.account)


class StoragePlans(LedgerPart):
    """The last reading of each account's plan and balance."""

    def record(
        self,
        account: str,
        *,
        read_at: datetime,
        balance: int,
        plan: tuple[int, int, datetime] | None,
        starts_at: datetime | None = None,
        bought: bool = False,
    ) -> None:
        """`plan`: bytes of space, bytes used, end. `bought`: our purchase has just set the end."""
        space_bytes, used_bytes, ends_at = plan or (None, None, None)
        self._execute(
            query("record_storage_plan"),
            account=account,
            read_at=read_at,
            balance=balance,
            bought=bought,
            space_bytes=space_bytes,
            used_bytes=used_bytes,
            starts_at=starts_at,
            ends_at=ends_at,
        )

    def list(self) -> Sequence[StoragePlanRow]:
        return [StoragePlanRow(**row._asdict()) for row in self._rows(_PLAN_ROWS)]

    def last(self, account: str) -> StoragePlanRow | None:
        """Return the last reading of one account."""
        return next((row for row in self.list() if row.account == account), None)


_MARK_FOLDER: Final = insert(FOLDER_STORE).on_conflict_do_nothing(
    index_elements=[FOLDER_STORE.c.only_row]
)
_READ_FOLDER: Final = select(FOLDER_STORE.c.id)


class FolderStores(LedgerPart):
    """Keeps the id of the folder store."""

    def folder_store(self) -> str | None:
        """None before `mark_folder_store`."""
        folder_id: str | None = self._scalar(_READ_FOLDER)
        return folder_id

    def mark_folder_store(self, folder_id: str) -> str:
        """Record a folder's id, unless there is one; return the recorded id."""
        with self._engine.begin() as connection:
            connection.execute(_MARK_FOLDER, {"only_row": True, "id": folder_id})
            return str(connection.execute(_READ_FOLDER).scalar_one())


_READ_ROWS: Final = 10_000
_MARKED: Final = 1_000  # rows that one statement locks; a chunk's run may wait for them

_PASS: Final = insert(CHAIN_LISTINGS).values(
    next_at=func.now() + bindparam("again_in", type_=Interval)
)
# A pass is due at most an hour after the last. A later time was written while the clock was wrong.
_BEGIN: Final = _PASS.on_conflict_do_update(
    index_elements=[CHAIN_LISTINGS.c.store],
    set_={"next_at": _PASS.excluded.next_at},
    where=or_(
        CHAIN_LISTINGS.c.next_at <= func.now(),
        CHAIN_LISTINGS.c.next_at > func.now() + timedelta(hours=1),
    ),
).returning(CHAIN_LISTINGS.c.store)
_BEGAN: Final = bindparam("began", type_=TIMESTAMPTZ)
# A later check or move is more recent than the list.
_SUSPECT: Final = (
    update(CHUNK_COPIES)
    .where(
        CHUNK_COPIES.c.caf_file_id == any_(bindparam("ids", type_=ARRAY(BigInteger))),
        CAF_FILES.c.caf_file_id == CHUNK_COPIES.c.caf_file_id,
        CAF_FILES.c.state == "located",
        CHUNK_COPIES.c.state == "verified",
        func.greatest(CHUNK_COPIES.c.updated_at, CHUNK_COPIES.c.checked_at) < _BEGAN,
    )
    .values(suspected_at=_BEGAN)
)
_CLEAR: Final = (
    update(CHUNK_COPIES).where(CHUNK_COPIES.c.suspected_at < _BEGAN).values(suspected_at=null())
)
_END: Final = (
    update(CHAIN_LISTINGS)
    .where(CHAIN_LISTINGS.c.store == bindparam("name"))
    .values(next_at=_BEGAN + bindparam("again_in", type_=Interval))
)
_END_WHOLE: Final = _END.values(whole_at=_BEGAN)
_WHOLE: Final = select(CHAIN_LISTINGS.c.store, CHAIN_LISTINGS.c.whole_at).where(
    CHAIN_LISTINGS.c.whole_at.is_not(None)
)
_SUSPICIONS: Final = select(
    select(CHAIN_LISTINGS.c.whole_at)
    .where(CHAIN_LISTINGS.c.store == bindparam("store"))
    .scalar_subquery()
    .label("whole_at"),
    select(func.count())
    .join_from(CHUNKS, SOURCES, SOURCES.c.source_id == CHUNKS.c.source_id)
    .where(
        SOURCES.c.name == bindparam("source"),
        CHUNKS.c.chunk_state == "located",
        CHUNKS.c.copy_state == "verified",
        CHUNKS.c.suspected_at.is_not(None),
    )
    .scalar_subquery()
    .label("suspected"),
)


class ChainListings(LedgerPart):
    """Records passes through a store's lists: when one is due, and which chunks it suspects."""

    def begin(self, store: str, again_in: float) -> bool:
        """Begin a pass if one is due; return whether it was.

        If the pass never ends, the next is due in `again_in` seconds.
        """
        begun = self._scalar(_BEGIN, store=store, again_in=timedelta(seconds=again_in))
        return begun is not None

    def located_copies(self) -> tuple[datetime, list[LocatedCopies]]:
        """At the returned time. Needs about 500 bytes of memory a chunk."""
        copies: list[LocatedCopies] = []
        with self._engine.begin() as connection:
            began: datetime = connection.execute(select(func.now())).scalar_one()
            with driver_connection(connection).cursor("located", binary=True) as cursor:
                cursor.execute(query("located_copies"))
                while rows := cursor.fetchmany(_READ_ROWS):
                    for caf_file_id, archive_id, merkle_root, owner, start, providers in rows:
                        place = (merkle_root, intern(owner), start)
                        archive = archive_id and intern(archive_id)
                        copies.append(
                            LocatedCopies(
                                caf_file_id, archive, place, tuple(map(intern, providers))
                            )
                        )
        return began, copies

    def suspect(self, began: datetime, caf_file_ids: Collection[int]) -> None:
        """Mark chunks to be checked first, except those moved or checked since the pass began."""
        ids = sorted(caf_file_ids)
        for first in range(0, len(ids), _MARKED):
            self._execute(_SUSPECT, began=began, ids=ids[first : first + _MARKED])

    def end(self, store: str, began: datetime, again_in: float, *, whole: bool) -> None:
        """The next pass is due `again_in` seconds after this one began.

        After a whole pass, only chunks that it suspected remain suspected.
        """
        with self._engine.begin() as connection:
            if whole:
                connection.execute(_CLEAR, {"began": began})
            values = {"name": store, "began": began, "again_in": timedelta(seconds=again_in)}
            connection.execute(_END_WHOLE if whole else _END, values)

    def whole(self) -> Mapping[str, datetime]:
        return {row.store: row.whole_at for row in self._rows(_WHOLE)}

    def suspicions(self, store: str, source: str) -> tuple[datetime | None, int]:
        """When the last whole pass began, and the number of suspected chunks."""
        (row,) = self._rows(_SUSPICIONS, store=store, source=source)
        return row.whole_at, row.suspected
