"""Copies of a posted file at several providers, side by side.

What counts is, in this order, what the chain lists, what a provider says of its job, and what it
gives back when it is read: each is asked before a file is sent and after every send that broke, so
that nothing is sent to who has it. A copy is good when the chain lists it and pieces of it were
read back right.

Source: "Provider HTTP API" in the notes on Jackal's protocol.
"""

import contextlib
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final

from caf_pipeline.caf.merkle import type_of_root
from caf_pipeline.errors import (
    ChainUnreachable,
    ChunkTooLarge,
    IntegrityError,
    NoChainAnswer,
    NoProvider,
    NotProven,
    RootRefused,
    StoredChunkMissing,
    StoreError,
    StoreUnreachable,
    UploadsRefused,
)
from caf_pipeline.settings import JackalSettings
from caf_pipeline.store.jackal.answers import ChainFile
from caf_pipeline.store.jackal.chain import Chain
from caf_pipeline.store.jackal.provider import PIECE_BYTES, Job, ProviderClient, Sending
from caf_pipeline.store.jackal.provider_selection import RATE_MARGIN, ProviderSelection
from caf_pipeline.store.protocol import PostRecord, ProviderRecords
from caf_pipeline.system.quantities import counted
from caf_pipeline.throttle import Throttle
from caf_pipeline.waits import BRIEF_SECONDS, UNANSWERED_SECONDS, OpenWait, Waits

MEASURED_FROM_BYTES: Final = 4 << 20
"""A smaller body is in the sockets' buffers before its rate means anything."""

TICK_SECONDS: Final = 0.5
"""Between two reports of progress, each of which notices a lost lease."""

FIRST_POLL_SECONDS: Final = 0.2
POLL_SECONDS: Final = 2.0
"""Between two looks at the chain or at a job: at first, and in the end.

A block takes some 6 s on the main network, 1 s on a local one.
"""

LOST_ANSWER_SECONDS: Final = 15.0
"""How long a broken upload is asked after: a provider knows of a body from the moment that it is
through.
"""

LAGGING_SECONDS: Final = 10.0
"""Two blocks: what a provider whose node does not know the post yet is given before the file is
sent to it again.
"""

LAGGING_SENDS: Final = 3

ROUNDS: Final = 2
"""How often one provider is tried, the second time only when all others were."""

READ_BACK_BYTES: Final = 64 << 10
READ_BACK_PLACES: Final = 6
"""Places between the first and the last bytes that are read back, chosen again each time.

The samples of the seal come after.
"""


class CopyOutcome(Enum):
    """What became of one provider's copy."""

    GOOD = "has it"
    NO_SLOT = "others have all copies"
    REFUSED = "says that the bytes are not those of the root"
    UNREACHABLE = "is not reached"
    FULL = "has no room"
    TOO_SLOW = "is too slow for this size"
    FAILED = "failed"
    NOT_LISTED = "is not listed by the chain"
    WRONG = "gives other bytes"
    CHAIN = "could not be asked for at the chain"


@dataclass(frozen=True, slots=True)
class Result:
    """One provider's outcome, with what it said."""

    provider: str
    outcome: CopyOutcome
    detail: str = ""


class _Ended(Exception):
    """The upload as a whole is over."""


class _UploadControl:
    """Watches one body on its way: counts, measures, and slows it down as the operator ordered."""

    def __init__(self, upload: "_Upload", address: str, wait: OpenWait) -> None:
        self._upload = upload
        self._wait = wait
        self._address = address
        self._started = time.monotonic()
        self._throttle_seconds = 0.0
        self._held_seconds = 0.0  # of these, those in which an order held the body up
        self.sent_bytes = 0
        self.seconds = 0.0  # until the last piece was sent, the throttle's not counted

    def check(self) -> None:
        self._upload.check()

    def _held_up(self) -> None:
        self._wait.moved()  # the operator holds it up, and not the provider
        self._upload.check()

    def piece_bytes(self) -> int:
        return self._upload.throttle.piece_bytes(PIECE_BYTES)

    def sent(self, size_bytes: int) -> None:
        now = time.monotonic()
        self._wait.moved()
        self.sent_bytes += size_bytes
        self.seconds = now - self._started - self._throttle_seconds
        self._upload.count(self._address, self.sent_bytes)
        held_up = self._upload.throttle.sent(size_bytes, self._held_up)
        taken = time.monotonic() - now
        self._throttle_seconds += taken
        self._held_seconds += taken if held_up else 0.0

    def stop(self) -> None:
        """Count the time up to now: the body broke off."""
        self.seconds = time.monotonic() - self._started - self._throttle_seconds

    @property
    def measures(self) -> bool:
        """Whether the rate is the provider's, and not that of the bandwidth limit or of buffers."""
        return (
            self.sent_bytes >= MEASURED_FROM_BYTES
            and self.seconds > 0
            and self._held_seconds < self.seconds
        )


@dataclass(frozen=True)
class Uploads:
    """Brings posted files to providers. Safe for several threads."""

    chain: Chain
    settings: JackalSettings
    records: ProviderRecords
    selection: ProviderSelection
    throttle: Throttle
    waits: Waits = field(default_factory=Waits)

    def put(
        self,
        posting: PostRecord,
        staged: Path,
        progress: Callable[[int], None],
        *,
        wrong: Collection[str] = (),
    ) -> None:
        """See `ChunkStore.put`.

        `progress` is also told 0 while nothing is sent, so that it can end the wait.
        """
        try:
            size_bytes = staged.stat().st_size
        except OSError as error:
            raise StoreError(
                f"the staged file {staged} is gone",
                hint="run the partition again: it is packed again",
            ) from error
        if size_bytes != posting.stored_size_bytes:
            raise StoreError(
                f"the staged file {staged} has {size_bytes} bytes, {posting.stored_size_bytes} "
                "were posted",
                hint="run the partition again: it is packed again",
            )
        upload = _Upload(self, posting, staged, wrong)
        upload.run(progress)

    def side_by_side(self, size_bytes: int) -> int:
        """Return how many providers to send to at once: fewer where the bandwidth would let none of
        them be through in time.

        Raises: UploadsRefused: under the limit not even one would be. NoProvider: under this run's
            share of it.
        """
        rate = self.throttle.bandwidth()
        if not rate:
            return self.settings.copies
        seconds = self.settings.upload_seconds * RATE_MARGIN
        through = int(rate * seconds / size_bytes)
        if through:
            return min(through, self.settings.copies)
        limit = self.throttle.limit()
        too_slow = (
            f"{size_bytes} bytes are not through in the {self.settings.upload_seconds:.0f} s that "
            "a provider reads: the bandwidth"
            f" limit is {limit} bytes a second"
        )
        if limit * seconds < size_bytes:
            least = math.ceil(size_bytes / seconds)
            raise UploadsRefused(
                too_slow,
                hint=f"'caf limit --bandwidth {least}' sets the lowest that is enough; 'none' "
                "lifts it",
            )
        raise NoProvider(
            f"{too_slow}, and other runs upload at the same time",
            hint="wait until they have finished, or raise the limit with 'caf limit'",
        )


class _Upload:
    """One file on its way to all its providers."""

    def __init__(
        self, uploads: Uploads, posting: PostRecord, staged: Path, wrong: Collection[str]
    ) -> None:
        self.throttle = uploads.throttle
        self._waits = uploads.waits
        self._chain = uploads.chain
        self._settings = uploads.settings
        self._records = uploads.records
        self._selection = uploads.selection
        self._side_by_side = uploads.side_by_side
        self._posting = posting
        self._staged = staged
        self._wrong = frozenset(wrong)
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._sent: dict[str, int] = {}
        self._told = 0
        self._results: dict[str, Result] = {}

    # --- all providers ---

    def run(self, progress: Callable[[int], None]) -> None:
        """Upload until there are as many good copies as required, or no provider is left to try."""
        progress(0)
        listed = self._listed()
        size_bytes = self._posting.stored_size_bytes
        waiting = deque([*listed, *self._selection.to_upload(size_bytes, after=listed)])
        copies = self._settings.copies
        threads = copies if len(listed) >= copies else self._side_by_side(size_bytes)
        pool = ThreadPoolExecutor(threads, thread_name_prefix="upload")
        try:
            self._try_all(pool, waiting, progress)
            if len(self._good()) < self._settings.copies_required:
                again = [
                    one.provider
                    for one in self._results.values()
                    if one.outcome in (CopyOutcome.FAILED, CopyOutcome.UNREACHABLE)
                ]
                for _ in range(ROUNDS - 1):
                    self._try_all(pool, deque(again), progress)
        finally:
            self._over.set()
            pool.shutdown(wait=True, cancel_futures=True)
        if len(self._good()) < self._settings.copies_required:
            raise self._failure()
        progress(size_bytes - self._told)

    def _try_all(
        self, pool: ThreadPoolExecutor, waiting: deque[str], progress: Callable[[int], None]
    ) -> None:
        wanted = self._settings.copies
        running: set[Future[Result]] = set()
        while True:
            while waiting and len(running) + len(self._good()) < wanted:
                running.add(pool.submit(self._deliver, waiting.popleft()))
            if not running:
                return
            done, running = wait(running, timeout=TICK_SECONDS, return_when=FIRST_COMPLETED)
            for future in done:
                result = future.result()
                self._results[result.provider] = result
            progress(self._news())

    def _news(self) -> int:
        """Return the bytes to tell: the chunk's, not each copy's; a copy that failed is not taken
        back.
        """
        with self._lock:
            best = sorted(self._sent.values(), reverse=True)[: self._settings.copies]
        reached = sum(best) // self._settings.copies
        news = max(reached - self._told, 0)
        self._told += news
        return news

    def _good(self) -> Sequence[str]:
        return [one.provider for one in self._results.values() if one.outcome is CopyOutcome.GOOD]

    def _of(self, *outcomes: CopyOutcome) -> Sequence[Result]:
        return [one for one in self._results.values() if one.outcome in outcomes]

    def _failure(self) -> StoreError:
        """Return the error that says why there are too few good copies."""
        good, required = self._good(), self._settings.copies_required
        root = self._posting.merkle_root.hex()
        others = [one for one in self._results.values() if one.outcome is not CopyOutcome.GOOD]
        why = "; ".join(
            f"{one.provider} {one.outcome.value}{f' ({one.detail})' if one.detail else ''}"
            for one in others
        )
        has_it = ", ".join(good) or "no provider"
        away = self._of(CopyOutcome.UNREACHABLE, CopyOutcome.FULL)
        slow, refused = self._of(CopyOutcome.TOO_SLOW), self._of(CopyOutcome.REFUSED)
        if unasked := self._of(CopyOutcome.CHAIN):
            return ChainUnreachable(f"{unasked[0].detail}; so far {has_it} has file {root}")
        if refused and len(refused) == len(others) - len(away) and not good:
            return RootRefused(
                f"file {root} is refused: {why}",
                hint="run the chunk again: its staged file is compared with the posted root, and "
                "packed again where it differs",
            )
        if slow and len(good) + len(slow) >= required:
            size_bytes = self._posting.stored_size_bytes
            fitting = (
                self._selection.fitting_bytes(required, self._settings.upload_seconds) or size_bytes
            )
            fitting = min(fitting, int(size_bytes * RATE_MARGIN))
            return ChunkTooLarge(
                f"file {root} of {size_bytes} bytes was not uploaded in the "
                f"{self._settings.upload_seconds:.0f} s that a provider"
                f" allows: {why}",
                fitting_bytes=fitting,
                hint=f"about {fitting} bytes would fit: lower the source's target_size",
            )
        if len(away) == len(others) and not good:
            return NoProvider(
                f"no provider takes file {root}: {why or 'the chain lists none'}",
                hint="check that this machine can reach them; a later run tries all of them again",
            )
        return NotProven(
            f"file {root} has {len(good)} of {counted(required, 'copy', 'copies')}: {has_it} has "
            "it;"
            f" {why or 'there is no other provider'}",
            hint="run the partition again: a provider that has it is not sent it again",
        )

    # --- what the threads share ---

    def check(self) -> None:
        """End the calling thread where the upload is over."""
        if self._over.is_set():
            raise _Ended

    def count(self, address: str, sent_bytes: int) -> None:
        """Remember how far a provider's copy is."""
        with self._lock:
            self._sent[address] = max(self._sent.get(address, 0), sent_bytes)

    def _sleep(self, seconds: float) -> None:
        if self._over.wait(seconds):
            raise _Ended

    def _polls(self, seconds: float) -> Iterator[None]:
        """Yield at once, then ever more seldom until the time is over."""
        until, pause = time.monotonic() + seconds, FIRST_POLL_SECONDS
        yield
        while (left := until - time.monotonic()) > 0:
            self._sleep(min(pause, left))
            pause = min(pause * 2, POLL_SECONDS)
            yield

    def _listed(self) -> Sequence[str]:
        """Return the providers that the chain lists now."""
        return self._file().providers

    def _file(self) -> ChainFile:
        posting = self._posting
        file = self._chain.file(posting.merkle_root, posting.owner, posting.start)
        if file is None:
            raise StoredChunkMissing(
                f"the chain has no file {posting.merkle_root.hex()} of {posting.owner} at "
                f"{posting.start}",
                hint="it was deleted or its plan has ended; 'caf jackal files' shows what is left",
            )
        return file

    def _limited(self, seconds: float) -> float:
        return min(seconds, self._settings.proof_seconds)

    # --- one provider ---

    def _deliver(self, address: str) -> Result:
        """See to it that one provider has the file."""
        reached = False
        try:
            client = self._selection.client(address)
            if client is None:
                return Result(address, CopyOutcome.UNREACHABLE, "it has no usable address")
            self.throttle.wait_while_paused(self.check)
            file = self._file()
            if address not in file.providers:
                with self._unanswered(client):
                    client.version(self.check)
                    reached = True
                    room = client.free_bytes(self.check)
                known = self._is_stored(client)
                # A job that is done outlives the bytes: a deleted post of the same root, whoever's,
                # takes them away.
                if not known or self._fault(client):
                    refusal = self._unfit(address, file, room) or self._send(
                        address, client, known_before=known
                    )
                    if refusal:
                        return refusal
            elif address in self._wrong:
                with self._unanswered(client):
                    client.version(
                        self.check
                    )  # before the whole file is sent to a provider that is away
                    reached = True
                if refusal := self._send(address, client, known_before=True):
                    return refusal
            return self._confirm(address, client)
        except NoChainAnswer as error:
            return Result(address, CopyOutcome.CHAIN, str(error))
        except StoreUnreachable as error:
            self._records.failed(address)
            return Result(
                address, CopyOutcome.FAILED if reached else CopyOutcome.UNREACHABLE, str(error)
            )

    def _unanswered(self, client: ProviderClient) -> contextlib.AbstractContextManager[OpenWait]:
        """Say, after some seconds, that a provider does not answer or takes no bytes."""
        return self._waits.waiting(
            f"provider {client.url}, which does not answer",
            ends_by="an answer ends it, or its time limit: then another provider is tried",
            grace=UNANSWERED_SECONDS,
        )

    def _unfit(self, address: str, file: ChainFile, room: int | None) -> Result | None:
        """Return why nothing is sent to this provider."""
        size_bytes = self._posting.stored_size_bytes
        if len(file.providers) >= file.max_proofs:
            return Result(address, CopyOutcome.NO_SLOT)
        if room is not None and room < size_bytes:
            return Result(address, CopyOutcome.FULL, f"{room} bytes are free")
        rate = self._selection.upload_rate(address)
        if rate and size_bytes / rate > self._settings.upload_seconds:
            return Result(address, CopyOutcome.TOO_SLOW, f"{rate:.0f} bytes a second were measured")
        return None

    def _is_stored(self, client: ProviderClient) -> bool:
        """Tell whether the provider says that it has the file; a job under way is waited for."""
        job = client.job(self._posting, self.check)
        return bool(job and not job.error and self._followed(client, job).done)

    def _followed(self, client: ProviderClient, job: Job) -> Job:
        """Return the job's end, or its last state once nothing moved for as long as a proof may
        take.

        It also ends where it goes on moving for longer than an upload and a proof together may
        take.
        """
        with self._waits.waiting(
            f"provider {client.url} to take in what it was sent",
            ends_by=f"its word ends it, or {self._settings.proof_seconds:.0f} s without a change",
            grace=BRIEF_SECONDS,
        ):
            return self._last_state(client, job)

    def _last_state(self, client: ProviderClient, job: Job) -> Job:
        until = time.monotonic() + self._settings.upload_seconds + self._settings.proof_seconds
        while not (job.done or job.error) and time.monotonic() < until:
            before, after = job, None
            for _ in self._polls(self._settings.proof_seconds):
                after = client.job(self._posting, self.check)
                if after != before:
                    break
            if after is None or after == before:
                return before
            job = after
        return job

    def _send(
        self, address: str, client: ProviderClient, *, known_before: bool = False
    ) -> Result | None:
        """Send the file; return why it failed, or None where the provider says that it has it."""
        job = Job(0, "")
        for attempt in range(LAGGING_SENDS):
            if attempt:
                self._sleep(self._limited(LAGGING_SECONDS))
                if address in self._listed():
                    return None
            try:
                with self._unanswered(client) as wait:
                    control = _UploadControl(self, address, wait)
                    job = client.upload(
                        Sending(
                            self._posting,
                            self._staged,
                            control,
                            proof_type=type_of_root(
                                self._posting.merkle_root
                            ),  # the setting may have changed since
                            answer_seconds=self._settings.upload_seconds,
                            known_before=known_before,
                        )
                    )
            except StoreUnreachable as error:
                control.stop()
                return self._after_broken(address, client, control, error)
            if control.measures and control.sent_bytes == self._posting.stored_size_bytes:
                self._records.uploaded(address, control.sent_bytes, control.seconds)
            job = self._followed(client, job)
            if not job.sees_no_post:
                break
        return self._judged(address, job)

    def _judged(self, address: str, job: Job) -> Result | None:
        if job.finds_no_slot:
            return Result(address, CopyOutcome.NO_SLOT)
        if job.has_no_room:
            self._records.failed(address)
            return Result(address, CopyOutcome.FULL, job.error)
        if job.refuses_bytes:  # which is held against the staged file
            return Result(address, CopyOutcome.REFUSED, job.error)
        if job.error:
            self._records.failed(address)
            return Result(address, CopyOutcome.FAILED, job.error)
        return None  # done; or it says no more, and the chain has the word

    def _after_broken(
        self, address: str, client: ProviderClient, control: _UploadControl, error: StoreUnreachable
    ) -> Result | None:
        """Ask after an upload that broke: it may be stored all the same."""
        for _ in self._polls(self._limited(LOST_ANSWER_SECONDS)):
            with contextlib.suppress(NoChainAnswer):
                if address in self._listed():
                    return None
            with contextlib.suppress(StoreUnreachable):
                if self._is_stored(client):
                    return None
        if control.seconds >= self._settings.upload_seconds * RATE_MARGIN and control.measures:
            # Cut off for taking too long: what came through by then is the rate.
            self._records.uploaded(address, control.sent_bytes, control.seconds)
            self._records.failed(address)
            return Result(
                address,
                CopyOutcome.TOO_SLOW,
                f"cut off after {control.sent_bytes} bytes in {control.seconds:.0f} s",
            )
        raise error

    # --- believing it ---

    def _confirm(self, address: str, client: ProviderClient) -> Result:
        """Believe a provider once the chain lists it and it gives the bytes back; one with other
        bytes gets them once more.
        """
        fault = ""
        for sending_again in (False, True):
            if sending_again and (refusal := self._send(address, client, known_before=True)):
                return refusal
            with self._waits.waiting(
                f"provider {client.url} to prove the file to the chain",
                ends_by="it ends when the chain lists the provider, or after "
                f"{self._settings.proof_seconds:.0f} s",
                grace=BRIEF_SECONDS,
            ):
                listed = self._becomes_listed(address)
            if not listed:
                self._records.failed(address)
                return Result(
                    address,
                    CopyOutcome.NOT_LISTED,
                    f"for {self._settings.proof_seconds:.0f} s after it had the file",
                )
            fault = self._fault(client)
            if not fault:
                self.count(address, self._posting.stored_size_bytes)
                return Result(address, CopyOutcome.GOOD)
        self._records.failed(address)
        return Result(address, CopyOutcome.WRONG, fault)

    def _becomes_listed(self, address: str) -> bool:
        unasked: StoreUnreachable | None = None
        for _ in self._polls(self._settings.proof_seconds):
            try:
                if address in self._listed():
                    return True
                unasked = None
            except NoChainAnswer as error:
                unasked = error
        if unasked:
            raise unasked
        return False

    def _fault(self, client: ProviderClient) -> str:
        """Read pieces back and return what is wrong with them; "" where they are the staged
        file's.
        """
        size_bytes = self._posting.stored_size_bytes
        length = min(READ_BACK_BYTES, size_bytes)
        last = size_bytes - length
        places = {0, last, *(random.randint(0, last) for _ in range(READ_BACK_PLACES))}
        try:
            with self._staged.open("rb") as file:
                for start_byte in sorted(places):
                    file.seek(start_byte)
                    end_byte = start_byte + length
                    try:
                        piece = b"".join(
                            client.download(self._posting, start_byte, end_byte, self.check)
                        )
                    except StoreUnreachable:
                        if client.has_lost(self._posting, start_byte, end_byte, self.check):
                            return f"it sends nothing of bytes {start_byte} to {end_byte}"
                        raise
                    if piece != file.read(length):
                        return f"bytes {start_byte} to {end_byte} differ"
        except (IntegrityError, StoredChunkMissing) as error:
            return str(error)
        return ""
