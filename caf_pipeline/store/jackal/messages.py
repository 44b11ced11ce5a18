"""The chain's messages and signed transactions as bytes. No I/O, no generated code.

Source: "Messages" and "Transactions" in the notes on Jackal's protocol; cosmos.tx.v1beta1 of SDK
0.45.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from caf_pipeline.errors import StoreError
from caf_pipeline.store.jackal.names import DENOM
from caf_pipeline.store.jackal.wallet import Wallet

POST_FILE: Final = "/canine_chain.storage.MsgPostFile"
BUY_STORAGE: Final = "/canine_chain.storage.MsgBuyStorage"
PUBLIC_KEY: Final = "/cosmos.crypto.secp256k1.PubKey"

_TYPES: Final[dict[str, dict[str, tuple[int, str]]]] = {
    # name: {field: (number, type)}. "*" means repeated; a capitalized type is a message.
    "PostFile": {
        "creator": (1, "string"),
        "merkle": (2, "bytes"),
        "file_size": (3, "int64"),
        "proof_interval": (4, "int64"),
        "proof_type": (5, "int64"),
        "max_proofs": (6, "int64"),
        "expires": (7, "int64"),
        "note": (8, "string"),
    },
    "PostFileResponse": {"provider_ips": (1, "*string"), "start_block": (2, "int64")},
    "BuyStorage": {
        "creator": (1, "string"),
        "for_address": (2, "string"),
        "duration_days": (3, "int64"),
        "bytes": (4, "int64"),
        "payment_denom": (5, "string"),
        "referral": (6, "string"),
    },
    "Any": {"type_url": (1, "string"), "value": (2, "bytes")},
    "TxBody": {"messages": (1, "*Any"), "memo": (2, "string"), "timeout_height": (3, "uint64")},
    "Single": {"mode": (1, "uint64")},
    "ModeInfo": {"single": (1, "Single")},
    "SignerInfo": {
        "public_key": (1, "Any"),
        "mode_info": (2, "ModeInfo"),
        "sequence": (3, "uint64"),
    },
    "Coin": {"denom": (1, "string"), "amount": (2, "string")},
    "Fee": {"amount": (1, "*Coin"), "gas_limit": (2, "uint64")},
    "AuthInfo": {"signer_infos": (1, "*SignerInfo"), "fee": (2, "Fee")},
    "SignDoc": {
        "body_bytes": (1, "bytes"),
        "auth_info_bytes": (2, "bytes"),
        "chain_id": (3, "string"),
        "account_number": (4, "uint64"),
    },
    "TxRaw": {
        "body_bytes": (1, "bytes"),
        "auth_info_bytes": (2, "bytes"),
        "signatures": (3, "*bytes"),
    },
    "PubKey": {"key": (1, "bytes")},
    "MsgData": {"msg_type": (1, "string"), "data": (2, "bytes")},
    "TxMsgData": {"data": (1, "*MsgData")},
}

SIGN_MODE_DIRECT: Final = 1


@cache
def _message_classes() -> Mapping[str, type[Message]]:
    kinds = descriptor_pb2.FieldDescriptorProto
    scalars = {
        "string": kinds.TYPE_STRING,
        "bytes": kinds.TYPE_BYTES,
        "int64": kinds.TYPE_INT64,
        "uint64": kinds.TYPE_UINT64,
    }
    file = descriptor_pb2.FileDescriptorProto(
        name="caf_pipeline/jackal.proto", package="wire", syntax="proto3"
    )
    for name, fields in _TYPES.items():
        described = file.message_type.add(name=name)
        for field, (number, type_name) in fields.items():
            kind = type_name.removeprefix("*")
            label = kinds.LABEL_REPEATED if type_name.startswith("*") else kinds.LABEL_OPTIONAL
            descriptor = described.field.add(name=field, number=number, label=label)
            if kind in scalars:
                descriptor.type = scalars[kind]
            else:
                descriptor.type, descriptor.type_name = kinds.TYPE_MESSAGE, f".wire.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"wire.{name}"))
        for name in _TYPES
    }


def _message(type_name: str, **fields: Any) -> Message:  # noqa: ANN401 - a field's type is in `_TYPES`
    return _message_classes()[type_name](**fields)


def encode(type_name: str, **fields: Any) -> bytes:  # noqa: ANN401 - as above
    """Return a message's bytes. Fields with default values are left out, as in proto3."""
    return _message(type_name, **fields).SerializeToString(deterministic=True)


def decode(type_name: str, data: bytes) -> Any:  # noqa: ANN401 - the classes are made at run time
    """Parse a message. Raises StoreError if these are not its bytes."""
    message = _message(type_name)
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise StoreError(f"cannot parse {len(data)} bytes as {type_name}: {error}") from error
    return message


@dataclass(frozen=True, slots=True)
class ChainMessage:
    """A message in a transaction."""

    type_url: str
    value: bytes


@dataclass(frozen=True, slots=True)
class TransactionTerms:
    """Signed terms. `fee` is in ujkl; `timeout_height` is the last possible block."""

    chain_id: str
    account_number: int
    sequence: int
    timeout_height: int
    gas_limit: int
    fee: int


def post_file(
    creator: str, merkle_root: bytes, size_bytes: int, *, copies: int, proof_type: int, note: str
) -> ChainMessage:
    """Return the message that posts a file, for as long as the plan lasts."""
    value = encode(
        "PostFile",
        creator=creator,
        merkle=merkle_root,
        file_size=size_bytes,
        proof_type=proof_type,
        max_proofs=copies,
        note=note,
    )
    return ChainMessage(POST_FILE, value)


def buy_storage(creator: str, size_bytes: int, days: int) -> ChainMessage:
    """Return the message that buys space for the wallet itself."""
    value = encode(
        "BuyStorage",
        creator=creator,
        for_address=creator,
        duration_days=days,
        bytes=size_bytes,
        payment_denom=DENOM,
    )
    return ChainMessage(BUY_STORAGE, value)


def sign_transaction(
    wallet: Wallet, messages: Sequence[ChainMessage], terms: TransactionTerms
) -> bytes:
    """Return the signed transaction (TxRaw) in SIGN_MODE_DIRECT."""
    body = encode(
        "TxBody",
        messages=[
            _message("Any", type_url=message.type_url, value=message.value) for message in messages
        ],
        timeout_height=terms.timeout_height,
    )
    signer = _message(
        "SignerInfo",
        public_key=_message(
            "Any", type_url=PUBLIC_KEY, value=encode("PubKey", key=wallet.public_key)
        ),
        mode_info=_message("ModeInfo", single=_message("Single", mode=SIGN_MODE_DIRECT)),
        sequence=terms.sequence,
    )
    coins = [_message("Coin", denom=DENOM, amount=str(terms.fee))] if terms.fee else []
    auth_info = encode(
        "AuthInfo",
        signer_infos=[signer],
        fee=_message("Fee", amount=coins, gas_limit=terms.gas_limit),
    )
    document = encode(
        "SignDoc",
        body_bytes=body,
        auth_info_bytes=auth_info,
        chain_id=terms.chain_id,
        account_number=terms.account_number,
    )
    return encode(
        "TxRaw", body_bytes=body, auth_info_bytes=auth_info, signatures=[wallet.sign(document)]
    )


def transaction_messages(body: bytes) -> list[ChainMessage]:
    """Return a transaction's messages in order."""
    raw = decode("TxRaw", body)
    messages = decode("TxBody", raw.body_bytes).messages
    return [ChainMessage(message.type_url, message.value) for message in messages]


def transaction_fee(body: bytes) -> int:
    """Return the fee in ujkl. It is paid even if the transaction fails in its block."""
    raw = decode("TxRaw", body)
    return sum(
        int(coin.amount)
        for coin in decode("AuthInfo", raw.auth_info_bytes).fee.amount
        if coin.denom == DENOM
    )


def post_starts(data: str) -> list[int]:
    """Return the start of each post, in order, from an included transaction's hex TxMsgData."""
    try:
        results = decode("TxMsgData", bytes.fromhex(data)).data
    except ValueError as error:
        raise StoreError(f"the transaction's data is not hex: {data[:40]!r}") from error
    return [
        int(decode("PostFileResponse", result.data).start_block)
        for result in results
        if result.msg_type == POST_FILE
    ]
