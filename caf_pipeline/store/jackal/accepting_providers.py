"""Checks that enough providers would accept a chunk, before its post is paid for."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Final

from caf_pipeline.errors import (
    NoProvider,
    PrivateAddress,
    StoreError,
    StoreUnreachable,
    UploadsRefused,
)
from caf_pipeline.settings import JackalSettings
from caf_pipeline.store.jackal.provider_selection import ProviderSelection
from caf_pipeline.store.jackal.upload import Uploads
from caf_pipeline.system.quantities import counted, show_size

ANSWER_VALID_SECONDS: Final = 60.0
"""A provider's answer is valid so long, so that thousands of chunks share a query."""

PARALLEL_QUERIES: Final = 8
LISTED_REFUSALS: Final = 5
"""Refusals that an error lists. There are about a hundred providers."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    """`by_settings`: the settings exclude the provider."""

    provider: str
    why: str
    by_settings: bool = False


@dataclass
class AcceptingProviders:
    """Checks whether providers would take a chunk. Safe for several threads."""

    settings: JackalSettings
    selection: ProviderSelection
    uploads: Uploads
    # Free bytes, and until when they are valid.
    _room: dict[str, tuple[int | None, float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def require(self, size_bytes: int) -> None:
        """Return if the required number of providers would take a file of this size.

        A provider must be allowed by the settings, online, have room, and be fast enough.

        Raises:
            UploadsRefused: settings or the bandwidth limit exclude too many; waiting does not help.
            NoProvider: too few would take it now.
        """
        self.uploads.parallel_uploads(size_bytes)
        required = self.settings.copies_required
        now = time.monotonic()
        with self._lock:
            room = {
                provider: free_bytes
                for provider, (free_bytes, until) in self._room.items()
                if now < until
            }
        accepting = [
            provider
            for provider, free_bytes in room.items()
            if (free_bytes is None or free_bytes >= size_bytes)
            and not self._too_slow(provider, size_bytes)
        ]
        if len(accepting) >= required:
            return
        listed = self.selection.listed(fresh=True)
        if len(listed) < required:
            raise UploadsRefused(
                f"nothing was posted: the chain lists {counted(len(listed), 'provider')}, but each "
                f"chunk needs {counted(required, 'copy', 'copies')} at different providers",
                hint="lower jackal.copies, or jackal.required_copies",
            )
        order = self.selection.to_upload(size_bytes)
        takers, refusals = self._query(order, size_bytes, required)
        if takers < required:
            small = [
                _Refusal(provider, "is smaller than the chunk")
                for provider in listed.keys() - set(order)
            ]
            raise self._failure([*refusals, *small], takers, len(listed), size_bytes)

    def _query(
        self, order: Sequence[str], size_bytes: int, required: int
    ) -> tuple[int, Sequence[_Refusal]]:
        waiting, running = deque(order), dict[Future[_Refusal | None], str]()
        takers, refusals = 0, list[_Refusal]()
        pool = ThreadPoolExecutor(PARALLEL_QUERIES, thread_name_prefix="taker")
        try:
            while takers < required and (waiting or running):
                while waiting and len(running) < PARALLEL_QUERIES:
                    provider = waiting.popleft()
                    running[pool.submit(self._refusal, provider, size_bytes)] = provider
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    provider = running.pop(future)
                    refusal = future.result()
                    if refusal is None and self._too_slow(provider, size_bytes):
                        rate = self.selection.upload_rate(provider)
                        refusal = _Refusal(
                            provider, f"is too slow for this size: {rate:.0f} bytes a second"
                        )
                    if refusal is None:
                        takers += 1
                    else:
                        refusals.append(refusal)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # open queries end within ten seconds
        return takers, refusals

    def _refusal(self, provider: str, size_bytes: int) -> _Refusal | None:
        # This must not use the ledger, which may be closed before this thread ends.
        try:
            client = self.selection.client(provider)
            if client is None:
                return _Refusal(provider, "has no usable address")
            client.version()
            free_bytes = client.free_bytes()
        except PrivateAddress as error:
            return _Refusal(provider, str(error), by_settings=True)
        except StoreUnreachable as error:
            return _Refusal(provider, str(error))
        with self._lock:
            self._room[provider] = free_bytes, time.monotonic() + ANSWER_VALID_SECONDS
        if free_bytes is not None and free_bytes < size_bytes:
            return _Refusal(provider, f"has {show_size(free_bytes)} free")
        return None

    def _too_slow(self, provider: str, size_bytes: int) -> bool:
        rate = self.selection.upload_rate(provider)
        return bool(rate and size_bytes / rate > self.settings.upload_seconds)

    def _failure(
        self, refusals: Sequence[_Refusal], takers: int, listed: int, size_bytes: int
    ) -> StoreError:
        required = self.settings.copies_required
        private = [refusal for refusal in refusals if refusal.by_settings]
        if listed - len(private) < required:
            return UploadsRefused(
                f"nothing was posted: each chunk needs {counted(required, 'copy', 'copies')}, but "
                f"{len(private)} of {counted(listed, 'provider')} have no public address, which "
                "the settings require",
                hint=PrivateAddress.remedy,
            )
        first = sorted(refusals, key=lambda refusal: refusal.by_settings)[:LISTED_REFUSALS]
        more = f"; and {len(refusals) - len(first)} more" if len(refusals) > len(first) else ""
        why = "; ".join(f"{refusal.provider}: {refusal.why}" for refusal in first)
        return NoProvider(
            f"nothing was posted: {counted(required, 'copy', 'copies')} of {show_size(size_bytes)} "
            f"are required, but only {counted(takers, 'provider')} would take one now: {why}{more}",
            hint="check that this machine can reach them; a later run asks all of them again",
        )
