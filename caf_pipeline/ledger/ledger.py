"""The ledger: one Postgres database with an object for each topic, e.g. `ledger.leases`.

Opening a ledger loads the topics and SQLAlchemy, since many modules import the class as a type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from caf_pipeline.records import LEASE_SECONDS

if TYPE_CHECKING:
    from caf_pipeline.ledger.database import Database
    from caf_pipeline.ledger.transactions import TransactionLog
    from caf_pipeline.system.processes import Holder
    from caf_pipeline.waits import Waits


class Ledger:
    """Gives access to one ledger database. Safe in threads.

    Each method of a topic is one transaction, durable when it returns. Every method raises
    LedgerUnreachable if the database does not answer.
    """

    def __init__(
        self, database: Database, *, store: str = "jackal", lease_seconds: float = LEASE_SECONDS
    ) -> None:
        """Does not connect. `store`: a kind of the settings."""
        from caf_pipeline.ledger.chunk_moves import ChunkMoves
        from caf_pipeline.ledger.chunks import Chunks
        from caf_pipeline.ledger.claims import FailedReads, Skips
        from caf_pipeline.ledger.current_content import CurrentContent
        from caf_pipeline.ledger.engine import LedgerEngine
        from caf_pipeline.ledger.export import Exports
        from caf_pipeline.ledger.import_chunk import ChunkImport
        from caf_pipeline.ledger.leases import Leases
        from caf_pipeline.ledger.lookup import Lookup
        from caf_pipeline.ledger.notices import Notices
        from caf_pipeline.ledger.runs import (
            Controls,
            LaunchableChunks,
            Progress,
            Staging,
            StrayRows,
        )
        from caf_pipeline.ledger.sources import Plans, SourceRemoval, Sources
        from caf_pipeline.ledger.stores import (
            ChainListings,
            FolderStores,
            ProviderRecords,
            Replicas,
            StoragePlans,
        )

        self.database = database
        self._engine = engine = LedgerEngine(database)
        self._lease_seconds = lease_seconds
        self.lookup = Lookup(database)
        self.leases = Leases(engine, lease_seconds)
        self.sources = Sources(engine)
        self.removal = SourceRemoval(engine)
        self.plans = Plans(engine)
        self.skips = Skips(engine)
        self.chunks = Chunks(engine)
        self.launchable = LaunchableChunks(engine)
        self.moves = ChunkMoves(engine, store)
        self.replicas = Replicas(engine)
        self.staging = Staging(engine)
        self.read_failures = FailedReads(engine)
        self.content = CurrentContent(engine)
        self.notices = Notices(engine)
        self.progress = Progress(engine)
        self.exports = Exports(engine)
        self.rebuilds = ChunkImport(engine, store)
        self.stray_rows = StrayRows(engine)
        self.chain_listings = ChainListings(engine)
        self.folder_store = FolderStores(engine)
        self.storage_plans = StoragePlans(engine)
        self.providers = ProviderRecords(engine)
        self.controls = Controls(engine)

    def bring_up(self, waits: Waits) -> None:
        self._engine.bring_up(waits)

    def close(self) -> None:
        """A later call opens new connections."""
        self.lookup.close()
        self._engine.close()

    def transactions(self, holder: Holder) -> TransactionLog:
        from caf_pipeline.ledger.transactions import TransactionLog

        return TransactionLog(self._engine, holder, lease_seconds=self._lease_seconds)
