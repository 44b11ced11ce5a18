"""Whether enough providers would accept a chunk, before its post is paid for: allowed, answering,
with room, and fast enough.

An answer counts for a minute, so that a thousand chunks do not each ask everyone. What was posted
before is not asked about.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Final

from caf_pipeline.errors import NoProvider, StoreError, StoreUnreachable, UploadsRefused
from caf_pipeline.settings import JackalSettings
from caf_pipeline.store.jackal.provider_http import PrivateAddress
from caf_pipeline.store.jackal.provider_selection import ProviderSelection
from caf_pipeline.store.jackal.upload import Uploads
from caf_pipeline.system.quantities import counted

ANSWER_COUNTS_SECONDS: Final = 60.0
"""How long a provider counts as one that answers. What it says of its room is as old at most."""

ASKED_AT_ONCE: Final = 8
SAID: Final = 5
"""Providers of which it is said why they would not take a chunk; there are a hundred."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why a provider would not take a chunk, and whether the settings alone say so."""

    provider: str
    why: str
    by_settings: bool = False


@dataclass
class AcceptingProviders:
    """Asks providers whether a chunk would be taken. Safe for several threads."""

    settings: JackalSettings
    selection: ProviderSelection
    uploads: Uploads
    _room: dict[str, tuple[int | None, float]] = field(
        default_factory=dict
    )  # free bytes, until when that counts
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def require(self, size_bytes: int) -> None:
        """Return where as many providers as copies are required would take a file of this size.

        Raises: UploadsRefused: the settings or the bandwidth limit leave too few of them, so that
            waiting does not help. NoProvider: too few answer, have room or are fast enough now.
            StoreUnreachable: the chain does not list them.
        """
        self.uploads.side_by_side(size_bytes)
        required = self.settings.copies_required
        if len(self._known_to_accept(size_bytes)) >= required:
            return
        listed = self.selection.listed(fresh=True)
        if len(listed) < required:
            raise UploadsRefused(
                f"the chain lists {counted(len(listed), 'provider')}, and each chunk needs "
                f"{counted(required, 'copy', 'copies')},"
                " each at another provider: nothing was posted",
                hint="lower jackal.copies, or jackal.required_copies",
            )
        order = self.selection.to_upload(size_bytes)
        takers, refusals = self._ask(order, size_bytes, required)
        if takers < required:
            small = [
                _Refusal(one, "offers less space than that in all")
                for one in listed.keys() - set(order)
            ]
            raise self._failure([*refusals, *small], takers, len(listed), size_bytes)

    def _known_to_accept(self, size_bytes: int) -> Sequence[str]:
        now = time.monotonic()
        with self._lock:
            room = {
                provider: free_bytes
                for provider, (free_bytes, until) in self._room.items()
                if now < until
            }
        return [
            one
            for one, free in room.items()
            if (free is None or free >= size_bytes) and not self._too_slow(one, size_bytes)
        ]

    def _ask(
        self, order: Sequence[str], size_bytes: int, required: int
    ) -> tuple[int, Sequence[_Refusal]]:
        """Ask some at a time until enough would take the file; return how many would, and why the
        others would not.
        """
        waiting, running = deque(order), dict[Future[_Refusal | None], str]()
        takers, refusals = 0, list[_Refusal]()
        pool = ThreadPoolExecutor(ASKED_AT_ONCE, thread_name_prefix="taker")
        try:
            while takers < required and (waiting or running):
                while waiting and len(running) < ASKED_AT_ONCE:
                    provider = waiting.popleft()
                    running[pool.submit(self._refusal, provider, size_bytes)] = provider
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    provider = running.pop(future)
                    refusal = future.result() or self._slowness(provider, size_bytes)
                    if refusal is None:
                        takers += 1
                    else:
                        refusals.append(refusal)
        finally:
            pool.shutdown(
                wait=False, cancel_futures=True
            )  # who is still asked has ten seconds to answer
        return takers, refusals

    def _refusal(self, provider: str, size_bytes: int) -> _Refusal | None:
        # Nothing of the ledger in here: this thread may outlive the question, and the ledger would
        # be closed under it.
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
            self._room[provider] = free_bytes, time.monotonic() + ANSWER_COUNTS_SECONDS
        if free_bytes is not None and free_bytes < size_bytes:
            return _Refusal(provider, f"has {free_bytes} bytes free")
        return None

    def _slowness(self, provider: str, size_bytes: int) -> _Refusal | None:
        if not self._too_slow(provider, size_bytes):
            return None
        return _Refusal(
            provider,
            f"is too slow for this size: {self.selection.upload_rate(provider):.0f} bytes a second",
        )

    def _too_slow(self, provider: str, size_bytes: int) -> bool:
        rate = self.selection.upload_rate(provider)
        return bool(rate and size_bytes / rate > self.settings.upload_seconds)

    def _failure(
        self, refusals: Sequence[_Refusal], takers: int, listed: int, size_bytes: int
    ) -> StoreError:
        required = self.settings.copies_required
        private = [one for one in refusals if one.by_settings]
        if listed - len(private) < required:
            return UploadsRefused(
                f"nothing was posted: each chunk needs {counted(required, 'copy', 'copies')}, and "
                f"{len(private)} of"
                f" {counted(listed, 'provider')} have addresses that are not public and may not be "
                "used",
                hint="set jackal.allow_private_addresses = true only for a network of your own, "
                "whose providers are on this"
                " machine or beside it",
            )
        first = sorted(refusals, key=lambda one: one.by_settings)[:SAID]
        more = f"; and {len(refusals) - len(first)} more" if len(refusals) > len(first) else ""
        why = "; ".join(f"{one.provider}: {one.why}" for one in first)
        return NoProvider(
            f"nothing was posted: {counted(required, 'copy', 'copies')} of {size_bytes} bytes are "
            "required, and"
            f" {counted(takers, 'provider')} would take one now: {why}{more}",
            hint="check that this machine can reach them; a later run asks all of them again",
        )
