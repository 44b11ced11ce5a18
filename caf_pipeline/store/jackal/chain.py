"""REST servers of chain nodes ("LCD"): requests go to one, and to the next where it fails, lags, or no longer makes blocks.

What a node does not know proves something only where the node is as far as any was ever seen. So each look-up asks the node's
height first, and below the greatest height seen its answers count for nothing.

Source: "Queries" and "Transactions" in the notes on Jackal's protocol; REST of Cosmos SDK 0.45.
"""

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final, Self, TypeVar
from urllib.parse import quote

import httpx
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from caf_pipeline.errors import (
    ChainBehind,
    ChainHalted,
    ChainUnreachable,
    EmptyWallet,
    SettingsError,
    StoreError,
    StoreUnreachable,
)
from caf_pipeline.store.jackal import LEAST_BYTES, LEAST_DAYS
from caf_pipeline.store.jackal.answers import (
    NOT_FOUND,
    TYPE_3,
    TYPE_3_SINCE,
    Account,
    Block,
    Broadcast,
    ChainAnswer,
    ChainFile,
    FileProof,
    IncludedTransaction,
    Provider,
    Refusal,
    StoragePlan,
    parse_account,
    parse_block,
    parse_broadcast,
    parse_file,
    parse_next_key,
    parse_plan,
    parse_proof,
    parse_provider,
    parse_refusal,
    parse_transaction,
    parse_version,
    quoted,
    verifies_type_3,
)
from caf_pipeline.store.jackal.messages import DENOM, NOTE_MEMBER, archive_of, root_in_path, transaction_hash
from caf_pipeline.system.http import GuardedTransport, Limit
from caf_pipeline.system.unreachable import Reason, hint_for, reason_of, speaks_only_tls
from caf_pipeline.waits import UNANSWERED_SECONDS, Waits

ATTEMPTS: Final = 5
FIRST_WAIT_SECONDS: Final = 0.5
MAX_WAIT_SECONDS: Final = 8.0
"""One call goes through all nodes so often, with waits that double at random up to the greatest: together longer than a block
of six seconds, by which one node may be ahead of another, and shorter than what a run can wait with nothing to show."""

SILENCE_SECONDS: Final = 10.0
"""A node that says nothing for so long is passed over; answers from its own state take it milliseconds."""

ANSWER_SECONDS: Final = 60.0
ANSWER_BYTES: Final = 4 * 2**20
"""The most that an answer may take, from the question to its last byte. A page of files is below 1 MiB; a longer answer is none:
JSON of 4 MiB may stand for 100 MB in memory."""

HALTED_SECONDS: Final = 300.0
HALTED_BLOCKS: Final = 50
"""A newest block older than both is one of a chain that has stopped, or of a node that is far behind. Blocks take about six
seconds; an upgrade of the network stops it for longer than five minutes, an ordinary delay does not."""

BLOCK_SECONDS: Final = 6.0
"""Between two blocks, where the chain is too young to measure it: what Jackal's main network aims at."""

_MEASURED_BLOCKS: Final = 100
_MEASURE_AGAIN_SECONDS: Final = 600.0
_AVOID_SECONDS: Final = 30.0  # a node that failed is asked last for so long
_PAGE: Final = 500  # files of about 700 bytes
_SMALLER: Final = 8  # three steps to a page of one

MAX_PAGES: Final = 50_000
LIST_SECONDS: Final = 6 * 3600.0
"""The most that a list may take. The list of all files is the longest, which a chain that cannot look for notes is asked for: a
page is some 50 ms, and 25 million files are more than twice what these pages hold of chunks that fill the network."""

MAX_KEPT: Final = 20_000
MAX_KEPT_PAGES: Final = 16
"""Of a list that is kept in memory as a whole, providers and posts of one root: there are hundreds, and a few."""

_MAX_KEY: Final = 4096  # characters of where a page begins; the chain's are a root, an address and a height
_HEIGHT: Final = re.compile(r"[0-9]{1,18}")  # below 2^63

_HEIGHT_HEADER: Final = "Grpc-Metadata-X-Cosmos-Block-Height"
"""Names the height of the state that an answer was read from; not every answer has it. Behind one address may be several
nodes, so that the height asked first need not be this one."""

_STORAGE: Final = "/jackal/canine-chain/storage"
_TENDERMINT: Final = "/cosmos/base/tendermint/v1beta1"

T = TypeVar("T")


class _Refused(ChainUnreachable):
    """A node answered with an error of its own; the caller decides whether that is an answer."""

    def __init__(self, query: str, status: int, refusal: Refusal) -> None:
        foreign = status == httpx.codes.NOT_IMPLEMENTED
        super().__init__(
            f"{query}: refused with status {status}, code {refusal.code}: {quoted(refusal.message)}",
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
        at_fault = httpx.codes.is_client_error(self.status) and self.status != httpx.codes.TOO_MANY_REQUESTS
        return at_fault or self.status == httpx.codes.NOT_IMPLEMENTED or self.no_index


class _TooLong(ChainUnreachable):
    """An answer that is longer than one may be."""


class _NeverAnswers(ChainUnreachable):
    """A server whose error lasts until the setting or the server is changed."""

    permanent = True


class _Node:
    """One REST server, and for how long it is better asked last."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.known = False  # that it is of the right chain
        self.avoid_until = 0.0


class Chain:
    """A chain by its nodes' REST servers. May be used by several threads at once."""

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
        list_seconds: float = LIST_SECONDS,
        max_pages: int = MAX_PAGES,
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
            list_seconds: how long all pages of a list may be waited for.
            max_pages: how many pages a list may have.
            halted_seconds: the age of a newest block from which on the chain may have stopped.
            waits: where it is said while no node answers.

        Raises:
            SettingsError: no URL, or one that is none.
        """
        if not urls:
            raise SettingsError("jackal.lcd names no REST server", hint='set it to a list of addresses, e.g. ["https://…:1317"]')
        for url in urls:
            if not url.startswith(("http://", "https://")) or not _host_of(url):
                raise SettingsError(
                    f"jackal.lcd: '{url}' is not the address of a REST server", hint="write http(s)://host[:port]"
                )
        self.chain_id = chain_id
        self._nodes = [_Node(url) for url in urls]
        self._seen_height = seen_height
        self._see_height = see_height
        self._attempts = attempts
        self._first_wait_seconds = first_wait_seconds
        self._silence_seconds = silence_seconds
        self._answer_seconds = answer_seconds
        self._list_seconds = list_seconds
        self._max_pages = max_pages
        self._halted_seconds = halted_seconds
        self._waits = waits or Waits()
        self._block_seconds = (BLOCK_SECONDS, 0.0)  # measured, until when it counts
        self._knows_single_proofs = True
        # A redirect could lead a signed transaction, or the belief in an answer, to a server that nobody named.
        self._client = httpx.Client(
            transport=GuardedTransport(),
            follow_redirects=False,
            headers={"Accept": "application/json", "Accept-Encoding": "identity"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    # what it is

    def height(self) -> int:
        """Return the newest height of a node that is not behind."""
        return self._asked(lambda _, block: block.height)

    def block_seconds(self) -> float:
        """Return the time between two blocks, over the last hundred of them; measured every ten minutes."""
        seconds, until = self._block_seconds
        if time.monotonic() < until:
            return seconds
        seconds = self._asked(self._measured_block_seconds)
        self._block_seconds = (seconds, time.monotonic() + _MEASURE_AGAIN_SECONDS)
        return seconds

    def proof_window(self) -> int:
        """Return the blocks of a window, as the storage module is set: a copy is proven once in each."""
        return self._one(f"{_STORAGE}/params", lambda answer: answer.object("params").integer("proof_window"))

    def require_verified(self, proof_type: int) -> None:
        """Raise where the chain may not verify proofs of this type; called before anything is paid.

        Type 0 needs no question. For type 3 every node that answers is asked, and each has to be new enough: the nodes of one
        chain run one version, and of two that differ nothing tells which is right. To believe the older one costs a setting; to
        believe the newer one wrongly costs a post that is never proven.

        Raises:
            SettingsError: a node names an older version, or none that is readable. ChainUnreachable: no node answers.
        """
        for url, version in self._retrying(self._versions) if proof_type == TYPE_3 else ():
            if not verifies_type_3(version):
                raise SettingsError(
                    f"jackal.proof_type is 3, which this chain may not be able to verify: {url} names the version"
                    f" '{quoted(version, 40)}', and it takes {'.'.join(map(str, TYPE_3_SINCE))} or later",
                    hint="set jackal.proof_type = 0; what was packed for type 3 and not posted is posted as type 0 then",
                )

    # the wallet

    def account(self, address: str) -> Account:
        """Return an account's number and next sequence.

        Raises:
            EmptyWallet: the chain does not know it, since it never received anything.
        """
        found = self._one_or_none(f"/cosmos/auth/v1beta1/accounts/{_part(address)}", parse_account)
        if found is None:
            raise EmptyWallet(
                f"the wallet {address} has no account on chain {self.chain_id}: it never received anything",
                hint=f"send {DENOM} to it",
            )
        return found

    def balance(self, address: str) -> int:
        """Return what an account has, in ujkl; 0 where the chain does not know it."""
        path = f"/cosmos/bank/v1beta1/balances/{_part(address)}/by_denom"
        return self._one_or_none(path, lambda answer: answer.object("balance").integer("amount"), {"denom": DENOM}) or 0

    def plan(self, address: str) -> StoragePlan | None:
        """Return the space that an account bought; None where it never bought any. It may have ended."""
        return self._one_or_none(f"{_STORAGE}/payment_info/{_part(address)}", parse_plan)

    def price(self, days: int, size_bytes: int) -> int:
        """Return what space costs now, in ujkl.

        Raises:
            StoreError: less than the chain sells.
        """
        if days < LEAST_DAYS or size_bytes < LEAST_BYTES:
            raise StoreError(
                f"{size_bytes} bytes for {days} days are less than the chain sells",
                hint=f"ask for at least {LEAST_BYTES} bytes and {LEAST_DAYS} days",
            )
        return self._one(f"{_STORAGE}/price_check/{days}/{size_bytes}", lambda answer: answer.integer("price"))

    # files

    def file(self, merkle_root: bytes, owner: str, start: int) -> ChainFile | None:
        """Return a file as it is now; None where the chain has none of these three.

        "Not found" is believed only where the list of its root says so, too: behind one address there may be several nodes,
        and one that lags answers 404 without saying how far it is.
        """
        path = f"{_STORAGE}/files/{root_in_path(merkle_root)}/{_part(owner)}/{start}"
        found = self._one_or_none(path, lambda answer: parse_file(answer.object("file")))
        if found is not None:
            return found
        listed = (one for page in self._pages_of_root(merkle_root) for one in page)
        return next((one for one in listed if (one.owner, one.start) == (owner, start)), None)

    def files_of_root(self, merkle_root: bytes, owner: str | None = None) -> Sequence[ChainFile]:
        """Return all files of a root, of this owner or of whichever: anybody may post a root again, and again."""
        pages = self._pages_of_root(merkle_root)
        return self._kept([one for one in page if owner in (None, one.owner)] for page in pages)

    def _pages_of_root(self, merkle_root: bytes) -> Iterator[list[ChainFile]]:
        path = f"{_STORAGE}/files/merkle/{root_in_path(merkle_root)}"
        try:
            for page in self._pages(path, parse_file, "files"):
                yield [one for one in page if one.merkle_root == merkle_root]
        except _Refused as refused:
            if not refused.not_found:
                raise

    def files_of_archive(self, owner: str | None, archive_id: str) -> Iterator[ChainFile]:
        """Yield the files that an owner (None: whoever) posted for an archive; where a chain cannot look for notes, from all."""
        for page in self.file_pages(archive_id):
            yield from _of_archive(page, owner, archive_id)

    def files_of_owner(self, owner: str) -> Iterator[ChainFile]:
        """Yield all files of an owner: there is no query for that, so that the whole network's are gone through."""
        for page in self.file_pages(None):
            yield from (one for one in page if one.owner == owner)

    def file_pages(self, archive_id: str | None) -> Iterator[list[ChainFile]]:
        """Yield the pages of an archive's files; of the whole network's (None), also where a chain cannot look for notes."""
        if archive_id is not None:
            pages = self._pages(f"{_STORAGE}/files/note/{NOTE_MEMBER}/{_part(archive_id)}", parse_file, "files")
            try:
                first = next(pages, [])
            except _Refused as refused:
                # 400: a node whose routes take "note" for a root answers that the rest is no height.
                if refused.status not in (httpx.codes.BAD_REQUEST, httpx.codes.NOT_FOUND, httpx.codes.NOT_IMPLEMENTED):
                    raise
            else:
                yield first
                yield from pages
                return
        yield from self._pages(f"{_STORAGE}/files", parse_file, "files")

    # providers

    def providers(self) -> Sequence[Provider]:
        """Return all providers that ever registered."""
        return self._kept(self._pages(f"{_STORAGE}/providers", parse_provider, "providers"))

    def active_providers(self) -> Sequence[Provider]:
        """Return the providers that hold a proof; empty on a young chain."""
        pages = self._pages(f"{_STORAGE}/active_providers", lambda one: one.text("address"), "providers")
        active = set(self._kept(pages))
        return [one for one in self.providers() if one.address in active] if active else []

    def proof(self, provider: str, merkle_root: bytes, owner: str, start: int) -> FileProof | None:
        """Return what the chain keeps of a copy's proofs, all of it from one answer; None where it tells of none."""

        def asked_for(proof: FileProof) -> bool:
            of_file = (proof.merkle_root, proof.owner, proof.start) == (merkle_root, owner, start)
            return of_file and proof.provider in ("", provider)

        path = f"{_STORAGE}/proofs/{_part(provider)}"
        if self._knows_single_proofs:
            try:
                single = f"{path}/{root_in_path(merkle_root)}/{_part(owner)}/{start}"
                found = self._one(single, lambda answer: parse_proof(answer.object("proof")))
                if asked_for(found):
                    return found
            except _Refused as refused:
                # Read in the chain's source, not run. A provider has as many proofs as files, so that going through them is slow.
                self._knows_single_proofs = refused.status != httpx.codes.NOT_IMPLEMENTED
        return next((one for page in self.proof_pages(provider) for one in page if asked_for(one)), None)

    def proof_pages(self, provider: str) -> Iterator[list[FileProof]]:
        """Yield the pages of a provider's proofs, one for each file that it is listed with, whoever owns it."""
        # A chain of version 4 calls the list by the singular.
        yield from self._pages(f"{_STORAGE}/proofs/{_part(provider)}", parse_proof, "proofs", "proof")

    # transactions

    def broadcast(self, body: bytes) -> Broadcast:
        """Send a transaction. Where this raises, it may have been sent all the same; sending the same bytes again is harmless."""
        message = json.dumps({"tx_bytes": base64.b64encode(body).decode(), "mode": "BROADCAST_MODE_SYNC"}).encode()
        query = f"transaction {transaction_hash(body)[:12]}…"
        return self._asked(
            lambda node, _: parse_broadcast(
                self._answer("POST", node, "/cosmos/tx/v1beta1/txs", content=message, named=f"{node.url}: {query}")[0]
            )
        )

    def transaction(self, hash: str) -> IncludedTransaction | None:
        """Return a transaction that is in a block.

        None where the node does not know it, also where it keeps no index of transactions: then what the transaction did has to
        tell whether it is in a block.
        """
        try:
            found = self._one_or_none(f"/cosmos/tx/v1beta1/txs/{_part(hash)}", parse_transaction)
        except _Refused as refused:
            if refused.no_index:
                return None
            raise
        if found is not None:
            self._saw(found.height)
        return found

    # asking

    def _one(self, path: str, parse: Callable[[ChainAnswer], T], params: Mapping[str, str] | None = None) -> T:
        return self._asked(lambda node, block: self._read(node, block, path, parse, params))

    def _one_or_none(self, path: str, parse: Callable[[ChainAnswer], T], params: Mapping[str, str] | None = None) -> T | None:
        def ask(node: _Node, block: Block) -> T | None:
            try:
                return self._read(node, block, path, parse, params)
            except _Refused as refused:
                if refused.not_found:
                    return None
                raise

        return self._asked(ask)

    def _pages(self, path: str, parse: Callable[[ChainAnswer], T], *names: str) -> Iterator[list[T]]:
        """Yield the pages of a list, which has one of these names; one may be empty and not the last."""

        def read(answer: ChainAnswer) -> tuple[list[T], str | None]:
            name = next(filter(answer.has, names), names[-1])
            return [parse(one) for one in answer.objects(name)], parse_next_key(answer)

        key: str | None = None
        keys: set[bytes] = set()
        waited = 0.0
        size = _PAGE
        while True:
            params = {"pagination.limit": str(size)} | ({"pagination.key": key} if key else {})
            asked = time.monotonic()
            try:
                page, key = self._one(path, read, params)
            except _TooLong:
                if size == 1:
                    raise
                size = max(1, size // _SMALLER)  # somebody wrote long notes; they must not hide what is beside them
                continue
            size = min(_PAGE, 2 * size)
            waited += time.monotonic() - asked  # what is done with a page is not the chain's time
            yield page
            if key is None:
                return
            named = hashlib.sha256(key.encode()).digest()  # a node may make up keys of any length
            if named in keys:
                raise _endless(path, f"key {quoted(key, 40)} came twice")
            keys.add(named)
            if len(key) > _MAX_KEY:
                raise _endless(path, f"a key has {len(key)} characters")
            if len(keys) >= self._max_pages:
                raise _endless(path, f"there are more than {self._max_pages} pages")
            if waited > self._list_seconds:
                raise _endless(path, f"{len(keys)} pages took more than {self._list_seconds:g} s")

    @staticmethod
    def _kept(pages: Iterable[list[T]]) -> list[T]:
        """Return all that a list has."""
        kept: list[T] = []
        kept_pages = 0
        for page in pages:
            kept += page
            kept_pages += bool(page)
            if len(kept) > MAX_KEPT or kept_pages > MAX_KEPT_PAGES:
                raise ChainUnreachable(
                    f"the chain returned a list of more than {len(kept) - 1} entries; far fewer are expected",
                    hint="name another node in jackal.lcd",
                )
        return kept

    def _asked(self, ask: Callable[[_Node, Block], T]) -> T:
        """Return what the first good node answers.

        Raises:
            StoreUnreachable: after all attempts, as one of its kinds. SettingsError: a node is of another chain.
        """
        return self._retrying(lambda: self._asked_once(ask))

    def _retrying(self, asked: Callable[[], T]) -> T:
        """Return what `asked` does, trying again while the fault may pass; the wait is reported after some seconds."""
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

    def _asked_once(self, ask: Callable[[_Node, Block], T]) -> T:
        faults: list[StoreUnreachable] = []
        now = time.monotonic()
        for node in sorted(self._nodes, key=lambda one: one.avoid_until > now):
            try:
                return ask(node, self._newest_block(node))
            except StoreUnreachable as error:
                faults.append(error)
                if not isinstance(error, _Refused | ChainBehind):
                    node.avoid_until = time.monotonic() + _AVOID_SECONDS
        raise _the_fault(faults)

    def _versions(self) -> list[tuple[str, str]]:
        """Return the version that each node names which answers; one that failed a moment ago is asked only if no other does."""
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

    def _info(self, node: _Node) -> ChainAnswer:
        """Return what a node of this chain says of itself."""
        info = self._answer("GET", node, f"{_TENDERMINT}/node_info")[0]
        self._check_chain(node, info.object("default_node_info").text("network"))
        node.known = True
        return info

    def _newest_block(self, node: _Node) -> Block:
        """Return the node's newest block; raise where the node lags, halts or is of another chain."""
        if not node.known:
            self._info(node)
        block = parse_block(self._answer("GET", node, f"{_TENDERMINT}/blocks/latest")[0])
        self._check_chain(node, block.chain_id)
        seen = self._seen_height()
        if block.height < seen:
            raise _behind(node, block.height, seen)
        age = (datetime.now(UTC) - block.time).total_seconds()
        if age > self._halted_seconds and age > HALTED_BLOCKS * self._measured_block_seconds(node, block):
            raise ChainHalted(
                f"{node.url}: the newest block, {block.height}, is {age:.0f} s old",
                hint="no block is made, the node is far behind, or this machine's clock is wrong: wait, or name another",
            )
        self._saw(block.height, seen)
        return block

    def _saw(self, height: int, seen: int | None = None) -> None:
        if height > (self._seen_height() if seen is None else seen):
            self._see_height(height)

    def _check_chain(self, node: _Node, found: str) -> None:
        if found != self.chain_id:
            raise SettingsError(
                f"jackal.lcd: {node.url} is a node of chain '{quoted(found, 60)}', not of '{self.chain_id}'",
                hint="correct jackal.lcd or jackal.chain_id",
            )

    def _measured_block_seconds(self, node: _Node, block: Block) -> float:
        earlier = max(1, block.height - _MEASURED_BLOCKS)
        # A node may have dropped its old blocks; then the figure is what the network aims at.
        with suppress(_Refused):
            first = parse_block(self._answer("GET", node, f"{_TENDERMINT}/blocks/{earlier}")[0])
            if first.height < block.height and first.time < block.time:
                return (block.time - first.time).total_seconds() / (block.height - first.height)
        return BLOCK_SECONDS

    def _read(
        self, node: _Node, block: Block, path: str, parse: Callable[[ChainAnswer], T], params: Mapping[str, str] | None
    ) -> T:
        """Return a node's answer, from a state not below the block."""
        answer, height = self._answer("GET", node, path, params=params)
        if height is not None and height < block.height:
            raise _behind(node, height, block.height)
        return parse(answer)

    def _answer(
        self,
        method: str,
        node: _Node,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        content: bytes | None = None,
        named: str = "",
    ) -> tuple[ChainAnswer, int | None]:
        """Return an answer, which errors call `named`, and the height of its state where the node tells it."""
        query = f"{node.url}{path}"
        headers = {"Content-Type": "application/json"} if content is not None else {}
        limit = Limit(self._answer_seconds, silence=self._silence_seconds)
        try:
            with self._client.stream(
                method, query, params=params, content=content, headers=headers, extensions=limit.extensions
            ) as response:
                body = _body(response, query)
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, UnicodeError) as error:
            if limit.is_over:
                told = f"{query}: no answer: it took longer than {self._answer_seconds:g} s"
                raise ChainUnreachable(told, hint="check jackal.lcd and the network, or wait") from error
            raise _unreachable(node, reason_of(error, node.url)) from error
        try:
            value = json.loads(body)
        except (ValueError, RecursionError, MemoryError) as error:
            if response.status_code == httpx.codes.BAD_REQUEST and speaks_only_tls(node.url):
                raise _unreachable(node, Reason.ONLY_TLS) from error
            raise ChainUnreachable(
                f"{query}: status {response.status_code} and no JSON: {body[:60]!r}: what answers is not the REST server of a"
                " chain's node, or is out of order",
                hint="check jackal.lcd (nodes have this server, LCD, often at port 1317), or wait",
            ) from error
        if response.status_code != httpx.codes.OK:
            raise _Refused(query, response.status_code, parse_refusal(value) or Refusal(-1, f"{body[:100]!r}"))
        told_height = response.headers.get(_HEIGHT_HEADER, "")
        return ChainAnswer(value, named or query), int(told_height) if _HEIGHT.fullmatch(told_height) else None


def _unreachable(node: _Node, reason: Reason) -> ChainUnreachable:
    kind = _NeverAnswers if reason.lasts else ChainUnreachable
    return kind(
        f"{node.url} {reason}", hint=hint_for(reason, "jackal.lcd") or "name a node with a certificate that is valid here"
    )


def _body(response: httpx.Response, query: str) -> bytes:
    """Return the answer's bytes as they are sent: what a few of them unpack to has no limit."""
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise ChainUnreachable(f"{query}: the answer is encoded as {encoding[:40]!a}, which was not asked for")
    body = bytearray()
    for piece in response.iter_raw():
        body += piece
        if len(body) > ANSWER_BYTES:
            raise _TooLong(f"{query}: the answer is longer than {ANSWER_BYTES} bytes")
    return bytes(body)


def _endless(path: str, sign: str) -> ChainUnreachable:
    return ChainUnreachable(f"{path}: the list of pages has no end: {sign}", hint="name another node")


def _may_pass(error: BaseException) -> bool:
    return (
        isinstance(error, StoreUnreachable)
        and not isinstance(error, _TooLong | _NeverAnswers)
        and not (isinstance(error, _Refused) and error.final)
    )


def _host_of(url: str) -> str:
    try:
        return httpx.URL(url).host
    except httpx.InvalidURL:
        return ""


def _part(text: str) -> str:
    return quote(text, safe="")


def _of_archive(files: Sequence[ChainFile], owner: str | None, archive_id: str) -> Iterator[ChainFile]:
    return (one for one in files if owner in (None, one.owner) and archive_of(one.note) == archive_id)


def _behind(node: _Node, height: int, seen: int) -> ChainBehind:
    return ChainBehind(
        f"{node.url} is at block {height}; {seen} was seen before",
        hint="wait until it has caught up, or name another node in jackal.lcd",
    )


def _the_fault(faults: Sequence[StoreUnreachable]) -> StoreUnreachable:
    """Return the most telling fault: what a node refused, an answer that is too long, a chain that has stopped, nodes behind."""
    for kind in (_Refused, _TooLong, ChainHalted, ChainBehind):
        for fault in faults:
            if isinstance(fault, kind):
                return fault
    if len(faults) == 1:
        return faults[0]
    return ChainUnreachable("; ".join(str(one) for one in faults), hint=faults[0].hint)
