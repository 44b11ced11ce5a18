"""Uploads a posted file to several providers in parallel.

Before a file is sent, and after every broken upload, the chain's list, the provider's job status
and a read are consulted in this order. So no provider gets a file that it has. A copy is good if it
is listed and pieces of it were read back correctly.

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
from caf_pipeline.records import PostRecord, ProviderRecords
from caf_pipeline.settings import JackalSettings
from caf_pipeline.store.jackal.answers import ChainFile
from caf_pipeline.store.jackal.chain import Chain
from caf_pipeline.store.jackal.provider import PIECE_BYTES, Job, ProviderClient, Sending
from caf_pipeline.store.jackal.provider_selection import RATE_MARGIN, ProviderSelection
from caf_pipeline.system.quantities import counted, show_size
from caf_pipeline.throttle import Throttle
from caf_pipeline.waits import BRIEF_SECONDS, UNANSWERED_SECONDS, OpenWait, Waits

MEASURED_FROM_BYTES: Final = 4 << 20
"""Smaller bodies fit into socket buffers, so their rate means nothing."""

TICK_SECONDS: Final = 0.5
"""Interval of progress reports. Each one notices a lost lease."""

FIRST_POLL_SECONDS: Final = 0.2
POLL_SECONDS: Final = 2.0
"""First and last interval of polling. A block takes 1 to 6 s."""

LOST_ANSWER_SECONDS: Final = 15.0
"""How long a broken upload is polled: a provider knows complete bodies."""

LAGGING_SECONDS: Final = 10.0
"""Two blocks: the wait before resending to a provider whose node lacks the post."""

LAGGING_SENDS: Final = 3

ROUNDS: Final = 2
"""Attempts for each provider. The second comes after all others were tried."""

READ_BACK_BYTES: Final = 64 << 10
READ_BACK_PLACES: Final = 6
"""Random places that are read back, besides the first and the last bytes."""

READ_BACK_THREADS: Final = 4
"""Places that are read side by side: three round trips for all of them, in place of nine."""


class CopyOutcome(Enum):
    """The outcome of one provider's copy."""

    GOOD = "has it"
    NO_SLOT = "came after others had taken all copies"
    REFUSED = "reports that the bytes do not match the root"
    UNREACHABLE = "is unreachable"
    FULL = "has no room"
    TOO_SLOW = "is too slow for this size"
    FAILED = "failed"
    NOT_LISTED = "is not listed by the chain"
    WRONG = "returns other bytes"
    CHAIN = "could not be looked up on the chain"


@dataclass(frozen=True, slots=True)
class Result:
    """One provider's outcome, with details."""

    provider: str
    outcome: CopyOutcome
    detail: str = ""


class _Ended(Exception):
    pass


class _UploadControl:
    def __init__(self, upload: "_Upload", address: str, wait: OpenWait) -> None:
        self._upload = upload
        self._wait = wait
        self._address = address
        self._started = time.monotonic()
        self._throttle_seconds = 0.0
        self._paused_seconds = 0.0  # the part of them due to an operator's order
        self.sent_bytes = 0
        self.seconds = 0.0  # until the last piece was sent, without the throttle's waits

    def check(self) -> None:
        self._upload.check()

    def piece_bytes(self) -> int:
        return self._upload.throttle.piece_bytes(PIECE_BYTES)

    def sent(self, size_bytes: int) -> None:
        def check() -> None:
            self._wait.moved()  # the throttle holds the body up, not the provider
            self._upload.check()

        now = time.monotonic()
        self._wait.moved()
        self.sent_bytes += size_bytes
        self.seconds = now - self._started - self._throttle_seconds
        self._upload.count(self._address, self.sent_bytes)
        held_up = self._upload.throttle.sent(size_bytes, check)
        taken = time.monotonic() - now
        self._throttle_seconds += taken
        self._paused_seconds += taken if held_up else 0.0

    def stop(self) -> None:
        self.seconds = time.monotonic() - self._started - self._throttle_seconds

    @property
    def measures(self) -> bool:
        return (
            self.sent_bytes >= MEASURED_FROM_BYTES
            and self.seconds > 0
            and self._paused_seconds < self.seconds
        )


@dataclass(frozen=True)
class Uploads:
    """Uploads posted files to providers. Safe for several threads."""

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
        """`progress` also receives 0 while nothing is sent."""
        try:
            size_bytes = staged.stat().st_size
        except OSError as error:
            raise StoreError(
                f"the staged file {staged} is missing",
                hint="run the partition again: it packs the chunk again",
            ) from error
        if size_bytes != posting.stored_size_bytes:
            raise StoreError(
                f"the staged file {staged} has {size_bytes} bytes, but {posting.stored_size_bytes} "
                "were posted",
                hint="run the partition again: it packs the chunk again",
            )
        upload = _Upload(self, posting, staged, wrong)
        upload.run(progress)

    def parallel_uploads(self, size_bytes: int) -> int:
        """Return how many providers to send to in parallel without being too slow.

        UploadsRefused: the bandwidth limit is too low. NoProvider: this run's share of it is too
        low.
        """
        rate = self.throttle.bandwidth()
        if not rate:
            return self.settings.copies
        seconds = self.settings.upload_seconds * RATE_MARGIN
        uploads = int(rate * seconds / size_bytes)
        if uploads:
            return min(uploads, self.settings.copies)
        limit = self.throttle.limit()
        too_slow = (
            f"{show_size(size_bytes)} cannot be uploaded in the {self.settings.upload_seconds:.0f} "
            f"s that a provider allows: the bandwidth limit is {show_size(limit)}/s"
        )
        if limit * seconds < size_bytes:
            least = math.ceil(size_bytes / seconds)
            raise UploadsRefused(
                too_slow,
                hint=f"set a sufficient limit with 'caf limit --bandwidth {least}', or remove it "
                "with 'caf limit --bandwidth none'",
            )
        raise NoProvider(
            f"{too_slow}, and other runs upload at the same time",
            hint="wait until they have finished, or raise the limit with 'caf limit'",
        )


class _Upload:
    def __init__(
        self, uploads: Uploads, posting: PostRecord, staged: Path, wrong: Collection[str]
    ) -> None:
        self.throttle = uploads.throttle
        self._waits = uploads.waits
        self._chain = uploads.chain
        self._settings = uploads.settings
        self._records = uploads.records
        self._selection = uploads.selection
        self._parallel_uploads = uploads.parallel_uploads
        self._posting = posting
        self._staged = staged
        self._wrong = frozenset(wrong)
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._sent: dict[str, int] = {}
        self._reported_bytes = 0
        self._results: dict[str, Result] = {}

    def run(self, progress: Callable[[int], None]) -> None:
        progress(0)
        listed = self._file().providers
        size_bytes = self._posting.stored_size_bytes
        waiting = deque([*listed, *self._selection.to_upload(size_bytes, after=listed)])
        copies = self._settings.copies
        threads = copies if len(listed) >= copies else self._parallel_uploads(size_bytes)
        pool = ThreadPoolExecutor(threads, thread_name_prefix="upload")
        try:
            self._try_all(pool, waiting, progress)
            if len(self._good()) < self._settings.copies_required:
                failed = self._with_outcome(CopyOutcome.FAILED, CopyOutcome.UNREACHABLE)
                for _ in range(ROUNDS - 1):
                    self._try_all(pool, deque(result.provider for result in failed), progress)
        finally:
            self._over.set()
            pool.shutdown(wait=True, cancel_futures=True)
        if len(self._good()) < self._settings.copies_required:
            raise self._failure()
        progress(size_bytes - self._reported_bytes)

    def _try_all(
        self, pool: ThreadPoolExecutor, waiting: deque[str], progress: Callable[[int], None]
    ) -> None:
        copies = self._settings.copies
        running: set[Future[Result]] = set()
        while True:
            while waiting and len(running) + len(self._good()) < copies:
                running.add(pool.submit(self._deliver, waiting.popleft()))
            if not running:
                return
            done, running = wait(running, timeout=TICK_SECONDS, return_when=FIRST_COMPLETED)
            for future in done:
                result = future.result()
                self._results[result.provider] = result
            # Report bytes of the chunk, not of each copy. A failed copy is not subtracted.
            with self._lock:
                best = sorted(self._sent.values(), reverse=True)[:copies]
            new_bytes = max(sum(best) // copies - self._reported_bytes, 0)
            self._reported_bytes += new_bytes
            progress(new_bytes)

    def _good(self) -> Sequence[str]:
        return [result.provider for result in self._with_outcome(CopyOutcome.GOOD)]

    def _with_outcome(self, *outcomes: CopyOutcome) -> Sequence[Result]:
        return [result for result in self._results.values() if result.outcome in outcomes]

    def _failure(self) -> StoreError:
        good, required = self._good(), self._settings.copies_required
        root = self._posting.merkle_root.hex()
        others = [
            result for result in self._results.values() if result.outcome is not CopyOutcome.GOOD
        ]
        why = "; ".join(
            f"{result.provider} {result.outcome.value}"
            + f" ({result.detail})" * bool(result.detail)
            for result in others
        )
        holders = f"held by {', '.join(good) or 'no provider'}"
        away = self._with_outcome(CopyOutcome.UNREACHABLE, CopyOutcome.FULL)
        slow = self._with_outcome(CopyOutcome.TOO_SLOW)
        refused = self._with_outcome(CopyOutcome.REFUSED)
        if unknown := self._with_outcome(CopyOutcome.CHAIN):
            return ChainUnreachable(f"{unknown[0].detail}; file {root} is {holders}")
        if refused and len(refused) == len(others) - len(away) and not good:
            return RootRefused(
                f"all providers refuse file {root}: {why}",
                hint="run the chunk again: it compares the staged file with the posted root, and "
                "packs the chunk again if they differ",
            )
        if slow and len(good) + len(slow) >= required:
            size_bytes = self._posting.stored_size_bytes
            fitting = (
                self._selection.fitting_bytes(required, self._settings.upload_seconds) or size_bytes
            )
            fitting = min(fitting, int(size_bytes * RATE_MARGIN))
            return ChunkTooLarge(
                f"file {root} of {show_size(size_bytes)} was not uploaded in the "
                f"{self._settings.upload_seconds:.0f} s that a provider allows: {why}",
                fitting_bytes=fitting,
                hint=f"lower the source's target_size to about {show_size(fitting)}",
            )
        if len(away) == len(others) and not good:
            return NoProvider(
                f"no provider takes file {root}: {why or 'the chain lists none'}",
                hint="check that this machine can reach them; a later run tries all of them again",
            )
        return NotProven(
            f"file {root} has {len(good)} of {counted(required, 'copy', 'copies')}: "
            f"{holders}; {why or 'there is no other provider'}",
            hint="run the partition again: it sends nothing to providers that have the file",
        )

    def check(self) -> None:
        if self._over.is_set():
            raise _Ended

    def count(self, address: str, sent_bytes: int) -> None:
        with self._lock:
            self._sent[address] = max(self._sent.get(address, 0), sent_bytes)

    def _sleep(self, seconds: float) -> None:
        if self._over.wait(seconds):
            raise _Ended

    def _polls(self, seconds: float) -> Iterator[None]:
        until, pause = time.monotonic() + seconds, FIRST_POLL_SECONDS
        yield
        while (remaining := until - time.monotonic()) > 0:
            self._sleep(min(pause, remaining))
            pause = min(pause * 2, POLL_SECONDS)
            yield

    def _file(self) -> ChainFile:
        posting = self._posting
        file = self._chain.file(posting.merkle_root, posting.owner, posting.start)
        if file is None:
            raise StoredChunkMissing(
                f"the chain has no file {posting.merkle_root.hex()} of {posting.owner} at "
                f"{posting.start}",
                hint="it was deleted or its plan has ended; 'caf jackal files' lists the others",
            )
        return file

    def _deliver(self, address: str) -> Result:
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
                    free_bytes = client.free_bytes(self.check)
                sent_before = self._is_stored(client)
                # Bytes may vanish while their job stays done: deleting any post of the root, by any
                # wallet, removes them.
                if not sent_before or self._fault(client):
                    refusal = self._unfit(address, file, free_bytes) or self._send(
                        address, client, sent_before=sent_before
                    )
                    if refusal:
                        return refusal
            elif address in self._wrong:
                with self._unanswered(client):
                    client.version(self.check)  # sends no file to a provider that is away
                    reached = True
                if refusal := self._send(address, client, sent_before=True):
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
        return self._waits.waiting(
            f"provider {client.url}, which does not answer",
            ends_by="ends with an answer or a timeout; then another provider is tried",
            grace=UNANSWERED_SECONDS,
        )

    def _unfit(self, address: str, file: ChainFile, free_bytes: int | None) -> Result | None:
        size_bytes = self._posting.stored_size_bytes
        if len(file.providers) >= file.max_proofs:
            return Result(address, CopyOutcome.NO_SLOT)
        if free_bytes is not None and free_bytes < size_bytes:
            return Result(address, CopyOutcome.FULL, f"{show_size(free_bytes)} are free")
        rate = self._selection.upload_rate(address)
        if rate and size_bytes / rate > self._settings.upload_seconds:
            return Result(address, CopyOutcome.TOO_SLOW, f"{show_size(int(rate))}/s was measured")
        return None

    def _is_stored(self, client: ProviderClient) -> bool:
        job = client.job(self._posting, self.check)
        return bool(job and not job.error and self._final_state(client, job).done)

    def _final_state(self, client: ProviderClient, job: Job) -> Job:
        """Poll a job until it ends, stalls, or takes longer than an upload and a proof."""
        until = time.monotonic() + self._settings.upload_seconds + self._settings.proof_seconds
        with self._waits.waiting(
            f"provider {client.url} to process an upload",
            ends_by="ends when the provider has finished, or after "
            f"{self._settings.proof_seconds:.0f} s without a change",
            grace=BRIEF_SECONDS,
        ):
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
        self, address: str, client: ProviderClient, *, sent_before: bool = False
    ) -> Result | None:
        job = Job(0, "")
        for attempt in range(LAGGING_SENDS):
            if attempt:
                self._sleep(min(LAGGING_SECONDS, self._settings.proof_seconds))
                if address in self._file().providers:
                    return None
            try:
                with self._unanswered(client) as wait:
                    control = _UploadControl(self, address, wait)
                    sending = Sending(
                        self._posting,
                        self._staged,
                        control,
                        proof_type=type_of_root(
                            self._posting.merkle_root
                        ),  # settings may have changed
                        answer_seconds=self._settings.upload_seconds,
                        sent_before=sent_before,
                    )
                    job = client.upload(sending)
            except StoreUnreachable as error:
                control.stop()
                return self._after_broken(address, client, control, error)
            if control.measures and control.sent_bytes == self._posting.stored_size_bytes:
                self._records.uploaded(address, control.sent_bytes, control.seconds)
            job = self._final_state(client, job)
            if not job.sees_no_post:
                break
        if job.finds_no_slot:
            return Result(address, CopyOutcome.NO_SLOT)
        if job.refuses_bytes and not job.has_no_room:  # the staged file may be wrong
            return Result(address, CopyOutcome.REFUSED, job.error)
        if job.error:
            self._records.failed(address)
            outcome = CopyOutcome.FULL if job.has_no_room else CopyOutcome.FAILED
            return Result(address, outcome, job.error)
        return None  # done, or silent: then the chain decides

    def _after_broken(
        self, address: str, client: ProviderClient, control: _UploadControl, error: StoreUnreachable
    ) -> Result | None:
        for _ in self._polls(min(LOST_ANSWER_SECONDS, self._settings.proof_seconds)):
            with contextlib.suppress(NoChainAnswer):
                if address in self._file().providers:
                    return None
            with contextlib.suppress(StoreUnreachable):
                if self._is_stored(client):
                    return None
        if control.seconds >= self._settings.upload_seconds * RATE_MARGIN and control.measures:
            # The provider cut off a slow upload: the bytes sent by then give its rate.
            self._records.uploaded(address, control.sent_bytes, control.seconds)
            self._records.failed(address)
            return Result(
                address,
                CopyOutcome.TOO_SLOW,
                f"cut off after {show_size(control.sent_bytes)} in {control.seconds:.0f} s",
            )
        raise error

    def _confirm(self, address: str, client: ProviderClient) -> Result:
        """Resends the file once."""
        fault = ""
        for sending_again in (False, True):
            if sending_again and (refusal := self._send(address, client, sent_before=True)):
                return refusal
            with self._waits.waiting(
                f"provider {client.url} to prove the file to the chain",
                ends_by="ends when the chain lists the provider, or after "
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
        failure: StoreUnreachable | None = None
        for _ in self._polls(self._settings.proof_seconds):
            try:
                if address in self._file().providers:
                    return True
                failure = None
            except NoChainAnswer as error:
                failure = error
        if failure:
            raise failure
        return False

    def _fault(self, client: ProviderClient) -> str:
        size_bytes = self._posting.stored_size_bytes
        length = min(READ_BACK_BYTES, size_bytes)
        last = size_bytes - length
        places = {0, last, *(random.randint(0, last) for _ in range(READ_BACK_PLACES))}
        pool = ThreadPoolExecutor(READ_BACK_THREADS, thread_name_prefix="read-back")
        try:
            faults = pool.map(
                lambda place: self._fault_at(client, place, place + length), sorted(places)
            )
            return next(filter(None, faults), "")
        finally:
            pool.shutdown(cancel_futures=True)

    def _fault_at(self, client: ProviderClient, start_byte: int, end_byte: int) -> str:
        try:
            piece = b"".join(client.download(self._posting, start_byte, end_byte, self.check))
        except StoreUnreachable:
            if client.has_lost(self._posting, start_byte, end_byte, self.check):
                return f"it returns nothing for bytes {start_byte} to {end_byte}"
            raise
        except (IntegrityError, StoredChunkMissing) as error:
            return str(error)
        with self._staged.open("rb") as file:
            file.seek(start_byte)
            if piece != file.read(end_byte - start_byte):
                return f"bytes {start_byte} to {end_byte} differ"
        return ""
