"""REST servers of chain nodes ("LCD"), with failover.

A request goes to the next node if a node fails, lags, or no longer makes blocks. A lagging node's
"not found" proves nothing. So each query first reads the node's height, and ignores nodes below the
greatest height ever seen.

Source: "Queries" in the notes on Jackal's protocol; REST of Cosmos SDK 0.45.
"""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Final, TypeVar

import httpx
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from caf_pipeline.errors import (
    ChainBehind,
    ChainHalted,
    ChainUnreachable,
    SettingsError,
    StoreUnreachable,
)
from caf_pipeline.store.jackal.answers import (
    NOT_FOUND,
    Block,
    ChainAnswer,
    Refusal,
    parse_block,
    parse_refusal,
    parse_version,
    quoted,
)
from caf_pipeline.system.http import GuardedTransport, Limit
from caf_pipeline.system.unreachable import Reason, hint_for, reason_of, speaks_only_tls
from caf_pipeline.waits import UNANSWERED_SECONDS, Waits

ATTEMPTS: Final = 5
FIRST_WAIT_SECONDS: Final = 0.5
MAX_WAIT_SECONDS: Final = 8.0
"""Attempts of a call, and the random, doubling waits between them.

Together they outlast a block.
"""

SILENCE_SECONDS: Final = 10.0
"""Timeout for a silent node. Nodes answer within milliseconds."""

ANSWER_SECONDS: Final = 60.0
ANSWER_BYTES: Final = 4 * 2**20
"""Limits of an exchange. A page is below 1 MiB; JSON of 4 MiB may need 100 MB of memory."""

HALTED_SECONDS: Final = 300.0
HALTED_BLOCKS: Final = 50
"""If the newest block is older than both, the chain has stopped or the node is far behind.

Network upgrades take more than five minutes, ordinary delays do not.
"""

MOST_AHEAD_BLOCKS: Final = 100
"""Blocks that a node may make between two requests. A greater height would lock out all nodes."""

BLOCK_SECONDS: Final = 6.0
"""Jackal's target, used while the chain is too young to measure."""

_MEASURED_BLOCKS: Final = 100
_MEASURE_AGAIN_SECONDS: Final = 600.0
_AVOID_SECONDS: Final = 30.0  # a failed node comes last for so long

_HEIGHT: Final = re.compile(r"[0-9]{1,18}")  # below 2^63

_HEIGHT_HEADER: Final = "Grpc-Metadata-X-Cosmos-Block-Height"
"""The height that an answer was read from, which may differ behind a shared address."""

_TENDERMINT: Final = "/cosmos/base/tendermint/v1beta1"

T = TypeVar("T")


class Refused(ChainUnreachable):
    """A node's error. The caller decides what it means."""

    def __init__(self, query: str, status: int, refusal: Refusal) -> None:
        foreign = status == httpx.codes.NOT_IMPLEMENTED
        super().__init__(
            f"{query}: refused with status {status}, code {refusal.code}: "
            f"{quoted(refusal.message)}",
            hint="the node does not support this query: check that jackal.lcd names Jackal nodes"
            if foreign
            else "wait, or set another node in jackal.lcd",
        )
        self.status = status
        self.refusal = refusal

    @property
    def not_found(self) -> bool:
        return self.status == httpx.codes.NOT_FOUND and self.refusal.code == NOT_FOUND

    @property
    def no_index(self) -> bool:
        return "indexing is disabled" in self.refusal.message

    @property
    def final(self) -> bool:
        """A retry would get the same answer."""
        at_fault = (
            httpx.codes.is_client_error(self.status)
            and self.status != httpx.codes.TOO_MANY_REQUESTS
        )
        return at_fault or self.status == httpx.codes.NOT_IMPLEMENTED or self.no_index


class TooLong(ChainUnreachable):
    """An answer exceeds `ANSWER_BYTES`."""


class NeverAnswers(ChainUnreachable):
    """The error lasts until the setting or the server is changed."""

    permanent = True


class Node:
    """One REST server. It comes last until `avoid_until`."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.avoid_until = 0.0


class Nodes:
    """The nodes of one chain. Safe for several threads."""

    def __init__(
        self,
        urls: Sequence[str],
        chain_id: str,
        *,
        seen_height: Callable[[], int],
        see_height: Callable[[int], None],
        attempts: int = ATTEMPTS,
        first_wait_seconds: float = FIRST_WAIT_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
        answer_seconds: float = ANSWER_SECONDS,
        halted_seconds: float = HALTED_SECONDS,
        waits: Waits | None = None,
    ) -> None:
        """Configure the nodes, the best first. Sends no request.

        `urls` are `http(s)://host[:port]`. A call tries all nodes `attempts` times; the first wait
        doubles. `halted_seconds` is the age of the newest block from which the chain may have
        stopped.
        """
        if not urls:
            raise SettingsError(
                "jackal.lcd is empty",
                hint='set a REST server, e.g. jackal.lcd = ["https://…:1317"] '
                "(docs/how-to/connect-jackal.md), or "
                'keep chunks in a folder: kind = "directory" in [store]',
            )
        for url in urls:
            host = ""
            with suppress(httpx.InvalidURL):
                host = httpx.URL(url).host
            if not host or not url.startswith(("http://", "https://")):
                raise SettingsError(
                    f"jackal.lcd: '{url}' is not the address of a REST server",
                    hint="write http(s)://host[:port]",
                )
        self.chain_id = chain_id
        self._nodes = [Node(url) for url in urls]
        self._seen_height = seen_height
        self._see_height = see_height
        self._attempts = attempts
        self._first_wait_seconds = first_wait_seconds
        self._silence_seconds = silence_seconds
        self._answer_seconds = answer_seconds
        self._halted_seconds = halted_seconds
        self._waits = waits or Waits()
        self._block_seconds = (BLOCK_SECONDS, 0.0)  # the measured value, and until when it is valid
        # A redirect could send a signed transaction to a server that is not configured.
        self._client = httpx.Client(
            transport=GuardedTransport(),
            follow_redirects=False,
            headers={"Accept": "application/json", "Accept-Encoding": "identity"},
        )

    def close(self) -> None:
        self._client.close()

    def query_first(self, ask: Callable[[Node, Block], T]) -> T:
        """Return the first good node's answer.

        Raises:
            StoreUnreachable: all attempts failed; the subclass gives the reason.
            SettingsError: a node belongs to another chain.
        """

        def ask_once() -> T:
            faults: list[StoreUnreachable] = []
            now = time.monotonic()
            for node in sorted(self._nodes, key=lambda node: node.avoid_until > now):
                try:
                    return ask(node, self._newest_block(node))
                except StoreUnreachable as error:
                    faults.append(error)
                    if not isinstance(error, Refused | ChainBehind):
                        node.avoid_until = time.monotonic() + _AVOID_SECONDS
            raise _main_fault(faults)

        return self._retrying(ask_once)

    def query_all(self, ask: Callable[[Node, Block], T]) -> list[T]:
        """Raises like `query_first`."""
        answers = []
        for node in self._nodes:
            with suppress(StoreUnreachable):
                answers.append(ask(node, self._newest_block(node)))
        return answers or [self.query_first(ask)]

    def versions(self) -> list[tuple[str, str]]:
        """Return address and version of each node that answers.

        Nodes that failed recently are asked only if no other node answers.
        """

        def ask_once() -> list[tuple[str, str]]:
            versions: list[tuple[str, str]] = []
            faults: list[StoreUnreachable] = []
            now = time.monotonic()
            for node in sorted(self._nodes, key=lambda node: node.avoid_until > now):
                if versions and node.avoid_until > now:
                    continue
                try:
                    versions.append((node.url, parse_version(self._info(node))))
                except StoreUnreachable as error:
                    faults.append(error)
                    node.avoid_until = time.monotonic() + _AVOID_SECONDS
            if not versions:
                raise _main_fault(faults)
            return versions

        return self._retrying(ask_once)

    def block_seconds(self) -> float:
        """Return the time between two of the last hundred blocks, measured every ten minutes."""
        seconds, until = self._block_seconds
        if time.monotonic() < until:
            return seconds
        seconds = self.query_first(self._measured_block_seconds)
        self._block_seconds = (seconds, time.monotonic() + _MEASURE_AGAIN_SECONDS)
        return seconds

    def _retrying(self, ask_once: Callable[[], T]) -> T:
        retrying = Retrying(
            retry=retry_if_exception(
                lambda error: (
                    isinstance(error, StoreUnreachable)
                    and not isinstance(error, TooLong | NeverAnswers)
                    and not (isinstance(error, Refused) and error.final)
                )
            ),
            stop=stop_after_attempt(self._attempts),
            wait=wait_random_exponential(multiplier=self._first_wait_seconds, max=MAX_WAIT_SECONDS),
            reraise=True,
        )
        nodes = ", ".join(node.url for node in self._nodes)
        attempts = f"{self._attempts} attempts" if self._attempts > 1 else "one attempt"
        with self._waits.waiting(
            f"an answer of the chain at {nodes}; the request is retried",
            ends_by=f"ends with an answer, or after {attempts}",
            grace=UNANSWERED_SECONDS,
        ):
            answer: T = retrying(ask_once)
        return answer

    def _info(self, node: Node) -> ChainAnswer:
        info = self.answer("GET", node, f"{_TENDERMINT}/node_info")[0]
        self._check_chain(node, info.object("default_node_info").text("network"))
        return info

    def _newest_block(self, node: Node) -> Block:
        answer, _, answered_at = self.answer("GET", node, f"{_TENDERMINT}/blocks/latest")
        block = parse_block(answer)
        self._check_chain(node, block.chain_id)
        greatest = self._seen_height()
        if block.height < greatest:
            raise _behind(node, block.height, greatest)
        age = (answered_at - block.time).total_seconds()
        if age > self._halted_seconds and age > HALTED_BLOCKS * self._measured_block_seconds(
            node, block
        ):
            raise ChainHalted(
                f"{node.url}: the newest block, {block.height}, is {age:.0f} s old",
                hint="the chain makes no blocks, the node is far behind, or its clock is wrong: "
                "wait, or set another node in jackal.lcd",
            )
        self.saw(block.height, greatest)
        return block

    def saw(self, height: int, greatest: int | None = None) -> None:
        """Store a reported height. `greatest`, the greatest so far, saves a query."""
        if height > (self._seen_height() if greatest is None else greatest):
            self._see_height(height)

    def _check_chain(self, node: Node, chain_id: str) -> None:
        if chain_id != self.chain_id:
            raise SettingsError(
                f"jackal.lcd: {node.url} is a node of chain '{quoted(chain_id, 60)}', not of "
                f"'{self.chain_id}'",
                hint="correct jackal.lcd or jackal.chain_id",
            )

    def _measured_block_seconds(self, node: Node, block: Block) -> float:
        earlier = max(1, block.height - _MEASURED_BLOCKS)
        # A node may have pruned its old blocks.
        with suppress(Refused):
            first = parse_block(self.answer("GET", node, f"{_TENDERMINT}/blocks/{earlier}")[0])
            if first.height < block.height and first.time < block.time:
                return (block.time - first.time).total_seconds() / (block.height - first.height)
        return BLOCK_SECONDS

    def read(
        self,
        node: Node,
        block: Block,
        path: str,
        parse: Callable[[ChainAnswer], T],
        params: Mapping[str, str] | None,
    ) -> T:
        """Return an answer from a state that is not older than the block.

        Its state may be newer. Then no later answer is from an older state.
        """
        answer, height, _ = self.answer("GET", node, path, params=params)
        if height is not None and height < block.height:
            raise _behind(node, height, block.height)
        if height is not None and height > block.height + MOST_AHEAD_BLOCKS:
            raise ChainUnreachable(
                f"{node.url} answers from block {height}, but its newest block is {block.height}",
                hint="set another node in jackal.lcd",
            )
        if height is not None:
            self.saw(height, block.height)
        return parse(answer)

    def answer(
        self,
        method: str,
        node: Node,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        content: bytes | None = None,
        query_name: str = "",
    ) -> tuple[ChainAnswer, int | None, datetime]:
        """Return the answer, the height of its state if reported, and the node's time."""
        query = f"{node.url}{path}"
        headers = {"Content-Type": "application/json"} if content is not None else {}
        limit = Limit(self._answer_seconds, silence=self._silence_seconds)
        try:
            with self._client.stream(
                method,
                query,
                params=params,
                content=content,
                headers=headers,
                extensions=limit.extensions,
            ) as response:
                body = _body(response, query)
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, UnicodeError) as error:
            if limit.is_over:
                raise ChainUnreachable(
                    f"{query}: no complete answer within {self._answer_seconds:g} s",
                    hint="check jackal.lcd and the network, or wait",
                ) from error
            raise _unreachable(node, reason_of(error, node.url)) from error
        try:
            value = json.loads(body)
        except (ValueError, RecursionError, MemoryError) as error:
            if response.status_code == httpx.codes.BAD_REQUEST and speaks_only_tls(node.url):
                raise _unreachable(node, Reason.ONLY_TLS) from error
            raise ChainUnreachable(
                f"{query}: status {response.status_code} and no JSON: {body[:60]!r}. The server is "
                "out of order, or not the REST server of a chain node",
                hint="check jackal.lcd (the REST server, LCD, often has port 1317), or wait",
            ) from error
        if response.status_code != httpx.codes.OK:
            raise Refused(
                query, response.status_code, parse_refusal(value) or Refusal(-1, f"{body[:100]!r}")
            )
        height_header = response.headers.get(_HEIGHT_HEADER, "")
        height = int(height_header) if _HEIGHT.fullmatch(height_header) else None
        # This machine's clock may be wrong. Caches send the original Date, and the answer's age in
        # seconds as Age (RFC 9111, 5.1).
        answered_at = datetime.now(UTC)
        with suppress(KeyError, ValueError, OverflowError):
            sent_at = parsedate_to_datetime(response.headers["Date"]).astimezone(UTC)
            answered_at = sent_at + timedelta(seconds=int(response.headers.get("Age", "0")))
        return ChainAnswer(value, query_name or query), height, answered_at


def _unreachable(node: Node, reason: Reason) -> ChainUnreachable:
    kind = NeverAnswers if reason.lasts else ChainUnreachable
    return kind(
        f"{node.url} {reason}",
        hint=hint_for(reason, "jackal.lcd") or "set a node with a certificate that is valid here",
    )


def _body(response: httpx.Response, query: str) -> bytes:
    """Decompressed, a body would have no size limit."""
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise ChainUnreachable(
            f"{query}: the answer has the unrequested encoding {encoding[:40]!a}"
        )
    body = bytearray()
    for piece in response.iter_raw():
        body += piece
        if len(body) > ANSWER_BYTES:
            raise TooLong(f"{query}: the answer is longer than {ANSWER_BYTES} bytes")
    return bytes(body)


def _behind(node: Node, height: int, seen: int) -> ChainBehind:
    return ChainBehind(
        f"{node.url} is at block {height}, behind block {seen} that was seen before",
        hint="wait until it has caught up, or set another node in jackal.lcd",
    )


def _main_fault(faults: Sequence[StoreUnreachable]) -> StoreUnreachable:
    for kind in (Refused, TooLong, ChainHalted, ChainBehind):
        for fault in faults:
            if isinstance(fault, kind):
                return fault
    if len(faults) == 1:
        return faults[0]
    return ChainUnreachable("; ".join(str(fault) for fault in faults), hint=faults[0].hint)
