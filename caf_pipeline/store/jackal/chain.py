"""What is asked of the chain: the wallet, what is posted, providers and their proofs, transactions.

`nodes` is who answers.

Source: "Queries" and "Transactions" in the notes on Jackal's protocol; REST of Cosmos SDK 0.45.
"""

import base64
import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    root_in_path,
    transaction_hash,
)
from caf_pipeline.store.jackal.nodes import Node, Nodes, Refused, TooLong

_PAGE: Final = 500  # files of about 700 bytes
_SMALLER: Final = 8  # three steps to a page of one

MAX_PAGES: Final = 50_000
LIST_SECONDS: Final = 6 * 3600.0
"""The most that a list may take.

The list of all files is the longest, which a chain that cannot look for notes is asked for: a page
is some 50 ms, and 25 million files are more than twice what these pages hold of chunks that fill
the network.
"""

MAX_KEPT: Final = 20_000
MAX_KEPT_PAGES: Final = 16
"""Of a list that is kept in memory as a whole, providers and posts of one root: there are hundreds,
and a few.
"""

_MAX_KEY: Final = (
    4096  # characters of where a page begins; the chain's are a root, an address and a height
)
_STORAGE: Final = "/jackal/canine-chain/storage"

T = TypeVar("T")


class Chain:
    """A chain by its nodes' REST servers. May be used by several threads at once."""

    def __init__(
        self, nodes: Nodes, *, list_seconds: float = LIST_SECONDS, max_pages: int = MAX_PAGES
    ) -> None:
        """Name whom to ask.

        Args:
            nodes: are closed with the chain.
            list_seconds: how long all pages of a list may be waited for.
            max_pages: how many pages a list may have.
        """
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
        """Close the connections."""
        self._nodes.close()

    # what it is

    def height(self) -> int:
        """Return the newest height of a node that is not behind."""
        return self._nodes.asked(lambda _, block: block.height)

    def now(self) -> datetime:
        """Return the time of the newest block, with which the chain compares the ends of plans."""
        return self._nodes.asked(lambda _, block: block.time)

    def block_seconds(self) -> float:
        """Return the time between two blocks, over the last hundred of them; measured every ten
        minutes.
        """
        return self._nodes.block_seconds()

    def proof_window(self) -> int:
        """Return the blocks of a window, as the storage module is set: a copy is proven once in
        each.
        """
        return self._one(
            f"{_STORAGE}/params", lambda answer: answer.object("params").integer("proof_window")
        )

    def require_verified(self, proof_type: int) -> None:
        """Raise where the chain may not verify proofs of this type; called before anything is paid.

        Type 0 needs no question. For type 3 every node that answers is asked, and each has to be
        new enough: the nodes of one chain run one version, and of two that differ nothing tells
        which is right. To believe the older one costs a setting; to believe the newer one wrongly
        costs a post that is never proven.

        Raises: SettingsError: a node names an older version, or none that is readable.
            ChainUnreachable: no node answers.
        """
        for url, version in self._nodes.versions() if proof_type == TYPE_3 else ():
            if not verifies_type_3(version):
                raise SettingsError(
                    f"jackal.proof_type is 3, which this chain may not be able to verify: {url} "
                    "names the version"
                    f" '{quoted(version, 40)}', and it takes {'.'.join(map(str, TYPE_3_SINCE))} or "
                    "later",
                    hint="set jackal.proof_type = 0; what was packed for type 3 and not posted is "
                    "posted as type 0 then",
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
                f"the wallet {address} has no account on chain {self.chain_id}: it never received "
                "anything",
                hint=f"send {DENOM} to it",
            )
        return found

    def balance(self, address: str) -> int:
        """Return what an account has, in ujkl; 0 where the chain does not know it."""
        path = f"/cosmos/bank/v1beta1/balances/{_part(address)}/by_denom"
        return (
            self._one_or_none(
                path, lambda answer: answer.object("balance").integer("amount"), {"denom": DENOM}
            )
            or 0
        )

    def plan(self, address: str) -> StoragePlan | None:
        """Return the space that an account bought; None where it never bought any.

        It may have ended.
        """
        return self._one_or_none(f"{_STORAGE}/payment_info/{_part(address)}", parse_plan)

    def confirmed_plan(self, address: str) -> tuple[StoragePlan | None, datetime]:
        """Ask every node that is not behind.

        Return the plan with the end that most of them report, and the chain's time.

        If two ends have as many nodes, the earlier end counts: a false alarm harms less than a
        hidden end. The time is the earliest of the nodes' newest blocks.
        """
        plan_of = self._question(f"{_STORAGE}/payment_info/{_part(address)}", parse_plan)
        answers = self._nodes.each(lambda node, block: (plan_of(node, block), block.time))
        ends = Counter(plan.ends_at if plan else None for plan, _ in answers)

        def rank(plan: StoragePlan | None) -> tuple[int, float]:
            return (
                (-ends[plan.ends_at], plan.ends_at.timestamp())
                if plan
                else (-ends[None], -math.inf)
            )

        return min((plan for plan, _ in answers), key=rank), min(time for _, time in answers)

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
        return self._one(
            f"{_STORAGE}/price_check/{days}/{size_bytes}", lambda answer: answer.integer("price")
        )

    # files

    def file(self, merkle_root: bytes, owner: str, start: int) -> ChainFile | None:
        """Return a file as it is now; None where the chain has none of these three.

        "Not found" is believed only where the list of its root says so, too: behind one address
        there may be several nodes, and one that lags answers 404 without saying how far it is.
        """
        path = f"{_STORAGE}/files/{root_in_path(merkle_root)}/{_part(owner)}/{start}"
        found = self._one_or_none(path, lambda answer: parse_file(answer.object("file")))
        if found is not None:
            return found
        listed = (one for page in self._pages_of_root(merkle_root) for one in page)
        return next((one for one in listed if (one.owner, one.start) == (owner, start)), None)

    def files_of_root(self, merkle_root: bytes, owner: str | None = None) -> Sequence[ChainFile]:
        """Return all files of a root, of this owner or of whichever: anybody may post a root again,
        and again.
        """
        pages = self._pages_of_root(merkle_root)
        return self._kept([one for one in page if owner in (None, one.owner)] for page in pages)

    def _pages_of_root(self, merkle_root: bytes) -> Iterator[list[ChainFile]]:
        path = f"{_STORAGE}/files/merkle/{root_in_path(merkle_root)}"
        try:
            for page in self._pages(path, parse_file, "files"):
                yield [one for one in page if one.merkle_root == merkle_root]
        except Refused as refused:
            if not refused.not_found:
                raise

    def files_of_archive(self, owner: str | None, archive_id: str) -> Iterator[ChainFile]:
        """Yield the files that an owner (None: whoever) posted for an archive; where a chain cannot
        look for notes, from all.
        """
        for page in self.file_pages(archive_id):
            yield from _of_archive(page, owner, archive_id)

    def files_of_owner(self, owner: str) -> Iterator[ChainFile]:
        """Yield all files of an owner: there is no query for that, so that the whole network's are
        gone through.
        """
        for page in self.file_pages(None):
            yield from (one for one in page if one.owner == owner)

    def file_pages(self, archive_id: str | None) -> Iterator[list[ChainFile]]:
        """Yield the pages of an archive's files; of the whole network's (None), also where a chain
        cannot look for notes.
        """
        if archive_id is not None:
            pages = self._pages(
                f"{_STORAGE}/files/note/{NOTE_MEMBER}/{_part(archive_id)}", parse_file, "files"
            )
            try:
                first = next(pages, [])
            except Refused as refused:
                # 400: a node whose routes take "note" for a root answers that the rest is no
                # height.
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

    # providers

    def providers(self) -> Sequence[Provider]:
        """Return all providers that ever registered."""
        return self._kept(self._pages(f"{_STORAGE}/providers", parse_provider, "providers"))

    def active_providers(self) -> Sequence[Provider]:
        """Return the providers that hold a proof; empty on a young chain."""
        pages = self._pages(
            f"{_STORAGE}/active_providers", lambda one: one.text("address"), "providers"
        )
        active = set(self._kept(pages))
        return [one for one in self.providers() if one.address in active] if active else []

    def proof(self, provider: str, merkle_root: bytes, owner: str, start: int) -> FileProof | None:
        """Return what the chain keeps of a copy's proofs, all of it from one answer; None where it
        tells of none.
        """

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
            except Refused as refused:
                # Read in the chain's source, not run. A provider has as many proofs as files, so
                # that going through them is slow.
                self._knows_single_proofs = refused.status != httpx.codes.NOT_IMPLEMENTED
        return next(
            (one for page in self.proof_pages(provider) for one in page if asked_for(one)), None
        )

    def proof_pages(self, provider: str) -> Iterator[list[FileProof]]:
        """Yield the pages of a provider's proofs, one for each file that it is listed with, whoever
        owns it.
        """
        # A chain of version 4 calls the list by the singular.
        yield from self._pages(
            f"{_STORAGE}/proofs/{_part(provider)}", parse_proof, "proofs", "proof"
        )

    # transactions

    def broadcast(self, body: bytes) -> Broadcast:
        """Send a transaction.

        Where this raises, it may have been sent all the same; sending the same bytes again is
        harmless.
        """
        message = json.dumps(
            {"tx_bytes": base64.b64encode(body).decode(), "mode": "BROADCAST_MODE_SYNC"}
        ).encode()
        query = f"transaction {transaction_hash(body)[:12]}…"
        return self._nodes.asked(
            lambda node, _: parse_broadcast(
                self._nodes.answer(
                    "POST",
                    node,
                    "/cosmos/tx/v1beta1/txs",
                    content=message,
                    named=f"{node.url}: {query}",
                )[0]
            )
        )

    def transaction(self, hash: str) -> IncludedTransaction | None:
        """Return a transaction that is in a block.

        None where the node does not know it, also where it keeps no index of transactions: then
        what the transaction did has to tell whether it is in a block.
        """
        try:
            found = self._one_or_none(f"/cosmos/tx/v1beta1/txs/{_part(hash)}", parse_transaction)
        except Refused as refused:
            if refused.no_index:
                return None
            raise
        if found is not None:
            self._nodes.saw(found.height)
        return found

    # asking

    def _one(
        self, path: str, parse: Callable[[ChainAnswer], T], params: Mapping[str, str] | None = None
    ) -> T:
        return self._nodes.asked(
            lambda node, block: self._nodes.read(node, block, path, parse, params)
        )

    def _one_or_none(
        self, path: str, parse: Callable[[ChainAnswer], T], params: Mapping[str, str] | None = None
    ) -> T | None:
        return self._nodes.asked(self._question(path, parse, params))

    def _question(
        self, path: str, parse: Callable[[ChainAnswer], T], params: Mapping[str, str] | None = None
    ) -> Callable[[Node, Block], T | None]:
        """Return a function that asks one node; it returns None if the node does not have what the
        path names.
        """

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
        """Yield the pages of a list, which has one of these names; one may be empty and not the
        last.
        """

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
            except TooLong:
                if size == 1:
                    raise
                size = max(
                    1, size // _SMALLER
                )  # somebody wrote long notes; they must not hide what is beside them
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
                    f"the chain returned a list of more than {len(kept) - 1} entries; far fewer "
                    "are expected",
                    hint="name another node in jackal.lcd",
                )
        return kept


def _endless(path: str, sign: str) -> ChainUnreachable:
    return ChainUnreachable(
        f"{path}: the list of pages has no end: {sign}", hint="name another node"
    )


def _part(text: str) -> str:
    return quote(text, safe="")


def _of_archive(
    files: Sequence[ChainFile], owner: str | None, archive_id: str
) -> Iterator[ChainFile]:
    return (
        one for one in files if owner in (None, one.owner) and archive_of(one.note) == archive_id
    )
