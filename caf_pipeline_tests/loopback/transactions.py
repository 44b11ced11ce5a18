"""Parses, checks and executes transactions.

The ante checks (fee, timeout, signer, sequence, signature) come first. They charge the fee and use
up the sequence. Then all messages take effect, or none does. A transaction that fails the ante
checks costs nothing.

Codes and texts come from Cosmos SDK 0.45 and canine-chain's storage module. That module uses the
SDK's errors, so its codespace is "sdk", too.
"""

import hashlib
import json
import math
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final, NoReturn

import bech32
from Crypto.Hash import RIPEMD160
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from caf_pipeline_tests.loopback.chain_state import (
    Account,
    Draft,
    Event,
    Included,
    Plan,
    PostedFile,
)
from caf_pipeline_tests.loopback.options import GB, Options
from caf_pipeline_tests.loopback.wire import Fields, WireError, field

DENOM: Final = "ujkl"
PREFIX: Final = "jkl"
TYPE_URL: Final = "/canine_chain.storage.Msg"
PUBLIC_KEY: Final = "/cosmos.crypto.secp256k1.PubKey"
SIGN_MODE_DIRECT: Final = 1
HIGHEST_S: Final = 0x7FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF5D576E7357A4501DDFE92F46681B20A0

# On a real chain, one post took about 105,000 gas, and eight together about 452,000. The other
# values are guesses.
BASE_GAS: Final = 55_000
MESSAGE_GAS: Final = {"PostFile": 50_000, "BuyStorage": 40_000, "DeleteFile": 30_000}
ANTE_GAS: Final = 40_000
MEMO_CHARACTERS: Final = 256

# Accounts of the chain's modules that payments go through.
MODULE: Final = "jkl1778a6x4e6t074ajvs7l76wpa2xd0s4pt0tqq57"
POOL: Final = "jkl1jv65s3grqf6v6jl3dp4t6c9t9rk99cd84n0sha"

# Code and codespace of unregistered errors.
UNREGISTERED: Final = (1, "undefined")


class Refused(Exception):
    """The chain refuses a transaction with a code."""

    def __init__(self, code: int, log: str, codespace: str = "sdk") -> None:
        super().__init__(log)
        self.code = code
        self.codespace = codespace
        self.log = log


@dataclass(frozen=True, slots=True)
class PostFile:
    """Posts a file."""

    creator: str
    merkle: bytes
    size_bytes: int
    proof_type: int
    max_proofs: int
    expires: int
    note: str


@dataclass(frozen=True, slots=True)
class BuyStorage:
    """Buys space."""

    creator: str
    for_address: str
    days: int
    size_bytes: int
    denom: str


@dataclass(frozen=True, slots=True)
class DeleteFile:
    """Deletes a file from the chain."""

    creator: str
    merkle: bytes
    start: int


Message = PostFile | BuyStorage | DeleteFile


@dataclass(frozen=True, slots=True)
class SignedTransaction:
    """A received transaction."""

    raw: bytes
    hash: str
    body: bytes
    auth: bytes
    messages: tuple[Message, ...]
    memo: str
    timeout_height: int
    public_key: bytes
    sign_mode: int
    sequence: int
    fee: int
    gas_limit: int
    signatures: tuple[bytes, ...]

    @property
    def signer(self) -> str:
        """The address that must sign."""
        return self.messages[0].creator

    @property
    def gas(self) -> int:
        """The gas that it uses if it succeeds."""
        return BASE_GAS + sum(MESSAGE_GAS[type(message).__name__] for message in self.messages)


def transaction_hash(raw: bytes) -> str:
    """Return a transaction's name."""
    return hashlib.sha256(raw).hexdigest().upper()


def encode_address(account: bytes) -> str:
    """Return the address of an account's 20 bytes."""
    return str(bech32.bech32_encode(PREFIX, bech32.convertbits(account, 8, 5) or []))


def address_of(public_key: bytes) -> str:
    """Return the address of a compressed public key."""
    digest = RIPEMD160.new(hashlib.sha256(public_key).digest()).digest()
    return encode_address(digest)


# --- reading ---


def parse(raw: bytes) -> SignedTransaction:
    """Parse a transaction. Raises Refused with code 2."""
    try:
        outer = Fields(raw)
        body, auth = Fields(outer.bytes(1)), Fields(outer.bytes(2))
        signers = auth.all_bytes(1)
        signer = Fields(signers[0] if signers else b"")
        fee = Fields(auth.bytes(2))
        key = Fields(signer.bytes(1))
        return SignedTransaction(
            raw=raw,
            hash=transaction_hash(raw),
            body=outer.bytes(1),
            auth=outer.bytes(2),
            messages=tuple(_message(Fields(message)) for message in body.all_bytes(1)),
            memo=body.text(2),
            timeout_height=body.unsigned(3),
            public_key=Fields(key.bytes(2)).bytes(1) if key.text(1) == PUBLIC_KEY else b"",
            sign_mode=Fields(Fields(signer.bytes(2)).bytes(1)).unsigned(1),
            sequence=signer.unsigned(3),
            fee=_coins([Fields(coin) for coin in fee.all_bytes(1)]),
            gas_limit=fee.unsigned(2),
            signatures=tuple(outer.all_bytes(3)),
        )
    except WireError as error:
        raise Refused(2, f"{error}: tx parse error") from error


def _message(any_: Fields) -> Message:
    type_url, value = any_.text(1), Fields(any_.bytes(2))
    match type_url.removeprefix(TYPE_URL):
        case "PostFile":
            return PostFile(
                creator=value.text(1),
                merkle=value.bytes(2),
                size_bytes=value.signed(3),
                proof_type=value.signed(5),
                max_proofs=value.signed(6),
                expires=value.signed(7),
                note=value.text(8),
            )
        case "BuyStorage":
            return BuyStorage(
                value.text(1), value.text(2), value.signed(3), value.signed(4), value.text(5)
            )
        case "DeleteFile":
            return DeleteFile(value.text(1), value.bytes(2), value.signed(3))
    raise WireError(f"unable to resolve type URL {type_url}")


def _coins(coins: list[Fields]) -> int:
    amount = 0
    for coin in coins:
        text = coin.text(2)
        if coin.text(1) != DENOM or not text.isdecimal():
            raise Refused(10, f"{text}{coin.text(1)}: invalid coins")
        amount += int(text)
    return amount


# --- the ante checks ---


def check(
    transaction: SignedTransaction,
    draft: Draft,
    options: Options,
    *,
    height: int,
    minimum_fee: bool,
) -> None:
    """Perform the ante checks: charge the fee and use up the sequence.

    Args:
        transaction: the transaction to check.
        draft: changed if all checks pass. The sequence is compared with it.
        options: of the network.
        height: the block's height, or the last block's at a node before the mempool.
        minimum_fee: apply the node's gas price, as before the mempool.

    Raises:
        Refused.
    """
    if minimum_fee:
        required = math.ceil(options.min_gas_price * transaction.gas_limit)
        if transaction.fee < required:
            got = f"{transaction.fee}{DENOM}" if transaction.fee else ""
            raise Refused(
                13, f"insufficient fees; got: {got} required: {required}{DENOM}: insufficient fee"
            )
    _validate_basic(transaction)
    if 0 < transaction.timeout_height < height:
        raise Refused(
            30,
            f"block height: {height}, timeout height: {transaction.timeout_height}: tx timeout "
            "height",
        )
    if len(transaction.memo) > MEMO_CHARACTERS:
        count = len(transaction.memo)
        limit = MEMO_CHARACTERS
        raise Refused(
            12,
            f"maximum number of characters is {limit} but received {count} characters: memo too "
            "large",
        )
    if transaction.gas_limit < ANTE_GAS:
        _out_of_gas(transaction, ANTE_GAS)
    account: Account | None = draft.get("account", transaction.signer)
    if account is None:
        raise Refused(9, f"fee payer address: {transaction.signer} does not exist: unknown address")
    try:
        account = _paid(account, transaction.fee)
    except Refused as refused:
        # A real node repeats the text.
        raise Refused(refused.code, f"{refused.log}: insufficient funds") from refused
    _check_signature(transaction, account, options.chain_id)
    draft.put(
        "account",
        account.address,
        replace(
            account,
            sequence=account.sequence + 1,
            public_key=account.public_key or transaction.public_key,
        ),
    )


def _validate_basic(transaction: SignedTransaction) -> None:
    if not transaction.messages:
        raise Refused(18, "must contain at least one message: invalid request")
    for message in transaction.messages:
        _check_address(message.creator, "invalid creator address")
        if isinstance(message, BuyStorage):
            _check_address(message.for_address, "invalid for address")
    signers = {message.creator for message in transaction.messages}
    if not transaction.signatures:
        raise Refused(15, "no signatures supplied")
    if len(signers) != len(transaction.signatures):
        count = len(transaction.signatures)
        raise Refused(
            4, f"wrong number of signers; expected {len(signers)}, got {count}: unauthorized"
        )
    if len(signers) > 1:
        raise Refused(4, "several signers are beyond this network: unauthorized")


def _check_address(address: str, what: str) -> None:
    prefix, data = bech32.bech32_decode(address)
    if data is None:
        raise Refused(7, f"{what} (decoding bech32 failed: invalid bech32 string): invalid address")
    if prefix != PREFIX:
        raise Refused(
            7,
            f"invalid creator prefix ({prefix} is not a valid prefix here. Expected `{PREFIX}`): "
            "invalid address",
        )


def _paid(account: Account, amount: int) -> Account:
    if account.balance < amount:
        raise Refused(
            5, f"{account.balance}{DENOM} is smaller than {amount}{DENOM}: insufficient funds"
        )
    return replace(account, balance=account.balance - amount)


def _check_signature(transaction: SignedTransaction, account: Account, chain_id: str) -> None:
    if transaction.sign_mode != SIGN_MODE_DIRECT:
        raise Refused(4, "this network verifies SIGN_MODE_DIRECT only: unauthorized")
    key = transaction.public_key or account.public_key
    if not key or address_of(key) != account.address:
        raise Refused(
            8,
            f"pubKey does not match signer address {account.address} with signer index: 0: invalid "
            "pubkey",
        )
    if transaction.sequence != account.sequence:
        expected, got = account.sequence, transaction.sequence
        raise Refused(
            32,
            f"account sequence mismatch, expected {expected}, got {got}: incorrect account "
            "sequence",
        )
    document = (
        field(1, transaction.body)
        + field(2, transaction.auth)
        + field(3, chain_id.encode())
        + field(4, account.number)
    )
    if not _is_signed(transaction.signatures[0], document, key):
        number = account.number
        raise Refused(
            4,
            f"signature verification failed; please verify account number ({number}) and chain-id "
            f"({chain_id}): unauthorized",
        )


def _is_signed(signature: bytes, document: bytes, key: bytes) -> bool:
    """Verify r and s of 32 bytes each. The chain accepts only a low s."""
    r, s = int.from_bytes(signature[:32]), int.from_bytes(signature[32:])
    if len(signature) != 64 or s > HIGHEST_S:
        return False
    try:
        public_key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256K1(), key)
        public_key.verify(encode_dss_signature(r, s), document, ec.ECDSA(hashes.SHA256()))
    except (ValueError, InvalidSignature):
        return False
    return True


def _out_of_gas(transaction: SignedTransaction, used: int) -> NoReturn:
    gas_limit = transaction.gas_limit
    raise Refused(
        11,
        f"out of gas in location: WriteFlat; gasWanted: {gas_limit}, gasUsed: {used}: out of gas",
    )


# --- the messages ---


@dataclass(frozen=True, slots=True)
class _Result:
    name: str
    data: bytes
    events: tuple[Event, ...]


def deliver(
    transaction: SignedTransaction, draft: Draft, options: Options, *, height: int, time: datetime
) -> Included:
    """Execute a transaction in a block: change the draft, and return the result."""
    included = Included(
        hash=transaction.hash,
        body=transaction.raw,
        height=height,
        time=time,
        code=0,
        codespace="",
        log="",
        data=b"",
        gas_wanted=transaction.gas_limit,
        gas_used=ANTE_GAS,
    )
    try:
        ante = Draft(draft)
        check(transaction, ante, options, height=height, minimum_fee=False)
        ante.merge()
        included = replace(included, gas_used=transaction.gas)
        if transaction.gas > transaction.gas_limit:
            _out_of_gas(transaction, transaction.gas)
        results = run_messages(transaction, draft, options, height=height, time=time)
    except Refused as refused:
        return replace(included, code=refused.code, codespace=refused.codespace, log=refused.log)
    data = b"".join(
        field(1, field(1, f"{TYPE_URL}{result.name}".encode()) + field(2, result.data))
        for result in results
    )
    return replace(included, data=data, events=tuple(result.events for result in results))


def run_messages(
    transaction: SignedTransaction, draft: Draft, options: Options, *, height: int, time: datetime
) -> list[_Result]:
    """Execute a transaction's messages, all or none. Raises Refused."""
    messages = Draft(draft)
    results = []
    for index, message in enumerate(transaction.messages):
        try:
            match message:
                case PostFile():
                    results.append(_post(message, messages, options, height, time))
                case BuyStorage():
                    results.append(_buy(message, messages, options, time))
                case DeleteFile():
                    results.append(_delete(message, messages))
        except Refused as refused:
            log = f"failed to execute message; message index: {index}: {refused.log}"
            raise Refused(refused.code, log, refused.codespace) from refused
    messages.merge()
    return results


def _post(
    message: PostFile, draft: Draft, options: Options, height: int, time: datetime
) -> _Result:
    try:
        json.loads(message.note, parse_constant=_no_constant)
    except ValueError:
        raise Refused(
            17, f"note is not valid json `{message.note}`: JSON unmarshal error"
        ) from None
    # A real chain refuses an empty root, but its code was not measured. The other two checks are
    # this network's own.
    if not message.merkle or message.size_bytes <= 0 or message.max_proofs <= 0:
        raise Refused(18, "a file needs a root, a size and a number of proofs: invalid request")
    plan: Plan | None = draft.get("plan", message.creator)
    if plan is None:
        raise Refused(22, "storage account does not exist: key not found")
    if plan.end < time:
        raise Refused(4, "storage account is expired: unauthorized")
    used = plan.used_bytes + message.size_bytes * message.max_proofs
    if used > plan.space_bytes:
        raise Refused(
            4,
            f"storage account does not have enough space available {used} > {plan.space_bytes}: "
            "unauthorized",
        )
    draft.put("plan", plan.address, replace(plan, used_bytes=used))
    file = PostedFile(
        merkle=message.merkle,
        owner=message.creator,
        start=height,
        expires=message.expires,
        size_bytes=message.size_bytes,
        proof_interval=options.proof_window,
        proof_type=message.proof_type,
        max_proofs=message.max_proofs,
        note=message.note,
    )
    draft.put("file", file.key, file)
    posted = Event(
        "post_file", (("signer", file.owner), ("file", file.merkle.hex()), ("start", str(height)))
    )
    return _Result("PostFile", field(2, height), (_action("PostFile"), posted))


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _buy(message: BuyStorage, draft: Draft, options: Options, time: datetime) -> _Result:
    """Sell space that replaces the present plan and begins now.

    The rest of the present plan is deducted from the price.
    """
    if message.days < 30:
        raise Refused(UNREGISTERED[0], "duration can't be less than 1 month", UNREGISTERED[1])
    if message.denom != DENOM:
        raise Refused(10, f"cannot pay with anything other than {DENOM}: invalid coins")
    if message.size_bytes < GB:
        raise Refused(UNREGISTERED[0], "cannot buy less than a gb", UNREGISTERED[1])
    plan: Plan | None = draft.get("plan", message.for_address)
    used = plan.used_bytes if plan else 0
    if used > message.size_bytes:
        raise Refused(
            UNREGISTERED[0], "cannot buy less than your current gb usage", UNREGISTERED[1]
        )
    account: Account = draft.get("account", message.creator)
    price = options.price_of(message.size_bytes, message.days)
    if plan is not None and plan.end > time:
        price = max(
            0, price - options.price_of(plan.space_bytes, (plan.end - time) / timedelta(days=1))
        )
    try:
        account = _paid(account, price)
    except Refused as refused:
        raise Refused(refused.code, f"cannot send tokens from account: {refused.log}") from refused
    draft.put("account", account.address, account)
    end = time + timedelta(days=message.days)
    draft.put(
        "plan", message.for_address, Plan(message.for_address, message.size_bytes, used, time, end)
    )
    return _Result("BuyStorage", b"", (_action("BuyStorage"), *payment(message.creator, price)))


def _delete(message: DeleteFile, draft: Draft) -> _Result:
    file: PostedFile | None = draft.get(
        "file", f"{message.merkle.hex()}/{message.creator}/{message.start}/"
    )
    if file is None:
        raise Refused(22, "file not found: key not found")
    if file.expires:
        raise Refused(18, "can not delete files before they expire: invalid request")
    plan: Plan | None = draft.get("plan", message.creator)
    if plan is None:
        raise Refused(22, "payment info not found: key not found")
    used = max(0, plan.used_bytes - file.size_bytes * file.max_proofs)
    draft.put("plan", plan.address, replace(plan, used_bytes=used))
    draft.put("file", file.key, None)
    for prover in file.provers:
        draft.put("proof", f"{prover}/{file.key}", None)
    gone = Event("cancel_contract", (("signer", file.owner), ("contract", file.merkle.hex())))
    return _Result("DeleteFile", b"", (_action("DeleteFile"), gone))


def payment(payer: str, amount: int) -> tuple[Event, ...]:
    """Return the bank module's events of a payment to a module, which passes part of it on.

    An amount of 0 appears as "".
    """
    coins, share = (f"{value}{DENOM}" if value else "" for value in (amount, amount * 2 // 5))
    return (
        Event(
            "coin_spent",
            (("spender", payer), ("amount", coins), ("spender", MODULE), ("amount", share)),
        ),
        Event(
            "coin_received",
            (("receiver", MODULE), ("amount", coins), ("receiver", POOL), ("amount", share)),
        ),
        Event("transfer", (("recipient", MODULE), ("sender", payer), ("amount", coins))),
    )


def _action(name: str) -> Event:
    return Event("message", (("action", f"{TYPE_URL}{name}"), ("module", "storage")))
