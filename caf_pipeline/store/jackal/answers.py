"""What a chain's nodes answer, as records: each answer's fields are read strictly, one that is not
as it must be is an error.

No I/O. Source: the table "Queries" in the notes on Jackal's protocol; REST of Cosmos SDK 0.45.
"""

import base64
import binascii
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from caf_pipeline.errors import ChainUnreachable
from caf_pipeline.store.jackal.names import DENOM

NOT_FOUND: Final = 5
"""The gRPC code by which a node says that it has no such thing; over REST with status 404."""

_INTEGER: Final = re.compile(r"-?[0-9]{1,20}")
_COIN: Final = re.compile(r"([0-9]{1,20})([a-zA-Z][a-zA-Z0-9/:._-]*)")
_HALF_PAIR: Final = re.compile("[\ud800-\udfff]")
TYPE_3: Final = 3
TYPE_3_SINCE: Final = (5, 1, 0)
"""The version of the chain that verifies proofs of type 3; earlier ones list them, and all of them
fail.
"""

_VERSION: Final = re.compile(
    r"v?(?P<major>[0-9]{1,6})\.(?P<minor>[0-9]{1,6})(?:\.(?P<patch>[0-9]{1,6}))?(?P<before>-[0-9A-Za-z.-]+)?(?:\+[0-9A-Za-z.-]+)?"
)
_LARGEST: Final = 2**63 - 1
"""Of int64; the few uint64 among the answers are heights and counts, which never come near it."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that is an error: a gRPC code and its sentence."""

    code: int
    message: str


@dataclass(frozen=True, slots=True)
class Block:
    """A block's header."""

    chain_id: str
    height: int
    time: datetime


@dataclass(frozen=True, slots=True)
class Account:
    """What a transaction of an account is signed for: its number, and the sequence that its next
    one must have.
    """

    number: int
    sequence: int


@dataclass(frozen=True, slots=True)
class StoragePlan:
    """The space that an account bought, all copies counted."""

    space_bytes: int
    used_bytes: int
    ends_at: datetime

    @property
    def free_bytes(self) -> int:
        """What is left; 0 where more is used than was bought."""
        return max(0, self.space_bytes - self.used_bytes)


@dataclass(frozen=True, slots=True)
class Provider:
    """A provider as it registered itself: `total_bytes` is what it offers, 0 where it says nothing
    readable.
    """

    address: str
    url: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class ChainFile:
    """A file as the chain lists it: (merkle_root, owner, start) names it.

    Attributes:
        expires: a block height; 0 for as long as the owner's plan lasts.
        proof_interval: blocks of one of its proof windows, which begin with its start.
        max_proofs: the copies that were paid for.
        proofs: one for each copy that a provider claims: "<provider>/<owner>/<hex root>/<start>/".
    """

    merkle_root: bytes
    owner: str
    start: int
    expires: int
    size_bytes: int
    proof_type: int
    max_proofs: int
    note: str
    proofs: tuple[str, ...]
    proof_interval: int = 0

    @property
    def providers(self) -> tuple[str, ...]:
        """The addresses of those who claim a copy, in the order of the proofs."""
        return tuple(proof.split("/", 1)[0] for proof in self.proofs)


@dataclass(frozen=True, slots=True)
class FileProof:
    """What the chain keeps of one copy's proofs.

    Attributes: provider: whose copy it is; "" where the answer does not say. last_proven: block
        height of the last verified proof, or of the provider's joining, which verifies nothing.
        next_leaf: the leaf that the next proof is to be of, drawn when a proof was verified.
        Joining writes 0, which may also
            be drawn.
    """

    merkle_root: bytes
    owner: str
    start: int
    last_proven: int
    provider: str = ""
    next_leaf: int = 0

    @property
    def verified(self) -> bool:
        """Whether `last_proven` is the height of a verified proof for certain: only such a proof
        draws a leaf other than 0.
        """
        return self.next_leaf > 0


@dataclass(frozen=True, slots=True)
class IncludedTransaction:
    """A transaction in a block.

    `code` 0: all its messages took effect; `data` is hex, see `post_starts`.

    `moved` is what its messages gave each account in ujkl, less what they took; its fee is not in
    it. None where no node tells.
    """

    height: int
    code: int
    codespace: str
    log: str
    data: str
    moved: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Broadcast:
    """A node's answer to a transaction: `code` 0, it is in the mempool."""

    code: int
    codespace: str
    log: str


class ChainAnswer:
    """One JSON object of an answer, read strictly: what is not as a chain would say it raises
    ChainUnreachable with the query.
    """

    def __init__(self, value: object, query: str) -> None:
        if not isinstance(value, dict):
            raise _no_answer(query, f"an object was expected, not {_shown(value)}")
        self._value: Mapping[str, object] = value
        self.query = query

    def has(self, name: str) -> bool:
        """Whether there is a member of that name that is not null."""
        return self._value.get(name) is not None

    def _member(self, name: str, kind: type, wanted: str) -> Any:  # noqa: ANN401 - of `kind`
        found = self._value.get(name)
        if not isinstance(found, kind) or isinstance(found, bool):
            raise _no_answer(self.query, f"'{name}' should be {wanted}, not {_shown(found)}")
        return found

    def object(self, name: str) -> "ChainAnswer":
        """Return a member that is an object."""
        return ChainAnswer(self._member(name, dict, "an object"), self.query)

    def objects(self, name: str) -> "list[ChainAnswer]":
        """Return a member that is a list of objects; a missing list is no empty one."""
        return [ChainAnswer(one, self.query) for one in self._member(name, list, "a list")]

    def text(self, name: str) -> str:
        """Return a member that is text."""
        return self._plain(name, str(self._member(name, str, "text")))

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a member that is a list of texts."""
        found = self._member(name, list, "a list")
        if not all(isinstance(one, str) for one in found):
            raise _no_answer(self.query, f"'{name}' should hold texts only")
        return tuple(self._plain(name, one) for one in found)

    def _plain(self, name: str, text: str) -> str:
        # JSON can spell half a surrogate pair, which no chain has and nothing that encodes text
        # takes.
        if not text.isascii() and _HALF_PAIR.search(text):
            raise _no_answer(self.query, f"'{name}' is not text: {_shown(text)}")
        return text

    def number(self, name: str) -> int:
        """Return a 32-bit integer, which comes as a JSON number."""
        found = int(self._member(name, int, "a number"))
        if not 0 <= found < 1 << 32:
            raise _no_answer(
                self.query, f"'{name}' should be a number of 32 bits, not {_shown(found)}"
            )
        return found

    def integer(self, name: str) -> int:
        """Return a 64-bit integer, which comes as text: JSON's own numbers are too short for it
        elsewhere.
        """
        found = self.text(name)
        if not _INTEGER.fullmatch(found) or abs(int(found)) > _LARGEST:
            raise _no_answer(self.query, f"'{name}' should be an integer, not {_shown(found)}")
        return int(found)

    def data(self, name: str) -> bytes:
        """Return bytes, which come in ordinary base64."""
        found = self.text(name)
        try:
            return base64.b64decode(found, validate=True)
        except (binascii.Error, ValueError) as error:
            raise _no_answer(
                self.query, f"'{name}' should be base64, not {_shown(found)}"
            ) from error

    def time(self, name: str) -> datetime:
        """Return a time, which comes in RFC 3339 with up to nine decimals."""
        found = self.text(name)
        try:
            time = datetime.fromisoformat(found)
            return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)
        except (ValueError, OverflowError) as error:
            raise _no_answer(
                self.query, f"'{name}' should be a time, not {_shown(found)}"
            ) from error


def quoted(text: str, most: int = 200) -> str:
    """Return an untrusted server's text, fit for a sentence: short, on one line, and without
    control characters.
    """
    return "".join(character if character.isprintable() else " " for character in text[:most])


def _no_answer(query: str, fault: str) -> ChainUnreachable:
    return ChainUnreachable(
        f"{query}: the answer is not one of a chain: {fault}",
        hint="check that jackal.lcd names REST servers of nodes",
    )


def _shown(value: object) -> str:
    return reprlib.repr(value)[:60]  # of a deep or large value, only what is shown


def parse_refusal(value: object) -> Refusal | None:
    """Return the error that an answer is; None where it is not of that shape."""
    if not isinstance(value, dict):
        return None
    code, message = value.get("code"), value.get("message")
    if not isinstance(code, int) or isinstance(code, bool) or not isinstance(message, str):
        return None
    return Refusal(code, message)


def parse_version(answer: ChainAnswer) -> str:
    """Read the version of the chain's software out of `node_info`; "" where it names none."""
    if not answer.has("application_version"):
        return ""
    software = answer.object("application_version")
    return software.text("version") if software.has("version") else ""


def verifies_type_3(version: str) -> bool:
    """Tell whether software of this version verifies proofs of type 3; False for one that is not
    readable.

    What follows the numbers makes it an earlier one (5.1.0-rc1), except where it names a build
    (5.1.0+1).
    """
    match = _VERSION.fullmatch(version.strip())
    if match is None:
        return False
    numbers = int(match["major"]), int(match["minor"]), int(match["patch"] or 0)
    return numbers > TYPE_3_SINCE or (numbers == TYPE_3_SINCE and not match["before"])


def parse_block(answer: ChainAnswer) -> Block:
    """Read a block, of which only the header matters here."""
    header = answer.object("block").object("header")
    return Block(header.text("chain_id"), header.integer("height"), header.time("time"))


def parse_account(answer: ChainAnswer) -> Account:
    """Read an account; those that vest or belong to a module wrap the plain one."""
    account = answer.object("account")
    for wrapping in ("base_vesting_account", "base_account"):
        if account.has(wrapping):
            account = account.object(wrapping)
    return Account(account.integer("account_number"), account.integer("sequence"))


def parse_plan(answer: ChainAnswer) -> StoragePlan:
    """Read `payment_info`, whose members are in camel case."""
    plan = answer.object("storage_payment_info")
    return StoragePlan(plan.integer("spaceAvailable"), plan.integer("spaceUsed"), plan.time("end"))


def parse_file(one: ChainAnswer) -> ChainFile:
    """Read one file."""
    return ChainFile(
        merkle_root=one.data("merkle"),
        owner=one.text("owner"),
        start=one.integer("start"),
        expires=one.integer("expires"),
        proof_interval=one.integer("proof_interval") if one.has("proof_interval") else 0,
        size_bytes=one.integer("file_size"),
        proof_type=one.integer("proof_type"),
        max_proofs=one.integer("max_proofs"),
        note=one.text("note"),
        proofs=one.texts("proofs"),
    )


def parse_provider(one: ChainAnswer) -> Provider:
    """Read one provider. What it registered as its space is its own text and need not be a
    number.
    """
    space = one.text("totalspace")
    return Provider(
        one.text("address"), one.text("ip"), int(space) if _INTEGER.fullmatch(space) else 0
    )


def parse_proof(one: ChainAnswer) -> FileProof:
    """Read one proof."""
    return FileProof(
        one.data("merkle"),
        one.text("owner"),
        one.integer("start"),
        one.integer("last_proven"),
        provider=one.text("prover") if one.has("prover") else "",
        next_leaf=one.integer("chunk_to_prove") if one.has("chunk_to_prove") else 0,
    )


def parse_next_key(answer: ChainAnswer) -> str | None:
    """Read where the next page begins, in the form that the query takes back; None after the last
    page.
    """
    if not answer.has("pagination"):
        return None
    pagination = answer.object("pagination")
    return (pagination.text("next_key") or None) if pagination.has("next_key") else None


def parse_broadcast(answer: ChainAnswer) -> Broadcast:
    """Read the answer to a transaction that was sent."""
    response = answer.object("tx_response")
    return Broadcast(response.number("code"), response.text("codespace"), response.text("raw_log"))


def parse_transaction(answer: ChainAnswer) -> IncludedTransaction:
    """Read a transaction that is in a block."""
    response = answer.object("tx_response")
    height = response.integer("height")
    if height < 1:
        raise _no_answer(answer.query, f"height {height} is none of a block")
    return IncludedTransaction(
        height,
        response.number("code"),
        response.text("codespace"),
        response.text("raw_log"),
        response.text("data"),
        _moved(response),
    )


_MOVES: Final = {"coin_spent": ("spender", -1), "coin_received": ("receiver", 1)}
"""Events of the bank module: who is named by which attribute, and the sign of the amount that comes
after it.
"""


def _moved(response: ChainAnswer) -> Mapping[str, int] | None:
    """Read what messages moved from their logs; the list of all events has the fee's, too.

    A log that is none tells nothing.
    """
    moved: dict[str, int] = {}
    try:
        for log in response.objects("logs"):
            for event in log.objects("events"):
                if event.text("type") in _MOVES:
                    _add_moves(moved, event, *_MOVES[event.text("type")])
    except ChainUnreachable:
        return None
    return moved


def _add_moves(moved: dict[str, int], event: ChainAnswer, names: str, sign: int) -> None:
    account = ""
    for attribute in event.objects("attributes"):  # of all events of the type, one after the other
        key, value = (
            attribute.text("key"),
            attribute.text("value") if attribute.has("value") else "",
        )
        if key == names:
            account = value
        elif key == "amount":
            coins = (_COIN.fullmatch(coin) for coin in value.split(","))
            moved[account] = moved.get(account, 0) + sign * sum(
                int(coin[1]) for coin in coins if coin and coin[2] == DENOM
            )
