"""The answers of chain nodes as records, with every field checked. No I/O.

Source: "Queries" in the notes on Jackal's protocol; REST of Cosmos SDK 0.45.
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
"""The gRPC code for an unknown object. REST sends it with status 404."""

_INTEGER: Final = re.compile(r"-?[0-9]{1,20}")
_COIN: Final = re.compile(r"([0-9]{1,20})([a-zA-Z][a-zA-Z0-9/:._-]*)")
_HALF_PAIR: Final = re.compile("[\ud800-\udfff]")
TYPE_3: Final = 3
TYPE_3_SINCE: Final = (5, 1, 0)
"""The first version that verifies proofs of type 3. Before, all of them fail."""

_VERSION: Final = re.compile(
    r"v?(?P<major>[0-9]{1,6})\.(?P<minor>[0-9]{1,6})(?:\.(?P<patch>[0-9]{1,6}))?"
    r"(?P<before>-[0-9A-Za-z.-]+)?(?:\+[0-9A-Za-z.-]+)?"
)
_LARGEST: Final = 2**63 - 1
"""int64. The few uint64 fields are heights and counts, far below it."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error answer: a gRPC code and its message."""

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
    """An account's number, and its next sequence."""

    number: int
    sequence: int


@dataclass(frozen=True, slots=True)
class StoragePlan:
    """The space that an account bought. All copies count. `starts_at` may be unknown."""

    space_bytes: int
    used_bytes: int
    ends_at: datetime
    starts_at: datetime | None = None

    @property
    def free_bytes(self) -> int:
        return max(0, self.space_bytes - self.used_bytes)


@dataclass(frozen=True, slots=True)
class Provider:
    """A provider's registration. `total_bytes` is 0 if unreadable."""

    address: str
    url: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class ChainFile:
    """A file on the chain, identified by (merkle_root, owner, start).

    Attributes:
        expires: a block height. 0 means the end of the owner's plan.
        proof_interval: blocks of one proof window. Windows begin at `start`.
        max_proofs: the number of copies paid for.
        proofs: one "<provider>/<owner>/<hex root>/<start>/" for each claimed copy.
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
        """In the order of `proofs`."""
        return tuple(proof.split("/", 1)[0] for proof in self.proofs)


@dataclass(frozen=True, slots=True)
class FileProof:
    """The chain's record of one copy's proofs.

    Attributes:
        provider: "" if the answer lacks it.
        last_proven: block height of the last verified proof, or of the provider's joining.
        next_leaf: drawn at random by a verified proof, 0 after joining.
    """

    merkle_root: bytes
    owner: str
    start: int
    last_proven: int
    provider: str = ""
    next_leaf: int = 0

    @property
    def verified(self) -> bool:
        """Whether `last_proven` is certainly a verified proof: only those draw a leaf above 0."""
        return self.next_leaf > 0


@dataclass(frozen=True, slots=True)
class IncludedTransaction:
    """A transaction in a block. `code` is 0 if all messages took effect.

    Attributes:
        data: hex; see `post_starts`.
        moved: the net ujkl that its messages gave each account, fee excluded.
    """

    height: int
    code: int
    codespace: str
    log: str
    data: str
    moved: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Broadcast:
    """A node's answer. `code` 0: the transaction is in the mempool."""

    code: int
    codespace: str
    log: str


class ChainAnswer:
    """A JSON object. A field of a wrong type raises ChainUnreachable with the query."""

    def __init__(self, value: object, query: str) -> None:
        if not isinstance(value, dict):
            raise _invalid(query, f"expected an object, not {_shown(value)}")
        self._value: Mapping[str, object] = value
        self.query = query

    def has(self, name: str) -> bool:
        return self._value.get(name) is not None

    def _member(self, name: str, kind: type, kind_name: str) -> Any:  # noqa: ANN401 - of `kind`
        value = self._value.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise _invalid(self.query, f"'{name}' should be {kind_name}, not {_shown(value)}")
        return value

    def object(self, name: str) -> "ChainAnswer":
        return ChainAnswer(self._member(name, dict, "an object"), self.query)

    def objects(self, name: str) -> "list[ChainAnswer]":
        return [ChainAnswer(item, self.query) for item in self._member(name, list, "a list")]

    def text(self, name: str) -> str:
        return self._plain(name, str(self._member(name, str, "text")))

    def texts(self, name: str) -> tuple[str, ...]:
        texts = self._member(name, list, "a list")
        if not all(isinstance(text, str) for text in texts):
            raise _invalid(self.query, f"'{name}' should hold texts only")
        return tuple(self._plain(name, text) for text in texts)

    def _plain(self, name: str, text: str) -> str:
        # JSON can contain a lone surrogate, which cannot be encoded.
        if not text.isascii() and _HALF_PAIR.search(text):
            raise _invalid(self.query, f"'{name}' is not text: {_shown(text)}")
        return text

    def number(self, name: str) -> int:
        """32 bits, sent as a JSON number."""
        number = int(self._member(name, int, "a number"))
        if not 0 <= number < 1 << 32:
            raise _invalid(
                self.query, f"'{name}' should be a number of 32 bits, not {_shown(number)}"
            )
        return number

    def integer(self, name: str) -> int:
        """64 bits, sent as a string."""
        text = self.text(name)
        if not _INTEGER.fullmatch(text) or abs(int(text)) > _LARGEST:
            raise _invalid(self.query, f"'{name}' should be an integer, not {_shown(text)}")
        return int(text)

    def data(self, name: str) -> bytes:
        """Sent in ordinary base64."""
        text = self.text(name)
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise _invalid(self.query, f"'{name}' should be base64, not {_shown(text)}") from error

    def time(self, name: str) -> datetime:
        """Sent in RFC 3339 with up to nine decimals."""
        text = self.text(name)
        try:
            time = datetime.fromisoformat(text)
            return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)
        except (ValueError, OverflowError) as error:
            raise _invalid(self.query, f"'{name}' should be a time, not {_shown(text)}") from error


def quoted(text: str, most: int = 200) -> str:
    """Return an untrusted text, cut to `most` characters, on one line."""
    return "".join(character if character.isprintable() else " " for character in text[:most])


def _invalid(query: str, fault: str) -> ChainUnreachable:
    return ChainUnreachable(
        f"{query}: not a valid answer of a chain node: {fault}",
        hint="check that jackal.lcd names REST servers of chain nodes",
    )


def _shown(value: object) -> str:
    return reprlib.repr(value)[:60]  # reprlib visits only a few members of a large value


def parse_refusal(value: object) -> Refusal | None:
    """Return the error in an answer. None for another shape."""
    if not isinstance(value, dict):
        return None
    code, message = value.get("code"), value.get("message")
    if not isinstance(code, int) or isinstance(code, bool) or not isinstance(message, str):
        return None
    return Refusal(code, message)


def parse_version(answer: ChainAnswer) -> str:
    """Return the software's version from `node_info`, or ""."""
    if not answer.has("application_version"):
        return ""
    software = answer.object("application_version")
    return software.text("version") if software.has("version") else ""


def verifies_type_3(version: str) -> bool:
    """Return whether this version verifies proofs of type 3. False for an unreadable version.

    A suffix marks an earlier version (5.1.0-rc1), unless it is a build number (5.1.0+1).
    """
    match = _VERSION.fullmatch(version.strip())
    if match is None:
        return False
    numbers = int(match["major"]), int(match["minor"]), int(match["patch"] or 0)
    return numbers > TYPE_3_SINCE or (numbers == TYPE_3_SINCE and not match["before"])


def parse_block(answer: ChainAnswer) -> Block:
    """Parse a block's header."""
    header = answer.object("block").object("header")
    return Block(header.text("chain_id"), header.integer("height"), header.time("time"))


def parse_account(answer: ChainAnswer) -> Account:
    """Parse an account. Vesting and module accounts wrap a plain one."""
    account = answer.object("account")
    for wrapping in ("base_vesting_account", "base_account"):
        if account.has(wrapping):
            account = account.object(wrapping)
    return Account(account.integer("account_number"), account.integer("sequence"))


def parse_plan(answer: ChainAnswer) -> StoragePlan:
    """Parse `payment_info`, whose members are in camel case."""
    plan = answer.object("storage_payment_info")
    return StoragePlan(
        plan.integer("spaceAvailable"),
        plan.integer("spaceUsed"),
        plan.time("end"),
        plan.time("start") if plan.has("start") else None,
    )


def parse_file(answer: ChainAnswer) -> ChainFile:
    """Parse a file."""
    return ChainFile(
        merkle_root=answer.data("merkle"),
        owner=answer.text("owner"),
        start=answer.integer("start"),
        expires=answer.integer("expires"),
        proof_interval=answer.integer("proof_interval") if answer.has("proof_interval") else 0,
        size_bytes=answer.integer("file_size"),
        proof_type=answer.integer("proof_type"),
        max_proofs=answer.integer("max_proofs"),
        note=answer.text("note"),
        proofs=answer.texts("proofs"),
    )


def parse_provider(answer: ChainAnswer) -> Provider:
    """Parse a provider. Its space is free text, which may not be a number."""
    space = answer.text("totalspace")
    return Provider(
        answer.text("address"), answer.text("ip"), int(space) if _INTEGER.fullmatch(space) else 0
    )


def parse_proof(answer: ChainAnswer) -> FileProof:
    """Parse a proof."""
    return FileProof(
        answer.data("merkle"),
        answer.text("owner"),
        answer.integer("start"),
        answer.integer("last_proven"),
        provider=answer.text("prover") if answer.has("prover") else "",
        next_leaf=answer.integer("chunk_to_prove") if answer.has("chunk_to_prove") else 0,
    )


def parse_next_key(answer: ChainAnswer) -> str | None:
    """Parse the key of the next page. None after the last page."""
    if not answer.has("pagination"):
        return None
    pagination = answer.object("pagination")
    return (pagination.text("next_key") or None) if pagination.has("next_key") else None


def parse_broadcast(answer: ChainAnswer) -> Broadcast:
    """Parse the answer to a broadcast."""
    response = answer.object("tx_response")
    return Broadcast(response.number("code"), response.text("codespace"), response.text("raw_log"))


def parse_transaction(answer: ChainAnswer) -> IncludedTransaction:
    """Parse an included transaction."""
    response = answer.object("tx_response")
    height = response.integer("height")
    if height < 1:
        raise _invalid(answer.query, f"a block cannot have the height {height}")
    return IncludedTransaction(
        height,
        response.number("code"),
        response.text("codespace"),
        response.text("raw_log"),
        response.text("data"),
        _moved(response),
    )


_MOVES: Final = {"coin_spent": ("spender", -1), "coin_received": ("receiver", 1)}
"""The bank module's events: the attribute that names the account, and the amount's sign."""


def _moved(response: ChainAnswer) -> Mapping[str, int] | None:
    """Use the messages' logs: the list of all events includes the fee."""
    moved: dict[str, int] = {}
    try:
        for log in response.objects("logs"):
            for event in log.objects("events"):
                if event.text("type") not in _MOVES:
                    continue
                account_key, sign = _MOVES[event.text("type")]
                account = ""
                # The attributes of all events of this type follow each other.
                for attribute in event.objects("attributes"):
                    key = attribute.text("key")
                    value = attribute.text("value") if attribute.has("value") else ""
                    if key == account_key:
                        account = value
                    elif key == "amount":
                        coins = (_COIN.fullmatch(coin) for coin in value.split(","))
                        amount = sum(int(coin[1]) for coin in coins if coin and coin[2] == DENOM)
                        moved[account] = moved.get(account, 0) + sign * amount
    except ChainUnreachable:
        return None
    return moved
