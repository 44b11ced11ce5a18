"""The REST server of one node of the chain ("LCD").

A node may answer from a state that is some blocks old. As in the gateway, paths are unquoted before
routing: a root in quoted ordinary base64 is split at its slashes (501), and hex is parsed as the
base64 of another root (404).
"""

import base64
import binascii
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import bech32

from caf_pipeline_tests.loopback import answers
from caf_pipeline_tests.loopback.answers import Answer, GatewayError
from caf_pipeline_tests.loopback.blocks import Chain
from caf_pipeline_tests.loopback.chain_state import PostedFile, World
from caf_pipeline_tests.loopback.http_server import Cut, Request
from caf_pipeline_tests.loopback.transactions import DENOM, Refused, transaction_hash

PAGE: Final = 100  # the SDK's default limit

STORAGE: Final = "/jackal/canine-chain/storage"

Query = Mapping[str, str]
Route = Callable[..., Answer]


class Node:
    """One LCD. `providers` maps each provider's address to its URL."""

    def __init__(self, index: int, chain: Chain, providers: Mapping[str, str]) -> None:
        self.index = index
        self._chain = chain
        self._providers = providers
        cosmos = "/cosmos/{}/v1beta1"
        tendermint, auth, bank, tx = (
            cosmos.format(module) for module in ("base/tendermint", "auth", "bank", "tx")
        )
        routes: list[tuple[str, str, Route]] = [
            ("GET", f"{tendermint}/node_info", self._node_info),
            ("GET", f"{tendermint}/blocks/latest", self._latest_block),
            ("GET", f"{tendermint}/blocks/{{height}}", self._block),
            ("GET", f"{auth}/accounts/{{address}}", self._account),
            ("GET", f"{bank}/balances/{{address}}/by_denom", self._balance),
            ("POST", f"{tx}/txs", self._broadcast),
            ("GET", f"{tx}/txs/{{hash}}", self._transaction),
            ("GET", f"{STORAGE}/params", self._params),
            ("GET", f"{STORAGE}/files", self._files),
            ("GET", f"{STORAGE}/files/merkle/{{merkle}}", self._files_of_root),
            ("GET", f"{STORAGE}/files/note/{{key}}/{{value}}", self._files_of_note),
            ("GET", f"{STORAGE}/files/{{merkle}}/{{owner}}/{{start}}", self._file),
            ("GET", f"{STORAGE}/providers", self._list_providers),
            ("GET", f"{STORAGE}/providers/{{address}}", self._provider),
            ("GET", f"{STORAGE}/active_providers", self._active_providers),
            ("GET", f"{STORAGE}/proofs/{{provider}}", self._proofs),
            ("GET", f"{STORAGE}/payment_info/{{address}}", self._plan),
            ("GET", f"{STORAGE}/price_check/{{days}}/{{size_bytes}}", self._price),
        ]
        self._routes = [(method, _pattern(path), route) for method, path, route in routes]

    def serve(self, request: Request) -> None:
        """Answer a request. Raises Cut."""
        conduct = self._chain.orders.node(self.index)
        request.clock_days = self._chain.options.clock_days
        if conduct.refuse:
            raise Cut
        if conduct.hang_seconds:
            time.sleep(conduct.hang_seconds)
        if conduct.nonsense:
            request.nonsense(conduct.nonsense)
            return
        world = self._chain.world_behind(conduct.lag)
        try:
            if conduct.fail:
                raise GatewayError(conduct.fail, 14, "this node fails by order")
            answer, status = self._answer(request, world), 200
        except GatewayError as error:
            answer, status = error.answer(), error.status
        headers = (
            {"Grpc_Metadata_X_Cosmos_Block_Height": str(world.height)} if status == 200 else {}
        )
        request.answer(status, json.dumps(answer, indent=2).encode(), answers.JSON, **headers)

    def _answer(self, request: Request, world: World) -> Answer:
        method = "GET" if request.command == "HEAD" else request.command
        for route_method, pattern, route in self._routes:
            if route_method == method and (match := pattern.fullmatch(request.route)):
                source: Any = request.query if method == "GET" else _body(request)
                return route(world, source, **match.groupdict())
        raise answers.not_implemented()

    @property
    def _chain_id(self) -> str:
        return self._chain.orders.node(self.index).chain_id or self._chain.options.chain_id

    # --- tendermint ---

    def _node_info(self, world: World, query: Query) -> Answer:
        version = self._chain.orders.node(self.index).version
        return answers.node_info(
            self._chain_id, self._chain.options.version if version is None else version
        )

    def _latest_block(self, world: World, query: Query) -> Answer:
        return self._block(world, query, str(world.height))

    def _block(self, world: World, query: Query, height: str) -> Answer:
        number = _integer(height, "height")
        if number <= 0:
            raise answers.invalid(
                f"height must be greater than 0, but got {number}: invalid request"
            )
        if number > world.height:
            raise answers.invalid(
                "rpc error: code = InvalidArgument desc = requested block height is bigger then "
                "the chain length: invalid request"
            )
        made = self._chain.database.block_time(number)
        assert made is not None
        bodies = [
            included.body for included in world.transactions.values() if included.height == number
        ]
        return answers.block(self._chain_id, number, made, bodies)

    # --- accounts ---

    def _account(self, world: World, query: Query, address: str) -> Answer:
        _check_address(address)
        if address not in world.accounts:
            raise answers.not_found(f"account {address} not found")
        return {"account": answers.account(world.accounts[address])}

    def _balance(self, world: World, query: Query, address: str) -> Answer:
        denom = query.get("denom", "")
        if not denom:
            raise answers.invalid(
                "rpc error: code = InvalidArgument desc = invalid denom: invalid request"
            )
        return {
            "balance": {
                "denom": denom,
                "amount": str(_balance(world, address) if denom == DENOM else 0),
            }
        }

    # --- transactions ---

    def _broadcast(self, world: World, sent: Any) -> Answer:
        raw = _transaction_bytes(sent)
        if sent.get("mode") != "BROADCAST_MODE_SYNC":
            raise GatewayError(500, 2, "unsupported return type")
        self._chain.database.count(["broadcast"])
        cut = self._chain.orders.chain().cut_broadcast
        if cut == "drop":
            raise Cut
        try:
            answer = answers.broadcast(self._chain.broadcast(raw, world))
        except Refused as refused:
            hash_ = transaction_hash(raw)
            answer = answers.broadcast(
                hash_, code=refused.code, codespace=refused.codespace, log=refused.log
            )
        if cut:
            raise Cut
        return answer

    def _transaction(self, world: World, query: Query, hash: str) -> Answer:
        try:
            bytes.fromhex(hash)
        except ValueError:
            raise answers.invalid("encoding/hex: invalid byte: invalid request") from None
        included = world.transactions.get(hash.upper())
        if included is None or self._chain.orders.node(self.index).index_off:
            raise answers.not_found(f"tx not found: {hash}")
        return answers.included(included)

    # --- files ---

    def _params(self, world: World, query: Query) -> Answer:
        return {"params": answers.params(self._chain.options)}

    def _files(self, world: World, query: Query) -> Answer:
        page, pagination = _page(sorted(world.files), query)
        return {"files": [answers.file(world.files[key]) for key in page], "pagination": pagination}

    def _files_of_root(self, world: World, query: Query, merkle: str) -> Answer:
        prefix = f"{_root(merkle).hex()}/"
        page, pagination = _page(
            sorted(key for key in world.files if key.startswith(prefix)), query
        )
        return {"files": [answers.file(world.files[key]) for key in page], "pagination": pagination}

    def _files_of_note(self, world: World, query: Query, key: str, value: str) -> Answer:
        """Scan all files of any owner. A page counts the scanned files, not the matching ones."""
        page, pagination = _page(sorted(world.files), query)
        files = [world.files[file_key] for file_key in page]
        return {
            "files": [answers.file(file) for file in files if _has_note(file, key, value)],
            "pagination": pagination,
        }

    def _file(self, world: World, query: Query, merkle: str, owner: str, start: str) -> Answer:
        file = world.files.get(f"{_root(merkle).hex()}/{owner}/{_integer(start, 'start')}/")
        if file is None:
            raise answers.not_found()
        return {"file": answers.file(file)}

    # --- providers ---

    def _list_providers(self, world: World, query: Query) -> Answer:
        page, pagination = _page(sorted(self._providers), query)
        return {
            "providers": [self._described(address) for address in page],
            "pagination": pagination,
        }

    def _provider(self, world: World, query: Query, address: str) -> Answer:
        if address not in self._providers:
            raise answers.not_found()
        return {"provider": self._described(address)}

    def _described(self, address: str) -> Answer:
        return answers.provider(address, self._providers[address], self._chain.options)

    def _active_providers(self, world: World, query: Query) -> Answer:
        """List the addresses of providers with at least one proof."""
        active = {proof.provider for proof in world.proofs.values()}
        return {"providers": [{"address": address} for address in sorted(active)]}

    def _proofs(self, world: World, query: Query, provider: str) -> Answer:
        page, pagination = _page(
            sorted(key for key, proof in world.proofs.items() if proof.provider == provider), query
        )
        return {
            "proofs": [answers.proof(world.proofs[key]) for key in page],
            "pagination": pagination,
        }

    # --- space ---

    def _plan(self, world: World, query: Query, address: str) -> Answer:
        if address not in world.plans:
            raise answers.not_found()
        return {"storage_payment_info": answers.plan(world.plans[address])}

    def _price(self, world: World, query: Query, days: str, size_bytes: str) -> Answer:
        if _integer(days, "duration") < 30:
            raise GatewayError(500, 2, "duration can't be less than 1 month: unknown request")
        return {
            "price": str(self._chain.options.price_of(_integer(size_bytes, "bytes"), int(days)))
        }


# --- parsing requests ---


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path))


def _body(request: Request) -> Any:
    try:
        sent = request.read_json()
    except ValueError as error:
        raise answers.invalid(f"invalid JSON: {error}") from error
    if not isinstance(sent, dict):
        raise answers.invalid("json: cannot unmarshal into a message")
    return sent


def _transaction_bytes(sent: Mapping[str, Any]) -> bytes:
    try:
        return base64.b64decode(sent.get("tx_bytes", ""), validate=True)
    except (binascii.Error, TypeError) as error:
        raise answers.invalid("illegal base64 data at input byte 0") from error


def _base64(value: str, parameter: str) -> bytes:
    """Decode either alphabet. Padding is required, as in the gateway."""
    for text in (value, value.replace("-", "+").replace("_", "/")):
        try:
            return base64.b64decode(text, validate=True)
        except binascii.Error:
            continue
    raise answers.invalid(
        f"type mismatch, parameter: {parameter}, error: illegal base64 data at input byte 0"
    )


def _root(value: str) -> bytes:
    return _base64(value, "merkle")


def _integer(value: str, parameter: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,19}", value):
        problem = f'strconv.ParseInt: parsing "{value}": invalid syntax'
        raise answers.invalid(f"type mismatch, parameter: {parameter}, error: {problem}")
    return int(value)


def _check_address(address: str) -> None:
    if bech32.bech32_decode(address)[1] is None:
        raise answers.invalid(
            f"decoding bech32 failed: invalid bech32 string length {len(address)}: invalid request"
        )


def _balance(world: World, address: str) -> int:
    _check_address(address)
    account = world.accounts.get(address)
    return account.balance if account else 0


def _has_note(file: PostedFile, key: str, value: str) -> bool:
    try:
        note = json.loads(file.note)
    except ValueError:
        return False
    return isinstance(note, dict) and note.get(key) == value


def _page(keys: Sequence[str], query: Query) -> tuple[Iterable[str], Answer]:
    """Return the keys of the requested page, and the pagination object of the answer."""
    limit = _integer(query.get("pagination.limit", "0"), "pagination.limit") or PAGE
    key = query.get("pagination.key", "")
    offset = _integer(query.get("pagination.offset", "0"), "pagination.offset")
    counted = query.get("pagination.count_total") == "true" or "pagination.limit" not in query
    start = _base64(key, "pagination.key").decode(errors="replace") if key else ""
    remaining = [item for item in keys if item >= start][0 if key else offset :]
    next_key = answers.text(remaining[limit].encode()) if len(remaining) > limit else None
    return remaining[:limit], {
        "next_key": next_key,
        "total": str(len(keys) if counted and not key else 0),
    }
