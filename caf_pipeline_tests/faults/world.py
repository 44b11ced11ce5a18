"""A bucket, a database, a Jackal network with a wallet, and a home; and their examination.

`World.examine` looks from the outside: at the bucket's listing, the tables, the network's state,
the staging folder, and every object read back through the product.
"""

import functools
import hashlib
import itertools
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import psycopg
from mnemonic import Mnemonic

from caf_pipeline.chunk_state import UNDER_WAY, ChunkState
from caf_pipeline.errors import CafError
from caf_pipeline.inventory.objects import S3Object
from caf_pipeline.ledger.database import database_of
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.packing import packer
from caf_pipeline.packing.journal.writer import CheckpointPace
from caf_pipeline.records import Chunk
from caf_pipeline.retrieval.reader import fetch
from caf_pipeline.run_context import RunContext
from caf_pipeline.settings import Settings
from caf_pipeline.steps import inventories, planning
from caf_pipeline.steps.audit import account_for_chunk
from caf_pipeline.store.jackal.wallet import Wallet
from caf_pipeline.system.processes import is_alive
from caf_pipeline.waits import Waits
from caf_pipeline.wiring import open_run_context
from caf_pipeline_tests.loopback.network import LoopbackNetwork
from caf_pipeline_tests.support.jackal_network import jackal_settings
from caf_pipeline_tests.support.kills import WITH_TRACEBACK, Fatal, Moments, Process
from caf_pipeline_tests.support.run_contexts import CHUNK_STEPS
from caf_pipeline_tests.support.s3_server import KEY_ID, SECRET, Bucket, client_for

SOURCE: Final = "src"
COINS: Final = 10**12
SPACE: Final = 10**12
COPIES: Final = 3
LEASE_SECONDS: Final = 30.0
TARGET_SIZE: Final = 700_000  # of a chunk; three of the objects below
ONE_CHUNK: Final = 8_000_000
"""A target size that fits all of the objects below."""

RUN_AGAIN: Final = (ChunkState.LOCATED, ChunkState.EMPTY)
"""States in which a run may die in its last step; the partition is run again."""

ROUNDS: Final = 5
"""Maximum rounds of inventory, plan and chunks until nothing is left."""

_wallets = itertools.count(1)

IDENTITY: Final = "object_version(version_id, etag, size_bytes, rewritten_at)"


class Run(Process):
    """A process that runs a chunk's steps, or everything."""

    def __init__(
        self, name: str, chunk: str, *, printed: Path, named: dict[str, Any], **options: Any
    ) -> None:
        action = functools.partial(_run, name=name, chunk=chunk, **named)
        super().__init__(action, printed=printed, **options)
        self.name = name
        self.chunk = chunk
        self._printed = printed

    def __str__(self) -> str:
        fatal = self.fatal or f"left alone after {self.seen} moments"
        return f"{self.name} of {self.chunk or 'everything'}, {fatal}, ended with {self.wait()},"

    @property
    def printed(self) -> str:
        """Return its output, which is empty in a normal run."""
        return self._printed.read_text()


def _run(
    moments: Moments, *, name: str, chunk: str, values: dict[str, Any], lease_seconds: float
) -> None:
    # Checkpoints of the packing journal as often as objects this small need, so that kills fall
    # before, in and behind them.
    packer.pace_of = lambda settings: CheckpointPace(
        due_bytes=60_000, due_outcomes=4, ahead_bytes=120_000
    )
    with _open_context(values, name, lease_seconds) as context:
        context.waits.packed = lambda *counts: moments.passing()
        context.waits.sent = lambda size_bytes: moments.passing()
        names = [chunk]
        if not chunk:
            with moments.step("take_inventory"):
                snapshot = inventories.take_inventory(context)
            with moments.step("cut_plan"):
                planning.cut_plan(context, snapshot)
            names = [chunk.name for chunk in context.ledger.chunks.list(SOURCE, UNDER_WAY)]
        for planned in names:
            for step in CHUNK_STEPS:
                with moments.step(step.__name__):
                    step(context, planned)


@contextmanager
def _open_context(values: dict[str, Any], run: str, lease_seconds: float) -> Iterator[RunContext]:
    settings = Settings.model_validate(values)
    ledger = Ledger(database_of(settings), lease_seconds=lease_seconds)
    with closing(ledger):
        ledger.bring_up(Waits())
        client = client_for(settings.source(SOURCE).endpoint_url)
        with closing(
            open_run_context(settings, SOURCE, run=run, ledger=ledger, client=client)
        ) as context:
            yield context


@dataclass
class Counts:
    """The result of examinations.

    Attributes:
        objects: located and read back right, with `size_bytes` in total.
        lost: objects neither located nor skipped with a reason, or that do not read back.
        double: objects located twice, and repeated posts of a root.
        overcharged_bytes: charged beyond the copies of located chunks.
    """

    objects: int = 0
    size_bytes: int = 0
    lost: int = 0
    double: int = 0
    overcharged_bytes: int = 0

    def add(self, other: "Counts") -> None:
        for count in fields(Counts):
            value = getattr(self, count.name) + getattr(other, count.name)
            setattr(self, count.name, value)


@dataclass
class Verdict(Counts):
    """The result of one examination; `complaints` are all faults as sentences."""

    complaints: list[str] = field(default_factory=list)

    def complain(self, sentence: str) -> None:
        self.complaints.append(sentence)

    def require(self) -> None:
        """Raise AssertionError with every complaint, if there is one."""
        assert not self.complaints, "\n".join(self.complaints)


class World:
    """Everything that a source needs to be archived on Jackal.

    Attributes:
        folder: the folder of its home.
        objects: the bucket's present bodies, by key.
        bucket: a bucket with an unlimited client.
        network: shared with other worlds' wallets.
        address: of this world's wallet.
    """

    def __init__(
        self,
        folder: Path,
        *,
        bucket: Bucket,
        database_url: str,
        network: LoopbackNetwork,
        lease_seconds: float = LEASE_SECONDS,
        **sections: Any,
    ) -> None:
        """Make a world. `sections` change settings, e.g.

        `packing={"staging_limit": …}` or `source={"target_size": …}`.
        """
        self.folder = folder
        self.bucket = bucket
        self.database_url = database_url
        self.network = network
        self.objects: dict[str, bytes] = {}
        self.runs: list[Run] = []
        self._lease_seconds = lease_seconds
        self._sections = sections
        self._ever_put: dict[str, set[bytes]] = {}
        folder.mkdir()
        number = (next(_wallets) << 32 | os.getpid()).to_bytes(16, "big")
        self._words = Mnemonic("english").to_mnemonic(number)
        self.address = Wallet(self._words).address
        network.fund(self.address, COINS)
        network.grant(self.address, SPACE)

    # --- the bucket -------------------------------------------------------------------------------

    def put(self, key: str, body: bytes = b"", **options: Any) -> dict[str, Any]:
        """Put an object; return S3's answer."""
        self.objects[key] = body
        self._ever_put.setdefault(key, set()).add(hashlib.sha256(body).digest())
        return self.bucket.put(key, body, **options)

    def delete(self, key: str) -> None:
        del self.objects[key]
        self.bucket.delete(key)

    def fill(self, seed: int = 7, *, small: int = 18, large: int = 3) -> None:
        """Put small, empty and multi-range objects: chunks of three sizes."""
        chance = random.Random(seed)
        for number in range(small):
            self.put(f"some/key-{number:03d}", chance.randbytes(chance.randrange(1, 30_000)))
        for number in range(large):
            self.put(f"large/{number}", chance.randbytes(chance.randrange(250_000, 400_000)))
        self.put("empty")
        self.put("folder/")
        self.put("changed/twice", chance.randbytes(5_000))
        self.put("changed/twice", chance.randbytes(6_000))

    # --- its parts --------------------------------------------------------------------------------

    @property
    def values(self) -> dict[str, Any]:
        """Return the settings' values, as file and environment would give them."""
        keys = {"access_key_id": KEY_ID, "secret_access_key": SECRET}
        bucket = {
            "bucket": self.bucket.name,
            "endpoint_url": self.bucket.endpoint,
            "public": True,
            "target_size": TARGET_SIZE,
        }
        settings = jackal_settings(
            self.network, copies=COPIES, keep_staged_windows=0, proof_seconds=60
        )
        jackal = settings.model_dump(mode="json") | {"mnemonic": self._words}
        packing = {"part_size": "64KiB", "window_size": "1MiB", "max_requests": 4}
        store = {"kind": "jackal", "folder": str(self.folder / "store")}
        sections = {"jackal": jackal, "packing": packing, "store": store}
        changes = dict(self._sections)
        source = bucket | keys | changes.pop("source", {})
        values: dict[str, Any] = {
            "home": str(self.folder / "home"),
            "database_url": self.database_url,
        }
        values |= {"sources": {SOURCE: source}}
        values |= {name: section | changes.pop(name, {}) for name, section in sections.items()}
        return values | changes

    @property
    def staging(self) -> Path:
        return Settings.model_validate(self.values).staging_folder

    def run_context(self, run: str = "this test") -> AbstractContextManager[RunContext]:
        """Open the product's parts in this process."""
        return _open_context(self.values, run, self._lease_seconds)

    # --- runs -------------------------------------------------------------------------------------

    def plan(self) -> list[str]:
        """Take an inventory and cut a plan; return the new chunks."""
        with self.run_context() as context:
            return [
                chunk.name
                for chunk in planning.cut_plan(context, inventories.take_inventory(context)).chunks
            ]

    def start(self, chunk: str = "", *, fatal: Fatal | None = None, counted: bool = False) -> "Run":
        """Start a process that runs a chunk's steps, or everything.

        Args:
            chunk: its name, or "".
            fatal: when it is killed or paused.
            counted: let `Run.wait_for_moments` count.
        """
        name = f"run-{len(self.runs) + 1}"
        run = Run(
            name,
            chunk,
            named={"values": self.values, "lease_seconds": self._lease_seconds},
            printed=self.folder / f"{name}.printed",
            fatal=fatal,
            counted=counted,
        )
        self.runs.append(run)
        return run

    def run(self, chunk: str = "", *, fatal: Fatal | None = None) -> int:
        """Run one process to its end; return its exit status, negative for a signal."""
        return self.start(chunk, fatal=fatal).wait()

    def finish(self) -> None:
        """Run inventory, plan and chunks until everything is located or skipped.

        A partition whose run was killed or failed is run again, whatever its chunk's state.
        """
        failed = {run.chunk for run in self.runs if run.wait()}
        again = {
            chunk.name for chunk in self.chunks(*RUN_AGAIN) if chunk.name in failed or "" in failed
        }
        for _ in range(ROUNDS):
            with self.run_context("the next run") as context:
                planned = planning.cut_plan(context, inventories.take_inventory(context))
                names = {
                    chunk.name for chunk in context.ledger.chunks.list(SOURCE, UNDER_WAY)
                } | again
                for name in sorted(names):
                    for step in CHUNK_STEPS:
                        step(context, name)
                if not planned.chunks and not names:
                    return
                again = set()
        raise AssertionError(f"after {ROUNDS} rounds there is still something to archive")

    def end_runs(self) -> None:
        """Kill every running process."""
        for run in self.runs:
            run.kill()

    def chunks(self, *states: ChunkState) -> Sequence[Chunk]:
        with self.run_context() as context:
            return context.ledger.chunks.list(SOURCE, states or None)

    def query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Query the database directly."""
        with psycopg.connect(self.database_url) as connection:
            return connection.execute(statement, values).fetchall()

    # --- the examination --------------------------------------------------------------------------

    def check(self) -> Verdict:
        """Examine the finished world; raise AssertionError if anything is wrong."""
        verdict = self.examine()
        verdict.require()
        return verdict

    def examine(self) -> Verdict:
        """Examine everything after the last run; see `Verdict`."""
        findings = Verdict()
        with self.run_context("the examination") as context:
            listed = [obj for page in context.objects.list_pages() for obj in page]
            self._look_for_lost(listed, findings)
            self._look_at_plans(context, findings)
            self._read_back(context, listed, findings)
            self._look_at_chunks(context, findings)
            self._look_at_the_network(context, findings)
            self._look_at_what_is_left(context, findings)
        self._look_at_runs(findings)
        return findings

    def _look_for_lost(self, listed: Sequence[S3Object], found: Verdict) -> None:
        """Each object is located in one chunk in good standing, or skipped with a reason."""
        rows = self.query(
            f"SELECT file_path, {IDENTITY}, count(*) FROM file_locations JOIN chunks c USING "
            "(caf_file_id)"
            " WHERE c.state IN ('located', 'damaged') GROUP BY 1, 2"
        )
        located = {(path, version): count for path, version, count in rows}
        skipped = set(
            self.query(f"SELECT file_path, {IDENTITY} FROM skipped_objects WHERE reason <> ''")
        )
        for obj in listed:
            identity = obj.key.decode(), obj.object_version
            if identity not in located and identity not in skipped:
                found.lost += 1
                found.complain(f"lost: {identity} is neither located nor skipped")
        for identity, count in located.items():
            if count > 1:
                found.double += count - 1
                found.complain(f"double: {identity} is located {count} times")
        ((members,),) = self.query(
            "SELECT coalesce(sum(member_count), 0) FROM chunks WHERE state = 'located'"
        )
        if members != sum(located.values()):
            found.double += max(0, int(members) - sum(located.values()))
            found.complain(
                f"double: located chunks have {members} members, and there are "
                f"{sum(located.values())} locations"
            )

    def _look_at_plans(self, context: RunContext, found: Verdict) -> None:
        accounting = planning.account_for(context, inventories.take_inventory(context))
        if not accounting.holds or accounting.claimed:
            found.complain(f"the accounting does not agree: {accounting}")

    def _read_back(self, context: RunContext, listed: Sequence[S3Object], found: Verdict) -> None:
        """Every location reads back with its SHA-256, as a body that its key has or had."""
        current = {(obj.key.decode(), obj.object_version) for obj in listed}
        for key, version, sha256 in self.query(
            f"SELECT file_path, {IDENTITY}, sha256 FROM file_locations ORDER BY 1, 2"
        ):
            try:
                body = b"".join(
                    fetch(context.ledger.lookup, context.store, SOURCE, key, version).pieces
                )
            except CafError as error:
                found.lost += 1
                found.complain(f"lost: {key!r} ({version}) does not read back: {error}")
                continue
            right = hashlib.sha256(body).digest() == sha256 and sha256 in self._ever_put.get(
                key, ()
            )
            if not right or ((key, version) in current and body != self.objects.get(key)):
                found.lost += 1
                found.complain(
                    f"lost: {key!r} ({version}) reads back as other bytes than the bucket has"
                )
                continue
            found.objects += 1
            found.size_bytes += len(body)

    def _look_at_chunks(self, context: RunContext, found: Verdict) -> None:
        for chunk in context.ledger.chunks.list(SOURCE):
            if chunk.state is ChunkState.WITHDRAWN:
                continue
            if chunk.state not in (ChunkState.LOCATED, ChunkState.EMPTY):
                found.complain(f"chunk {chunk.name} is '{chunk.state}': {chunk.reason}")
                continue
            try:
                explanation = account_for_chunk(context, chunk.name).explanation
            except CafError as error:
                explanation = str(error)
            if explanation:
                found.complain(f"chunk {chunk.name}: {explanation}")

    def _look_at_the_network(self, context: RunContext, found: Verdict) -> None:
        """Each chunk's root was posted and charged once, and nothing else was posted."""
        jackal = context.settings.store.kind == "jackal"
        chunks = context.ledger.chunks.list(SOURCE, [ChunkState.LOCATED]) if jackal else []
        state = self.network.state()
        expected = Counter({chunk.merkle_root.hex(): 1 for chunk in chunks if chunk.merkle_root})
        files = Counter(file["merkle"] for file in state["files"] if file["owner"] == self.address)
        posts = Counter({root: state["posts_by_root"].get(root, 0) for root in files | expected})
        for what, counted in (("files", files), ("posts", posts)):
            if counted != expected:
                found.double += (counted - expected).total()
                found.complain(
                    f"double: the network's {what} of this wallet are {dict(counted)}, the "
                    f"ledger's {dict(expected)}"
                )
        due = COPIES * sum(chunk.stored_size_bytes for chunk in chunks)
        charged = int(state["plans"][self.address]["used_bytes"])
        if charged != due:
            found.overcharged_bytes += max(0, charged - due)
            found.complain(f"charged: {charged} bytes of space, where {due} were due")

    def _look_at_what_is_left(self, context: RunContext, found: Verdict) -> None:
        """Nothing is staged, reserved, claimed or pending, and only this process holds leases."""
        if names := sorted(path.name for path in context.staging().iterdir()):
            found.complain(f"left in staging: {', '.join(names)}")
        for table in ("staging_reservations", "claims", "pending_locations"):
            ((count,),) = self.query(f"SELECT count(*) FROM {table}")
            if count:
                found.complain(f"left: {count} rows of {table}")
        leases = (
            "SELECT name, boot_id, pid, process_started FROM leases WHERE expires_at > "
            "clock_timestamp()"
        )
        for name, boot_id, pid, started in self.query(leases):
            if is_alive(boot_id, pid, started) is not False:
                found.complain(f"left: {name} is held by process {pid}")
        unsettled = self.query("SELECT hash FROM transactions WHERE outcome IS NULL")
        if unsettled:
            found.complain(f"left: transactions whose fate is not known: {unsettled}")

    def _look_at_runs(self, found: Verdict) -> None:
        """Every run ended with a result or a CafError, and printed nothing."""
        for run in self.runs:
            status = run.wait()
            if status == WITH_TRACEBACK or run.printed:
                found.complain(f"{run.name} ended with {status} and printed:\n{run.printed}")
        if found.complaints:
            found.complaints += [f"{run} was before" for run in self.runs]
