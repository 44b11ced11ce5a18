"""REST servers of chain nodes ("LCD"): requests go to one, and to the next where it fails, lags, or
no longer makes blocks.

What a node does not know proves something only where the node is as far as any was ever seen. So
each look-up asks the node's height first, and below the greatest height seen its answers count for
nothing.

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
"""One call goes through all nodes so often, with waits that double at random up to the greatest:
together longer than a block of six seconds, by which one node may be ahead of another, and shorter
than what a run can wait with nothing to show.
"""

SILENCE_SECONDS: Final = 10.0
"""A node that says nothing for so long is passed over; answers from its own state take it
milliseconds.
"""

ANSWER_SECONDS: Final = 60.0
ANSWER_BYTES: Final = 4 * 2**20
"""The most that an answer may take, from the question to its last byte.

A page of files is below 1 MiB; a longer answer is none: JSON of 4 MiB may stand for 100 MB in
memory.
"""

HALTED_SECONDS: Final = 300.0
HALTED_BLOCKS: Final = 50
"""A newest block older than both is one of a chain that has stopped, or of a node that is far
behind. Blocks take about six seconds; an upgrade of the network stops it for longer than five
minutes, an ordinary delay does not.
"""

BLOCK_SECONDS: Final = 6.0
"""Between two blocks, where the chain is too young to measure it: what Jackal's main network aims
at.
"""

_MEASURED_BLOCKS: Final = 100
_MEASURE_AGAIN_SECONDS: Final = 600.0
_AVOID_SECONDS: Final = 30.0  # a node that failed is asked last for so long

_HEIGHT: Final = re.compile(r"[0-9]{1,18}")  # below 2^63

_HEIGHT_HEADER: Final = "Grpc-Metadata-X-Cosmos-Block-Height"
"""Names the height of the state that an answer was read from; not every answer has it.

Behind one address may be several nodes, so that the height asked first need not be this one.
"""

_TENDERMINT: Final = "/cosmos/base/tendermint/v1beta1"

T = TypeVar("T")


class Refused(ChainUnreachable):
    """A node answered with an error of its own; the caller decides whether that is an answer."""

    def __init__(self, query: str, status: int, refusal: Refusal) -> None:
        foreign = status == httpx.codes.NOT_IMPLEMENTED
        super().__init__(
            f"{query}: refused with status {status}, code {refusal.code}: "
            f"{quoted(refusal.message)}",
            hint="the node knows no such query: check that jackal.lcd names nodes of Jackal"
            if foreign
            else "wait, or name another node",
        )
        self.status = status
        self.refusal = refusal

    @property
    def not_found(self) -> bool:
        """Whether the node says that there is no such thing."""
        return self.status == httpx.codes.NOT_FOUND and self.refusal.code == NOT_FOUND

    @property
    def no_index(self) -> bool:
        """Whether the node keeps no index of transactions."""
        return "indexing is disabled" in self.refusal.message

    @property
    def final(self) -> bool:
        """Whether it would say the same again."""
        at_fault = (
            httpx.codes.is_client_error(self.status)
            and self.status != httpx.codes.TOO_MANY_REQUESTS
        )
        return at_fault or self.status == httpx.codes.NOT_IMPLEMENTED or self.no_index


class TooLong(ChainUnreachable):
    """An answer that is longer than one may be."""


class NeverAnswers(ChainUnreachable):
    """A server whose error lasts until the setting or the server is changed."""

    permanent = True


class Node:
    """One REST server, and for how long it is better asked last."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.known = False  # that it is of the right chain
        self.avoid_until = 0.0


class Nodes:
    """The nodes of one chain. May be asked by several threads at once."""

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
        """Name the nodes, the best first; no request is sent yet.

        Args:
            urls: `http(s)://host[:port]`.
            chain_id: a node of another chain is refused.
            seen_height: returns the greatest height ever seen of this chain, by whomever.
            see_height: remembers one.
            attempts: how often a call goes through all nodes.
            first_wait_seconds: the wait after the first time, about; it doubles.
            silence_seconds: for how long a node may say nothing.
            answer_seconds: how long an exchange may take, to the answer's last byte.
            halted_seconds: the age of a newest block from which on the chain may have stopped.
            waits: where it is said while no node answers.

        Raises:
            SettingsError: no URL, or one that is none.
        """
        if not urls:
            raise SettingsError(
                "jackal.lcd names no REST server",
                hint='name one, e.g. jackal.lcd = ["https://…:1317"] '
                "(docs/how-to/connect-jackal.md), or keep "
                "chunks in a folder: "
                'kind = "directory" in [store]',
            )
        for url in urls:
            if not url.startswith(("http://", "https://")) or not _host_of(url):
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
        self._block_seconds = (BLOCK_SECONDS, 0.0)  # measured, until when it counts
        # A redirect could lead a signed transaction, or the belief in an answer, to a server that
        # nobody named.
        self._client = httpx.Client(
            transport=GuardedTransport(),
            follow_redirects=False,
            headers={"Accept": "application/json", "Accept-Encoding": "identity"},
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def asked(self, ask: Callable[[Node, Block], T]) -> T:
        """Return what the first good node answers.

        Raises: StoreUnreachable: after all attempts, as one of its kinds. SettingsError: a node is
            of another chain.
        """
        return self._retrying(lambda: self._asked_once(ask))

    def each(self, ask: Callable[[Node, Block], T]) -> list[T]:
        """Return what each good node answers; at least one, or raises as `asked`."""
        answers = []
        for node in self._nodes:
            with suppress(StoreUnreachable):
                answers.append(ask(node, self._newest_block(node)))
        return answers or [self.asked(ask)]

    def versions(self) -> list[tuple[str, str]]:
        """Return the address and the version of each node that answers.

        Raises: StoreUnreachable: none does, after all attempts. SettingsError: a node is of another
            chain.
        """
        return self._retrying(self._versions_once)

    def block_seconds(self) -> float:
        """Return the time between two blocks, over the last hundred of them; measured every ten
        minutes.
        """
        seconds, until = self._block_seconds
        if time.monotonic() < until:
            return seconds
        seconds = self.asked(self._measured_block_seconds)
        self._block_seconds = (seconds, time.monotonic() + _MEASURE_AGAIN_SECONDS)
        return seconds

    def _retrying(self, asked: Callable[[], T]) -> T:
        """Return what `asked` does, trying again while the fault may pass; the wait is reported
        after some seconds.
        """
        retrying = Retrying(
            retry=retry_if_exception(_may_pass),
            stop=stop_after_attempt(self._attempts),
            wait=wait_random_exponential(multiplier=self._first_wait_seconds, max=MAX_WAIT_SECONDS),
            reraise=True,
        )
        nodes = ", ".join(node.url for node in self._nodes)
        times = f"{self._attempts} attempts" if self._attempts > 1 else "one attempt"
        with self._waits.waiting(
            f"an answer of the chain at {nodes}, which is asked again and again",
            ends_by=f"an answer ends it, or {times} without one",
            grace=UNANSWERED_SECONDS,
        ):
            answer: T = retrying(asked)
        return answer

    def _asked_once(self, ask: Callable[[Node, Block], T]) -> T:
        faults: list[StoreUnreachable] = []
        now = time.monotonic()
        for node in sorted(self._nodes, key=lambda one: one.avoid_until > now):
            try:
                return ask(node, self._newest_block(node))
            except StoreUnreachable as error:
                faults.append(error)
                if not isinstance(error, Refused | ChainBehind):
                    node.avoid_until = time.monotonic() + _AVOID_SECONDS
        raise _the_fault(faults)

    def _versions_once(self) -> list[tuple[str, str]]:
        """Return the version that each node names which answers; one that failed a moment ago is
        asked only if no other does.
        """
        found: list[tuple[str, str]] = []
        faults: list[StoreUnreachable] = []
        now = time.monotonic()
        for node in sorted(self._nodes, key=lambda one: one.avoid_until > now):
            if found and node.avoid_until > now:
                continue
            try:
                found.append((node.url, parse_version(self._info(node))))
            except StoreUnreachable as error:
                faults.append(error)
                node.avoid_until = time.monotonic() + _AVOID_SECONDS
        if not found:
            raise _the_fault(faults)
        return found

    def _info(self, node: Node) -> ChainAnswer:
        """Return what a node of this chain says of itself."""
        info = self.answer("GET", node, f"{_TENDERMINT}/node_info")[0]
        self._check_chain(node, info.object("default_node_info").text("network"))
        node.known = True
        return info

    def _newest_block(self, node: Node) -> Block:
        """Return the node's newest block; raise where the node lags, halts or is of another
        chain.
        """
        if not node.known:
            self._info(node)
        answer, _, answered_at = self.answer("GET", node, f"{_TENDERMINT}/blocks/latest")
        block = parse_block(answer)
        self._check_chain(node, block.chain_id)
        seen = self._seen_height()
        if block.height < seen:
            raise _behind(node, block.height, seen)
        age = (answered_at - block.time).total_seconds()
        if age > self._halted_seconds and age > HALTED_BLOCKS * self._measured_block_seconds(
            node, block
        ):
            raise ChainHalted(
                f"{node.url}: the newest block, {block.height}, is {age:.0f} s old",
                hint="no block is made, the node is far behind, or its clock is wrong: wait, or "
                "name another node in jackal.lcd",
            )
        self.saw(block.height, seen)
        return block

    def saw(self, height: int, seen: int | None = None) -> None:
        """Remember a height that a node was seen at; `seen` is the greatest one where the caller
        has just asked for it.
        """
        if height > (self._seen_height() if seen is None else seen):
            self._see_height(height)

    def _check_chain(self, node: Node, found: str) -> None:
        if found != self.chain_id:
            raise SettingsError(
                f"jackal.lcd: {node.url} is a node of chain '{quoted(found, 60)}', not of "
                f"'{self.chain_id}'",
                hint="correct jackal.lcd or jackal.chain_id",
            )

    def _measured_block_seconds(self, node: Node, block: Block) -> float:
        earlier = max(1, block.height - _MEASURED_BLOCKS)
        # A node may have dropped its old blocks; then the figure is what the network aims at.
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
        """Return a node's answer, from a state not below the block."""
        answer, height, _ = self.answer("GET", node, path, params=params)
        if height is not None and height < block.height:
            raise _behind(node, height, block.height)
        return parse(answer)

    def answer(
        self,
        method: str,
        node: Node,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        content: bytes | None = None,
        named: str = "",
    ) -> tuple[ChainAnswer, int | None, datetime]:
        """Return an answer, which errors call `named`, the height of its state if the node reports
        it, and the node's time.
        """
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
                told = f"{query}: no answer: it took longer than {self._answer_seconds:g} s"
                raise ChainUnreachable(
                    told, hint="check jackal.lcd and the network, or wait"
                ) from error
            raise _unreachable(node, reason_of(error, node.url)) from error
        try:
            value = json.loads(body)
        except (ValueError, RecursionError, MemoryError) as error:
            if response.status_code == httpx.codes.BAD_REQUEST and speaks_only_tls(node.url):
                raise _unreachable(node, Reason.ONLY_TLS) from error
            raise ChainUnreachable(
                f"{query}: status {response.status_code} and no JSON: {body[:60]!r}: what answers "
                "is not the REST server of a"
                " chain's node, or is out of order",
                hint="check jackal.lcd (nodes have this server, LCD, often at port 1317), or wait",
            ) from error
        if response.status_code != httpx.codes.OK:
            raise Refused(
                query, response.status_code, parse_refusal(value) or Refusal(-1, f"{body[:100]!r}")
            )
        told_height = response.headers.get(_HEIGHT_HEADER, "")
        height = int(told_height) if _HEIGHT.fullmatch(told_height) else None
        return ChainAnswer(value, named or query), height, _answered_at(response.headers)


def _unreachable(node: Node, reason: Reason) -> ChainUnreachable:
    kind = NeverAnswers if reason.lasts else ChainUnreachable
    return kind(
        f"{node.url} {reason}",
        hint=hint_for(reason, "jackal.lcd") or "name a node with a certificate that is valid here",
    )


def _answered_at(headers: httpx.Headers) -> datetime:
    """Return the time of an answer by the node's clock, since this machine's clock may be wrong;
    this machine's without a Date.

    A cache sends the Date of the original answer, and its age in seconds as Age (RFC 9111, 5.1).
    """
    with suppress(KeyError, ValueError, OverflowError):
        return parsedate_to_datetime(headers["Date"]).astimezone(UTC) + timedelta(
            seconds=int(headers.get("Age", "0"))
        )
    return datetime.now(UTC)


def _body(response: httpx.Response, query: str) -> bytes:
    """Return the answer's bytes as they are sent: what a few of them unpack to has no limit."""
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise ChainUnreachable(
            f"{query}: the answer is encoded as {encoding[:40]!a}, which was not asked for"
        )
    body = bytearray()
    for piece in response.iter_raw():
        body += piece
        if len(body) > ANSWER_BYTES:
            raise TooLong(f"{query}: the answer is longer than {ANSWER_BYTES} bytes")
    return bytes(body)


def _may_pass(error: BaseException) -> bool:
    return (
        isinstance(error, StoreUnreachable)
        and not isinstance(error, TooLong | NeverAnswers)
        and not (isinstance(error, Refused) and error.final)
    )


def _host_of(url: str) -> str:
    try:
        return httpx.URL(url).host
    except httpx.InvalidURL:
        return ""


def _behind(node: Node, height: int, seen: int) -> ChainBehind:
    return ChainBehind(
        f"{node.url} is at block {height}; {seen} was seen before",
        hint="wait until it has caught up, or name another node in jackal.lcd",
    )


def _the_fault(faults: Sequence[StoreUnreachable]) -> StoreUnreachable:
    """Return the most telling fault: what a node refused, an answer that is too long, a chain that
    has stopped, nodes behind.
    """
    for kind in (Refused, TooLong, ChainHalted, ChainBehind):
        for fault in faults:
            if isinstance(fault, kind):
                return fault
    if len(faults) == 1:
        return faults[0]
    return ChainUnreachable("; ".join(str(one) for one in faults), hint=faults[0].hint)
