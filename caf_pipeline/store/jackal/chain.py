"""Queries to the chain: the wallet, files, providers and their proofs, transactions.

Source: "Queries" and "Transactions" in the notes on Jackal's protocol; REST of Cosmos SDK 0.45.
"""

import base64
import hashlib
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from datetime import datetime
from typing import Final, Self, TypeVar
from urllib.parse import quote

import httpx

from caf_pipeline.errors import (
    ChainUnreachable,
    EmptyWallet,
    SettingsError,
    StoreError,
)
from caf_pipeline.store.jackal import LEAST_BYTES, LEAST_DAYS
from caf_pipeline.store.jackal.answers import (
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
    StoragePlan,
    parse_account,
    parse_broadcast,
    parse_file,
    parse_next_key,
    parse_plan,
    parse_proof,
    parse_provider,
    parse_transaction,
    quoted,
    verifies_type_3,
)
from caf_pipeline.store.jackal.names import (
    DENOM,
    NOTE_MEMBER,
    archive_of,
    is_ours,
    root_in_path,
    transaction_hash,
)
from caf_pipeline.store.jackal.nodes import Node, Nodes, Refused, TooLong
from caf_pipeline.system.quantities import show_size

_PAGE: Final = 500  # files of about 700 bytes
_SHRINK_FACTOR: Final = 8  # reduces a page to one file in three steps

MAX_PAGES: Final = 50_000
LIST_SECONDS: Final = 6 * 3600.0
"""Limits of a list. A chain that cannot search notes must list all files.

A page takes about 50 ms. 25 million files are twice the full chunks that fill the network.
"""

MAX_LIST_ENTRIES: Final = 20_000
MAX_LIST_PAGES: Final = 16
"""Limits in memory: hundreds of providers, or the few posts of a root."""

_MAX_KEY: Final = 4096  # characters of a page key; the chain's are a root, an address and a height
_STORAGE: Final = "/jackal/canine-chain/storage"

T = TypeVar("T")


class Chain:
    """A chain, queried through its nodes. Safe for several threads."""

    def __init__(
        self, nodes: Nodes, *, list_seconds: float = LIST_SECONDS, max_pages: int = MAX_PAGES
    ) -> None:
        self.chain_id = nodes.chain_id
        self._nodes = nodes
        self._list_seconds = list_seconds
        self._max_pages = max_pages
        self._knows_single_proofs = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._nodes.close()

    def height(self) -> int:
        """Ask a node that is not behind."""
        return self._nodes.query_first(lambda _, block: block.height)

    def now(self) -> datetime:
        """Return the newest block's time, with which the ends of plans are compared."""
        return self._nodes.query_first(lambda _, block: block.time)

    def block_seconds(self) -> float:
        return self._nodes.block_seconds()

    def proof_window(self) -> int:
        """Return the blocks of a window. A copy is proven once in each."""
        return self._get(
            f"{_STORAGE}/params", lambda answer: answer.object("params").integer("proof_window")
        )

    def require_verified(self, proof_type: int) -> None:
        """Raise if the chain may not verify proofs of this type. Called before anything is paid.

        For type 3 every node that answers must be new enough. Nodes of one chain run one version,
        so if two differ, either may be wrong. Wrongly trusting the newer one costs a post that is
        never proven.

        Raises:
            SettingsError: a node reports an older or unreadable version.
        """
        for url, version in self._nodes.versions() if proof_type == TYPE_3 else ():
            if not verifies_type_3(version):
                raise SettingsError(
                    f"jackal.proof_type is 3, but this chain may not verify such proofs: {url} has "
                    f"version '{quoted(version, 40)}', and type 3 needs "
                    f"{'.'.join(map(str, TYPE_3_SINCE))} or later",
                    hint="set jackal.proof_type = 0; chunks that were packed for type 3 and not "
                    "posted are then posted as type 0",
                )

    def account(self, address: str) -> Account:
        """Raises EmptyWallet if the account never received anything."""
        path = f"/cosmos/auth/v1beta1/accounts/{_part(address)}"
        account = self._get_or_none(path, parse_account)
        if account is None:
            raise EmptyWallet(
                f"the wallet {address} has no account on chain {self.chain_id}: it never received "
                "anything",
                hint=f"send {DENOM} to it",
            )
        return account

    def balance(self, address: str) -> int:
        path = f"/cosmos/bank/v1beta1/balances/{_part(address)}/by_denom"
        return (
            self._get_or_none(
                path, lambda answer: answer.object("balance").integer("amount"), {"denom": DENOM}
            )
            or 0
        )

    def plan(self, address: str) -> StoragePlan | None:
        """The plan may have ended."""
        return self._get_or_none(f"{_STORAGE}/payment_info/{_part(address)}", parse_plan)

    def confirmed_plan(self, address: str) -> tuple[StoragePlan | None, datetime]:
        """Return the plan whose start and end most nodes report, and the earliest time of all.

        Among equals the earlier end wins, then the earlier start: a false alarm harms less than a
        hidden end.
        """
        plan_of = self._query(f"{_STORAGE}/payment_info/{_part(address)}", parse_plan)
        answers = self._nodes.query_all(lambda node, block: (plan_of(node, block), block.time))

        def times(plan: StoragePlan | None) -> tuple[float, float]:
            ends_at, starts_at = (plan.ends_at, plan.starts_at) if plan else (None, None)
            return (
                ends_at.timestamp() if ends_at else -math.inf,
                starts_at.timestamp() if starts_at else -math.inf,
            )

        counts = Counter(times(plan) for plan, _ in answers)

        def rank(plan: StoragePlan | None) -> tuple[int, tuple[float, float]]:
            return -counts[times(plan)], times(plan)

        return min((plan for plan, _ in answers), key=rank), min(time for _, time in answers)

    def price(self, days: int, size_bytes: int) -> int:
        """Return the current price in ujkl. Raises StoreError for too little space."""
        if days < LEAST_DAYS or size_bytes < LEAST_BYTES:
            raise StoreError(
                f"{show_size(size_bytes)} for {days} days are less than the chain sells",
                hint=f"ask for at least {show_size(LEAST_BYTES)} and {LEAST_DAYS} days",
            )
        return self._get(
            f"{_STORAGE}/price_check/{days}/{size_bytes}", lambda answer: answer.integer("price")
        )

    def list_price(self) -> int:
        """Return the US dollars for a TB in three copies and 30 days, before discounts."""
        return self._get(
            f"{_STORAGE}/params",
            lambda answer: answer.object("params").integer("price_per_tb_per_month"),
        )

    def file(self, merkle_root: bytes, owner: str, start: int) -> ChainFile | None:
        """Return the current state of a file.

        "Not found" counts only if the list of the root confirms it: nodes may share an address, and
        a lagging one answers 404 without its height.
        """
        path = f"{_STORAGE}/files/{root_in_path(merkle_root)}/{_part(owner)}/{start}"
        file = self._get_or_none(path, lambda answer: parse_file(answer.object("file")))
        if file is not None:
            return file
        files = (file for page in self._pages_of_root(merkle_root) for file in page)
        return next((file for file in files if (file.owner, file.start) == (owner, start)), None)

    def files_of_root(self, merkle_root: bytes, owner: str | None = None) -> Sequence[ChainFile]:
        """Any wallet may post a root repeatedly."""
        pages = self._pages_of_root(merkle_root)
        return self._collect(
            [file for file in page if owner in (None, file.owner)] for page in pages
        )

    def _pages_of_root(self, merkle_root: bytes) -> Iterator[list[ChainFile]]:
        path = f"{_STORAGE}/files/merkle/{root_in_path(merkle_root)}"
        try:
            for page in self._pages(path, parse_file, "files"):
                yield [file for file in page if file.merkle_root == merkle_root]
        except Refused as refused:
            if not refused.not_found:
                raise

    def files_of_archive(self, owner: str | None, archive_id: str) -> Iterator[ChainFile]:
        """Reads the list of all files if the chain cannot search notes."""
        for page in self.file_pages(archive_id):
            for file in page:
                if owner in (None, file.owner) and archive_of(file.note) == archive_id:
                    yield file

    def files_of_owner(self, owner: str) -> Iterator[ChainFile]:
        """Reads the list of all files."""
        for page in self.file_pages(None):
            yield from (file for file in page if file.owner == owner)

    def archives_of(self, owner: str) -> Mapping[str | None, Sequence[int]]:
        """Return the starts of an owner's files by archive, None if the note cannot be read.

        Files of other programs are left out. Reads the list of all files.
        """
        starts = defaultdict[str | None, list[int]](list)
        for file in self.files_of_owner(owner):
            if is_ours(file.note):
                starts[archive_of(file.note)].append(file.start)
        return starts

    def file_pages(self, archive_id: str | None) -> Iterator[list[ChainFile]]:
        """Yields all files if `archive_id` is None or the chain cannot search notes."""
        if archive_id is not None:
            pages = self._pages(
                f"{_STORAGE}/files/note/{NOTE_MEMBER}/{_part(archive_id)}", parse_file, "files"
            )
            try:
                first = next(pages, [])
            except Refused as refused:
                # 400: a node without this route parses "note" as a root and the rest as a height.
                if refused.status not in (
                    httpx.codes.BAD_REQUEST,
                    httpx.codes.NOT_FOUND,
                    httpx.codes.NOT_IMPLEMENTED,
                ):
                    raise
            else:
                yield first
                yield from pages
                return
        yield from self._pages(f"{_STORAGE}/files", parse_file, "files")

    def providers(self) -> Sequence[Provider]:
        return self._collect(self._pages(f"{_STORAGE}/providers", parse_provider, "providers"))

    def active_providers(self) -> Set[str]:
        """Return the addresses of the providers with a proof. Empty on a young chain."""
        pages = self._pages(
            f"{_STORAGE}/active_providers", lambda answer: answer.text("address"), "providers"
        )
        return frozenset(self._collect(pages))

    def proof(self, provider: str, merkle_root: bytes, owner: str, start: int) -> FileProof | None:
        """Read all fields from one answer."""

        def matches(proof: FileProof) -> bool:
            same_file = (proof.merkle_root, proof.owner, proof.start) == (merkle_root, owner, start)
            return same_file and proof.provider in ("", provider)

        file = f"{root_in_path(merkle_root)}/{_part(owner)}/{start}"
        path = f"{_STORAGE}/proofs/{_part(provider)}/{file}"
        if self._knows_single_proofs:
            try:
                proof = self._get(path, lambda answer: parse_proof(answer.object("proof")))
                if matches(proof):
                    return proof
            except Refused as refused:
                # Read in the chain's source, not run. The fallback is slow: a provider has as many
                # proofs as files.
                self._knows_single_proofs = refused.status != httpx.codes.NOT_IMPLEMENTED
        proofs = (proof for page in self.proof_pages(provider) for proof in page)
        return next(filter(matches, proofs), None)

    def proof_pages(self, provider: str) -> Iterator[list[FileProof]]:
        """One proof for each listed file of any owner."""
        # Version 4 of the chain names the list in the singular.
        yield from self._pages(
            f"{_STORAGE}/proofs/{_part(provider)}", parse_proof, "proofs", "proof"
        )

    def broadcast(self, body: bytes) -> Broadcast:
        """Send a transaction; repeats are harmless. If this raises, it may have been sent."""
        message = json.dumps(
            {"tx_bytes": base64.b64encode(body).decode(), "mode": "BROADCAST_MODE_SYNC"}
        ).encode()
        query = f"transaction {transaction_hash(body)[:12]}…"
        return self._nodes.query_first(
            lambda node, _: parse_broadcast(
                self._nodes.answer(
                    "POST",
                    node,
                    "/cosmos/tx/v1beta1/txs",
                    content=message,
                    query_name=f"{node.url}: {query}",
                )[0]
            )
        )

    def transaction(self, hash: str) -> IncludedTransaction | None:
        """None if the node does not know it or keeps no index. Then only its effect shows it."""
        try:
            included = self._get_or_none(f"/cosmos/tx/v1beta1/txs/{_part(hash)}", parse_transaction)
        except Refused as refused:
            if refused.no_index:
                return None
            raise
        if included is not None:
            self._nodes.saw(included.height)
        return included

    def _get(
        self, path: str, parse: Callable[[ChainAnswer], T], params: Mapping[str, str] | None = None
    ) -> T:
        return self._nodes.query_first(
            lambda node, block: self._nodes.read(node, block, path, parse, params)
        )

    def _get_or_none(
        self, path: str, parse: Callable[[ChainAnswer], T], params: Mapping[str, str] | None = None
    ) -> T | None:
        return self._nodes.query_first(self._query(path, parse, params))

    def _query(
        self, path: str, parse: Callable[[ChainAnswer], T], params: Mapping[str, str] | None = None
    ) -> Callable[[Node, Block], T | None]:
        def ask(node: Node, block: Block) -> T | None:
            try:
                return self._nodes.read(node, block, path, parse, params)
            except Refused as refused:
                if refused.not_found:
                    return None
                raise

        return ask

    def _pages(
        self, path: str, parse: Callable[[ChainAnswer], T], *names: str
    ) -> Iterator[list[T]]:

        def read(answer: ChainAnswer) -> tuple[list[T], str | None]:
            name = next(filter(answer.has, names), names[-1])
            return [parse(entry) for entry in answer.objects(name)], parse_next_key(answer)

        key: str | None = None
        keys: set[bytes] = set()
        waited = 0.0
        size = _PAGE
        while True:
            params = {"pagination.limit": str(size)} | ({"pagination.key": key} if key else {})
            asked_at = time.monotonic()
            try:
                page, key = self._get(path, read, params)
            except TooLong:
                if size == 1:
                    raise
                # Long notes of other wallets must not hide the other files of the page.
                size = max(1, size // _SHRINK_FACTOR)
                continue
            size = min(_PAGE, 2 * size)
            waited += time.monotonic() - asked_at  # without the caller's work on a page
            yield page
            if key is None:
                return
            digest = hashlib.sha256(key.encode()).digest()  # a node may invent keys of any length
            if digest in keys:
                raise _endless(path, f"key {quoted(key, 40)} came twice")
            keys.add(digest)
            if len(key) > _MAX_KEY:
                raise _endless(path, f"a key has {len(key)} characters")
            if len(keys) >= self._max_pages:
                raise _endless(path, f"there are more than {self._max_pages} pages")
            if waited > self._list_seconds:
                raise _endless(path, f"{len(keys)} pages took more than {self._list_seconds:g} s")

    @staticmethod
    def _collect(pages: Iterable[list[T]]) -> list[T]:
        entries: list[T] = []
        page_count = 0
        for page in pages:
            entries += page
            page_count += bool(page)
            if len(entries) > MAX_LIST_ENTRIES or page_count > MAX_LIST_PAGES:
                raise ChainUnreachable(
                    f"the chain returned a list of more than {len(entries) - 1} entries; far fewer "
                    "are expected",
                    hint="set another node in jackal.lcd",
                )
        return entries


def _endless(path: str, sign: str) -> ChainUnreachable:
    return ChainUnreachable(
        f"{path}: the list of pages has no end: {sign}", hint="set another node in jackal.lcd"
    )


def _part(text: str) -> str:
    return quote(text, safe="")
