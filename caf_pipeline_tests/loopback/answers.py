"""The JSON of the chain's REST: ordinary base64, 64-bit integers as strings, grpc-gateway errors.

Source: answers of a Cosmos SDK node, and the notes on Jackal's protocol for the storage module.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from caf_pipeline_tests.loopback.chain_state import (
    Account,
    Event,
    Included,
    Plan,
    PostedFile,
    Proof,
)
from caf_pipeline_tests.loopback.options import Options
from caf_pipeline_tests.loopback.transactions import (
    DENOM,
    PUBLIC_KEY,
    TYPE_URL,
    BuyStorage,
    DeleteFile,
    Message,
    PostFile,
    SignedTransaction,
    parse,
    payment,
)

JSON: Final = "application/json"
Answer = dict[str, Any]


class GatewayError(Exception):
    """An error answer with its HTTP status and gRPC code."""

    def __init__(self, status: int, code: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def answer(self) -> Answer:
        """Return the body."""
        return {"code": self.code, "message": str(self), "details": []}


def not_found(what: str = "not found") -> GatewayError:
    """Return the error for an unknown object."""
    return GatewayError(404, 5, f"rpc error: code = NotFound desc = {what}: key not found")


def invalid(message: str) -> GatewayError:
    """Return the error for an invalid request."""
    return GatewayError(400, 3, message)


def not_implemented() -> GatewayError:
    """Return the error for an unknown path."""
    return GatewayError(501, 12, "Not Implemented")


def text(value: bytes) -> str:
    """Return bytes in base64."""
    return base64.b64encode(value).decode()


def time_text(time: datetime) -> str:
    """Return a time in Go's format."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f").rstrip("0").rstrip(".") + "Z"


# --- storage ---


def file(posted: PostedFile) -> Answer:
    """Return a file."""
    return {
        "merkle": text(posted.merkle),
        "owner": posted.owner,
        "start": str(posted.start),
        "expires": str(posted.expires),
        "file_size": str(posted.size_bytes),
        "proof_interval": str(posted.proof_interval),
        "proof_type": str(posted.proof_type),
        "proofs": [
            f"{prover}/{posted.owner}/{posted.merkle.hex()}/{posted.start}/"
            for prover in posted.provers
        ],
        "max_proofs": str(posted.max_proofs),
        "note": posted.note,
    }


def proof(one: Proof) -> Answer:
    """Return a provider's proof."""
    merkle, owner, start, _ = one.file.split("/")
    return {
        "prover": one.provider,
        "merkle": text(bytes.fromhex(merkle)),
        "owner": owner,
        "start": start,
        "last_proven": str(one.last_proven),
        "chunk_to_prove": str(one.to_prove),
    }


def plan(bought: Plan) -> Answer:
    """Return bought space."""
    return {
        "start": time_text(bought.start),
        "end": time_text(bought.end),
        "spaceAvailable": str(bought.space_bytes),
        "spaceUsed": str(bought.used_bytes),
        "address": bought.address,
        "coins": [],
    }


def provider(address: str, url: str, options: Options) -> Answer:
    """Return a provider."""
    return {
        "address": address,
        "ip": url,
        "totalspace": str(options.provider_space),
        "burned_contracts": "0",
        "creator": address,
        "keybase_identity": "",
        "auth_claimers": [],
    }


def params(options: Options) -> Answer:
    """Return the storage module's parameters.

    Those that no client needs have published defaults.
    """
    return {
        "deposit_account": "jkl1778a6x4e6t074ajvs7l76wpa2xd0s4pt0tqq57",
        "proof_window": str(options.proof_window),
        "chunk_size": "10240",
        "misses_to_burn": "3",
        "price_feed": "jklprice",
        "max_contract_age_in_blocks": "100",
        "price_per_tb_per_month": "15",
        "attestFormSize": "5",
        "attestMinToPass": "3",
        "collateralPrice": "10000000000",
        "check_window": "100",
        "pol_ratio": "40",
        "referral_commission": "25",
    }


# --- accounts, blocks ---


def account(one: Account) -> Answer:
    """Return an account."""
    key = {"@type": PUBLIC_KEY, "key": text(one.public_key)} if one.public_key else None
    return {
        "@type": "/cosmos.auth.v1beta1.BaseAccount",
        "address": one.address,
        "pub_key": key,
        "account_number": str(one.number),
        "sequence": str(one.sequence),
    }


def coin(amount: int) -> Answer:
    """Return an amount of ujkl."""
    return {"denom": DENOM, "amount": str(amount)}


def node_info(chain_id: str, version: str) -> Answer:
    """Return a node's description of itself."""
    return {
        "default_node_info": {
            "protocol_version": {"p2p": "8", "block": "11", "app": "0"},
            "default_node_id": hashlib.sha256(chain_id.encode()).hexdigest()[:40],
            "listen_addr": "tcp://0.0.0.0:26656",
            "network": chain_id,
            "version": "0.34.27",
            "channels": "QCAhIiMwOGBhAA==",
            "moniker": "loopback",
            "other": {"tx_index": "on", "rpc_address": "tcp://127.0.0.1:26657"},
        },
        "application_version": {
            "name": "canine",
            "app_name": "canined",
            "version": version,
            "git_commit": "",
            "build_tags": "",
            "go_version": "",
            "build_deps": [],
            "cosmos_sdk_version": "v0.45.17",
        },
    }


def block(chain_id: str, height: int, time: datetime, transactions: Sequence[bytes]) -> Answer:
    """Return a block. Its hashes are invented."""
    block_hash = text(hashlib.sha256(f"{chain_id}/{height}".encode()).digest())
    last_hash = (
        text(hashlib.sha256(f"{chain_id}/{height - 1}".encode()).digest()) if height > 1 else None
    )
    header = {
        "version": {"block": "11", "app": "0"},
        "chain_id": chain_id,
        "height": str(height),
        "time": time_text(time),
        "last_block_id": {"hash": last_hash, "part_set_header": {"total": 1, "hash": last_hash}},
        "proposer_address": text(bytes(20)),
    }
    block_id = {"hash": block_hash, "part_set_header": {"total": 1, "hash": block_hash}}
    last_commit = {
        "height": str(height - 1),
        "round": 0,
        "block_id": header["last_block_id"],
        "signatures": [],
    }
    body = {
        "header": header,
        "data": {"txs": [text(body) for body in transactions]},
        "evidence": {"evidence": []},
    }
    return {"block_id": block_id, "block": body | {"last_commit": last_commit}}


# --- transactions ---


def broadcast(hash_: str, *, code: int = 0, codespace: str = "", log: str = "[]") -> Answer:
    """Return the answer to a broadcast in sync or async mode."""
    response = {
        "height": "0",
        "txhash": hash_,
        "codespace": codespace,
        "code": code,
        "data": "",
        "raw_log": log,
        "logs": [],
        "info": "",
        "gas_wanted": "0",
        "gas_used": "0",
        "tx": None,
        "timestamp": "",
        "events": [],
    }
    return {"tx_response": response}


def included(one: Included) -> Answer:
    """Return a transaction that is in a block."""
    tx = transaction(parse(one.body))
    logs = [
        {"msg_index": index, "log": "", "events": [_log_event(event) for event in events]}
        for index, events in enumerate(one.events)
    ]
    response = {
        "height": str(one.height),
        "txhash": one.hash,
        "codespace": one.codespace,
        "code": one.code,
        "data": one.data.hex().upper(),
        "raw_log": one.log or json.dumps([_short(log) for log in logs], separators=(",", ":")),
        "logs": logs,
        "info": "",
        "gas_wanted": str(one.gas_wanted),
        "gas_used": str(one.gas_used),
        "tx": {"@type": "/cosmos.tx.v1beta1.Tx"} | tx,
        "timestamp": one.time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "events": [
            _block_event(event) for events in (_ante_events(one), *one.events) for event in events
        ],
    }
    return {"tx": tx, "tx_response": response}


def _ante_events(one: Included) -> tuple[Event, ...]:
    signed = parse(one.body)
    return (
        *payment(signed.signer, signed.fee),
        Event("tx", (("fee", f"{signed.fee}{DENOM}"),)),
        Event("tx", (("acc_seq", f"{signed.signer}/{signed.sequence}"),)),
        Event("tx", (("signature", text(signed.signatures[0])),)),
    )


def _short(log: Answer) -> Answer:
    """Return a log without empty members, as the raw log has it."""
    return {name: value for name, value in log.items() if value}


def _log_event(event: Event) -> Answer:
    return {
        "type": event.type,
        "attributes": [{"key": key, "value": value} for key, value in event.attributes],
    }


def _block_event(event: Event) -> Answer:
    attributes = [
        {"key": text(key.encode()), "value": text(value.encode()), "index": True}
        for key, value in event.attributes
    ]
    return {"type": event.type, "attributes": attributes}


def transaction(signed: SignedTransaction) -> Answer:
    """Return a signed transaction."""
    signer = {
        "public_key": {"@type": PUBLIC_KEY, "key": text(signed.public_key)},
        "mode_info": {"single": {"mode": "SIGN_MODE_DIRECT"}},
        "sequence": str(signed.sequence),
    }
    fee = {
        "amount": [coin(signed.fee)] if signed.fee else [],
        "gas_limit": str(signed.gas_limit),
        "payer": "",
        "granter": "",
    }
    body = {
        "messages": [_message(message) for message in signed.messages],
        "memo": signed.memo,
        "timeout_height": str(signed.timeout_height),
        "extension_options": [],
        "non_critical_extension_options": [],
    }
    auth = {"signer_infos": [signer], "fee": fee}
    return {
        "body": body,
        "auth_info": auth,
        "signatures": [text(signature) for signature in signed.signatures],
    }


def _message(message: Message) -> Answer:
    head = {"@type": f"{TYPE_URL}{type(message).__name__}", "creator": message.creator}
    match message:
        case PostFile():
            return head | {
                "merkle": text(message.merkle),
                "file_size": str(message.size_bytes),
                "proof_interval": "0",
                "proof_type": str(message.proof_type),
                "max_proofs": str(message.max_proofs),
                "expires": str(message.expires),
                "note": message.note,
            }
        case BuyStorage():
            return head | {
                "for_address": message.for_address,
                "duration_days": str(message.days),
                "bytes": str(message.size_bytes),
                "payment_denom": message.denom,
                "referral": "",
            }
        case DeleteFile():
            return head | {"merkle": text(message.merkle), "start": str(message.start)}
