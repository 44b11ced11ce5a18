"""What a test may ask and order. On a port of its own, and under /loopback/ on every LCD.

    GET  /loopback/state                                    everything, for assertions POST
    /loopback/misbehave       {"provider": 0, …}       see `misbehaviour` POST
    /loopback/well-behaved                             takes all of that back POST /loopback/advance
    {"blocks": 10}           makes blocks at once, also on a halted chain POST /loopback/fund
    {"address", "amount"}    ujkl POST /loopback/grant           {"address", "bytes", "days"}   a
    plan, by fiat; 0 days or fewer: one that is over POST /loopback/expire          {"address"}
    ends its plan POST /loopback/spend-sequence  {"address"}              another program uses one
    up, in the next block POST /loopback/drop-proofs     {"merkle", "provider"?}  takes proofs off
    the files of a root; hex POST /loopback/delete-blob     {"provider", "merkle"}   a provider
    loses the bytes of a root; it does not know it POST /loopback/lose-range      {"provider",
    "merkle", "start", "end"}   it no longer answers for it POST /loopback/kill-provider
    {"provider"}             it is gone in the middle of everything, its uploads with it POST
    /loopback/start-provider  {"provider"}             it is there again, with what it had on its
    disk

Every order answers with the height after it.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

from caf_pipeline_tests.loopback.blocks import Chain
from caf_pipeline_tests.loopback.chain_state import Included, Plan
from caf_pipeline_tests.loopback.http_server import Listener, Request
from caf_pipeline_tests.loopback.provider import Provider
from caf_pipeline_tests.loopback.transactions import PostFile, parse

PREFIX: Final = "/loopback/"
JSON: Final = "application/json"


class Control:
    """Takes orders.

    `listeners` are those of providers and LCDs by their conduct's name, whose ports it opens and
    closes.
    """

    def __init__(self, chain: Chain, providers: Sequence[Provider]) -> None:
        self._chain = chain
        self._providers = providers
        self.provider_listeners: Sequence[Listener] = ()
        self.lcd_listeners: Sequence[Listener] = ()
        self._orders = {
            "misbehave": self._misbehave,
            "well-behaved": self._well_behaved,
            "advance": self._advance,
            "fund": self._fund,
            "grant": self._grant,
            "expire": self._expire,
            "spend-sequence": self._spend_sequence,
            "drop-proofs": self._drop_proofs,
            "delete-blob": self._delete_blob,
            "lose-range": self._lose_range,
            "kill-provider": self._kill_provider,
            "start-provider": self._start_provider,
        }

    def serve(self, request: Request) -> None:
        """Answer one request."""
        name = request.route.removeprefix(PREFIX)
        try:
            if request.command == "GET" and name == "state":
                answer = self.state()
            elif request.command == "POST" and name in self._orders:
                self._orders[name](request.read_json() if request.body.known_bytes else {})
                answer = {"height": self._chain.world.height}
            else:
                raise LookupError(f"there is no {request.command} {request.route}")
        except (ValueError, LookupError, TypeError) as error:
            request.answer(400, json.dumps({"error": str(error)}).encode(), JSON)
            return
        request.answer(200, json.dumps(answer).encode(), JSON)

    # --- orders ---

    def _misbehave(self, order: Mapping[str, Any]) -> None:
        self._chain.orders.order(order)
        self.obey()

    def _well_behaved(self, order: Mapping[str, Any]) -> None:
        self._chain.orders.clear()
        self.obey()

    def obey(self) -> None:
        """Open and close ports as the orders in force say."""
        refusals = [
            *(
                (one, self._chain.orders.provider(index).refuse)
                for index, one in enumerate(self.provider_listeners)
            ),
            *(
                (one, self._chain.orders.node(index).refuse)
                for index, one in enumerate(self.lcd_listeners)
            ),
        ]
        for listener, refuses in refusals:
            if refuses:
                listener.close()
            else:
                listener.open()

    def _advance(self, order: Mapping[str, Any]) -> None:
        for _ in range(int(order["blocks"])):
            self._chain.make_block()

    def _fund(self, order: Mapping[str, Any]) -> None:
        self._chain.fund(str(order["address"]), int(order["amount"]))

    def _grant(self, order: Mapping[str, Any]) -> None:
        address = str(order["address"])
        known = self._chain.world.plans.get(address)
        now = self._chain.now()
        end = now + timedelta(days=float(order.get("days", 365)))
        plan = Plan(address, int(order["bytes"]), known.used_bytes if known else 0, now, end)
        self._chain.change("plan", address, plan)

    def _expire(self, order: Mapping[str, Any]) -> None:
        plan = self._chain.world.plans[str(order["address"])]
        self._chain.change(
            "plan", plan.address, replace(plan, end=self._chain.now() - timedelta(seconds=1))
        )

    def _spend_sequence(self, order: Mapping[str, Any]) -> None:
        self._chain.spend_sequence(str(order["address"]))

    def _drop_proofs(self, order: Mapping[str, Any]) -> None:
        provider = self._providers[int(order["provider"])].address if "provider" in order else None
        root = bytes.fromhex(order["merkle"])
        for file in list(self._chain.world.files.values()):
            if file.merkle == root:
                self._chain.drop_proofs(file, provider)

    def _delete_blob(self, order: Mapping[str, Any]) -> None:
        self._providers[int(order["provider"])].blobs.delete(bytes.fromhex(order["merkle"]).hex())

    def _lose_range(self, order: Mapping[str, Any]) -> None:
        root = bytes.fromhex(order["merkle"]).hex()
        self._providers[int(order["provider"])].blobs.lose_range(
            root, int(order["start"]), int(order["end"])
        )

    def _kill_provider(self, order: Mapping[str, Any]) -> None:
        index = int(order["provider"])
        self._chain.orders.order({"provider": index, "refuse": True, "never_prove": True})
        self.provider_listeners[index].close(reset=True)
        self._providers[index].forget()

    def _start_provider(self, order: Mapping[str, Any]) -> None:
        index = int(order["provider"])
        self._chain.orders.order({"provider": index, "refuse": False, "never_prove": False})
        self.obey()

    # --- state ---

    def state(self) -> dict[str, Any]:
        """Return what the network knows. Roots in hex, sizes and coins as numbers."""
        world, chain = self._chain.world, self._chain
        counters = Counter(chain.database.counters())
        posted = Counter[str]()
        for one in world.transactions.values():
            posted.update(message.merkle.hex() for message in _posts(one) if not one.code)
        return {
            "chain_id": chain.options.chain_id,
            "height": world.height,
            "accounts": {
                one.address: {"balance": one.balance, "sequence": one.sequence}
                for one in world.accounts.values()
            },
            "plans": {
                one.address: {
                    "space_bytes": one.space_bytes,
                    "used_bytes": one.used_bytes,
                    "end": one.end.isoformat(),
                }
                for one in world.plans.values()
            },
            "charged": {one.address: one.used_bytes for one in world.plans.values()},
            "posts_by_root": dict(posted),
            "files": [
                {
                    "merkle": file.merkle.hex(),
                    "owner": file.owner,
                    "start": file.start,
                    "size_bytes": file.size_bytes,
                    "proof_type": file.proof_type,
                    "max_proofs": file.max_proofs,
                    "note": file.note,
                    "providers": list(file.provers),
                    "last_proven": {
                        one: world.proofs[f"{one}/{file.key}"].last_proven for one in file.provers
                    },
                    "to_prove": {
                        one: world.proofs[f"{one}/{file.key}"].to_prove for one in file.provers
                    },
                }
                for file in sorted(world.files.values(), key=lambda file: (file.start, file.key))
            ],
            "transactions": [
                {
                    "hash": one.hash,
                    "height": one.height,
                    "code": one.code,
                    "log": one.log,
                    "posts": len(_posts(one)),
                }
                for one in sorted(
                    world.transactions.values(), key=lambda one: (one.height, one.hash)
                )
            ],
            "mempool": list(chain.pending),
            "broadcasts": counters["broadcast"],
            "providers": [
                {
                    "address": one.address,
                    "roots": one.blobs.roots(),
                    "uploads_begun": counters[f"upload begun {one.address}"],
                    "uploads": counters[f"upload {one.address}"],
                    "downloads": counters[f"download {one.address}"],
                }
                for one in self._providers
            ],
            "uploads_by_root": {
                name.removeprefix("root "): count
                for name, count in counters.items()
                if name.startswith("root ")
            },
        }


def _posts(included: Included) -> list[PostFile]:
    return [message for message in parse(included.body).messages if isinstance(message, PostFile)]
