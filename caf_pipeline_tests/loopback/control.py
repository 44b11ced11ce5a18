"""Orders and queries of tests, on a separate port and under /loopback/ on every LCD.

    GET  /loopback/state                               the whole state, for assertions
    GET  /loopback/traffic         connections and requests of each server since its start
    POST /loopback/misbehave       {"provider": 0, …}  see `misbehaviour`
    POST /loopback/well-behaved                        ends all faults
    POST /loopback/advance         {"blocks": 10}      makes blocks, even on a halted chain
    POST /loopback/fund            {"address", "amount"}         pays ujkl
    POST /loopback/grant           {"address", "bytes", "days", "days_ago"}  replaces the plan
    POST /loopback/expire          {"address"}         ends the plan
    POST /loopback/spend-sequence  {"address"}         uses up a sequence in the next block
    POST /loopback/drop-proofs     {"merkle", "provider"?}       removes proofs of a root's files
    POST /loopback/delete-blob     {"provider", "merkle"}        deletes a root's bytes silently
    POST /loopback/lose-range      {"provider", "merkle", "start", "end"}
    POST /loopback/kill-provider   {"provider"}        cuts its connections; its disk stays
    POST /loopback/start-provider  {"provider"}        starts it again
    POST /loopback/move-provider   {"provider", "url"} changes its URL on the chain until a restart

Roots are in hex. Every order answers with the height after it.
"""

import json
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
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
    """Executes orders.

    It opens and closes the ports of `provider_listeners` and `lcd_listeners`.
    """

    def __init__(
        self, chain: Chain, providers: Sequence[Provider], provider_urls: MutableMapping[str, str]
    ) -> None:
        self._chain = chain
        self._providers = providers
        self._provider_urls = provider_urls
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
            "move-provider": self._move_provider,
        }

    def serve(self, request: Request) -> None:
        """Answer one request."""
        name = request.route.removeprefix(PREFIX)
        try:
            if request.command == "GET" and name == "state":
                answer = self.state()
            elif request.command == "GET" and name == "traffic":
                answer = {
                    "lcds": [listener.traffic for listener in self.lcd_listeners],
                    "providers": [listener.traffic for listener in self.provider_listeners],
                }
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
        """Open and close ports as the present orders require."""
        refusals = [
            *(
                (listener, self._chain.orders.provider(index).refuse)
                for index, listener in enumerate(self.provider_listeners)
            ),
            *(
                (listener, self._chain.orders.node(index).refuse)
                for index, listener in enumerate(self.lcd_listeners)
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
        present = self._chain.world.plans.get(address)
        now = self._chain.now()
        start = now - timedelta(days=float(order.get("days_ago", 0)))
        end = now + timedelta(days=float(order.get("days", 365)))
        used_bytes = present.used_bytes if present else 0
        plan = Plan(address, int(order["bytes"]), used_bytes, start, end)
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

    def _move_provider(self, order: Mapping[str, Any]) -> None:
        provider = self._providers[int(order["provider"])]
        self._provider_urls[provider.address] = str(order["url"])

    # --- state ---

    def state(self) -> dict[str, Any]:
        """Return the state of the network. Roots are in hex, sizes and coins are numbers."""
        world, chain = self._chain.world, self._chain
        counters = Counter(chain.database.counters())
        posted = Counter[str]()
        for included in world.transactions.values():
            if not included.code:
                posted.update(message.merkle.hex() for message in _posts(included))
        return {
            "chain_id": chain.options.chain_id,
            "height": world.height,
            "accounts": {
                account.address: {"balance": account.balance, "sequence": account.sequence}
                for account in world.accounts.values()
            },
            "plans": {
                plan.address: {
                    "space_bytes": plan.space_bytes,
                    "used_bytes": plan.used_bytes,
                    "end": plan.end.isoformat(),
                }
                for plan in world.plans.values()
            },
            "charged": {plan.address: plan.used_bytes for plan in world.plans.values()},
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
                        prover: world.proofs[f"{prover}/{file.key}"].last_proven
                        for prover in file.provers
                    },
                    "to_prove": {
                        prover: world.proofs[f"{prover}/{file.key}"].to_prove
                        for prover in file.provers
                    },
                }
                for file in sorted(world.files.values(), key=lambda file: (file.start, file.key))
            ],
            "transactions": [
                {
                    "hash": included.hash,
                    "height": included.height,
                    "code": included.code,
                    "log": included.log,
                    "posts": len(_posts(included)),
                }
                for included in sorted(
                    world.transactions.values(),
                    key=lambda included: (included.height, included.hash),
                )
            ],
            "mempool": list(chain.pending),
            "broadcasts": counters["broadcast"],
            "providers": [
                {
                    "address": provider.address,
                    "roots": provider.blobs.roots(),
                    "uploads_begun": counters[f"upload begun {provider.address}"],
                    "uploads": counters[f"upload {provider.address}"],
                    "downloads": counters[f"download {provider.address}"],
                }
                for provider in self._providers
            ],
            "uploads_by_root": {
                name.removeprefix("root "): count
                for name, count in counters.items()
                if name.startswith("root ")
            },
        }


def _posts(included: Included) -> list[PostFile]:
    return [message for message in parse(included.body).messages if isinstance(message, PostFile)]
