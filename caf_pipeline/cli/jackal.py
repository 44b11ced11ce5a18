r"""The commands of `caf jackal`: the wallet and its space, prices, purchases, and what the chain
lists.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from caf_pipeline.chunk_state import NOT_POSTED, ChunkState, has_reached
from caf_pipeline.cli.opened_ledger import opened_ledger
from caf_pipeline.cli.opening import RUN, known_sources
from caf_pipeline.cli.run_opening import opened_run_context
from caf_pipeline.cli.terminal import (
    JsonOption,
    SourcesArgument,
    confirm,
    counted,
    note,
    parse_size,
    print_json,
    printable,
    show_coins,
    show_size,
)
from caf_pipeline.errors import StoredChunkMissing, UsageError
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.ledger.processes import this_process
from caf_pipeline.ledger.records import Chunk, StoragePlanRow
from caf_pipeline.run_wiring import jackal_of, open_jackal
from caf_pipeline.settings import Settings, SourceSettings, load_settings
from caf_pipeline.steps.inventories import latest_whole_snapshot
from caf_pipeline.store.jackal import LEAST_BYTES, LEAST_DAYS
from caf_pipeline.store.jackal.answers import ChainFile, StoragePlan
from caf_pipeline.store.jackal.chain_diff import ChainDiff, compare
from caf_pipeline.store.jackal.storage_forecast import end_warning, to_buy
from caf_pipeline.store.jackal.wallet import mnemonic_sources
from caf_pipeline.store.jackal.write import JackalStore
from caf_pipeline.store.protocol import TransactionLog
from caf_pipeline.throttle import open_throttle
from caf_pipeline.waits import Announcer, Waits

MOST_DAYS: Final = 36_500

DaysOption = Annotated[
    int, typer.Option("--days", metavar="N", min=LEAST_DAYS, max=MOST_DAYS, help="For how long.")
]


# --- the wallet and its space
# ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Network:
    """Jackal as a command sees it. `account` is the wallet's name in the ledger."""

    ledger: Ledger
    store: JackalStore
    log: TransactionLog
    account: str


@contextmanager
def opened_network(settings: Settings) -> Iterator[Network]:
    """Open Jackal while the context lasts.

    Raises:
        SettingsError: chunks are kept elsewhere, or the network's settings are incomplete.
    """
    holder = this_process(RUN)
    with (
        opened_ledger(settings) as ledger,
        closing(open_jackal(settings, ledger, holder, Waits(Announcer(note)))) as store,
    ):
        account = f"{settings.jackal.chain_id}/{store.wallet.address}"
        yield Network(ledger, store, ledger.transactions(holder), account)


def wallet(json: JsonOption = False) -> None:
    r"""Show the wallet's coins, space and spending.

    What was spent is the sum of this ledger's transactions; other programs may use the wallet, too.
    A purchase counts as what the chain took. Where no node told that, it counts at its list price,
    which is the most.

    \b
    Examples:
      caf jackal wallet
      caf jackal wallet --json | jq .plan.free_bytes

    Exit status: 0, also where nothing was bought yet; 3 a setting or the wallet is wrong; 6 the
    database or 7 the chain failed.
    """
    settings = load_settings()
    with opened_network(settings) as network:
        chain, address = network.store.chain, network.store.wallet.address
        balance, spent = chain.balance(address), network.log.spent(network.account)
        plan, now = chain.confirmed_plan(address)
        last_reading = next(
            (row for row in network.ledger.storage_plans.list() if row.account == network.account),
            None,
        )
        pending = any(
            transaction.purpose == "buy" for transaction in network.log.pending(network.account)
        )
        at_list_price = network.log.at_list_price(network.account)
        throttle = open_throttle(settings.jackal, network.ledger.controls.current)
        cap, rate, paused = throttle.spend_cap(), throttle.limit() or None, throttle.paused()
        chunks = network.ledger.chunks.list()
    types = Counter(
        chunk.proof_type for chunk in chunks if has_reached(chunk.state, ChunkState.POSTED)
    )
    warning = (
        ""
        if plan is None
        else _space_warning(plan, None if pending else last_reading, now, settings.jackal.warn_days)
    )
    words = settings.jackal.mnemonic
    words_from, *not_used = mnemonic_sources(
        words.get_secret_value() if words else None, settings.jackal.mnemonic_file
    )
    if json:
        print_json(
            {
                "address": address,
                "chain_id": settings.jackal.chain_id,
                "words_from": words_from,
                "words_not_used": not_used,
                "proof_type": settings.jackal.proof_type,
                "posted_by_proof_type": {
                    str(proof_type): count for proof_type, count in sorted(types.items())
                },
                "balance_ujkl": balance,
                "plan": _plan_json(plan),
                "latest_end": last_reading.latest_end.isoformat()
                if last_reading and last_reading.latest_end
                else None,
                "warning": warning or None,
                "spent_ujkl": spent,
                "purchases_at_list_price": at_list_price,
                "spend_cap_ujkl": cap,
                "bandwidth": rate,
                "paused": paused or None,
            }
        )
        return
    typer.echo(f"address    {address} on {settings.jackal.chain_id}")
    unused = f"; not used: {printable(', '.join(not_used))}" if not_used else ""
    typer.echo(f"words      from {printable(words_from)}{unused}")
    typer.echo(f"balance    {show_coins(balance)}")
    typer.echo(f"space      {_plan_line(plan, now)}")
    if last_reading and last_reading.latest_end:
        typer.echo(
            f"latest end {last_reading.latest_end:%Y-%m-%d %H:%M} UTC, of all ends that were read "
            "since the last purchase"
        )
    if warning:
        typer.echo(f"warning    {warning}")
    typer.echo(
        f"spent      {show_coins(spent)} by this ledger's transactions; cap: "
        f"{'none' if cap is None else show_coins(cap)}"
    )
    if at_list_price:
        typer.echo(
            f"           at most: {counted(at_list_price, 'purchase')} at list price, since it is "
            "not known what the chain took"
        )
    typer.echo(f"proofs     {_proofs_line(settings.jackal.proof_type, types)}")
    typer.echo(
        "bandwidth  "
        f"{'no limit' if rate is None else f'{show_size(rate)} a second for all uploads together'}"
    )
    if paused:
        typer.echo(f"paused     {paused}")


def _proofs_line(proof_type: int, posted: Counter[int | None]) -> str:
    others = sum(count for other, count in posted.items() if other != proof_type)
    if not others:
        return f"type {proof_type}"
    goes_on = "goes on as it is" if others == 1 else "go on as they are"
    return (
        f"type {proof_type} for new chunks; {counted(others, 'chunk')} posted with another "
        "type "
        f"{goes_on}"
    )


def _plan_json(plan: StoragePlan | None) -> dict[str, object] | None:
    if plan is None:
        return None
    return {
        "space_bytes": plan.space_bytes,
        "used_bytes": plan.used_bytes,
        "free_bytes": plan.free_bytes,
        "ends_at": plan.ends_at.isoformat(),
    }


def _space_warning(
    plan: StoragePlan, last_reading: StoragePlanRow | None, now: datetime, warn_days: int
) -> str:
    """Return what is wrong with the end of the space, and the purchase that mends it; "" if the end
    is far.
    """
    latest_end, space_bytes = (
        (last_reading.latest_end, last_reading.latest_end_space or 0) if last_reading else (None, 0)
    )
    text = end_warning(plan, latest_end, now, warn_days).rstrip(".")
    needed_bytes = max(plan.used_bytes, plan.space_bytes)
    return (
        f"{text}: {to_buy(needed_bytes, space_bytes, latest_end, now, warn_days)}" if text else ""
    )


def _plan_line(plan: StoragePlan | None, now: datetime) -> str:
    if plan is None:
        return "none bought: caf jackal price SOURCE, then caf jackal buy"
    over = "it ended" if plan.ends_at <= now else "until"
    return (
        f"{show_size(plan.space_bytes)} bought, {show_size(plan.used_bytes)} used, "
        f"{show_size(plan.free_bytes)} free, "
        f"{over} {plan.ends_at:%Y-%m-%d %H:%M} UTC"
    )


# --- prices and purchases
# ------------------------------------------------------------------------------------------


def price(
    what: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE|SIZE", help="What is not yet archived of a source, or a size: 1TB."
        ),
    ],
    days: DaysOption = LEAST_DAYS,
    json: JsonOption = False,
) -> None:
    r"""Show what storing a source or a size would cost.

    That is space, the price of this space, fees, and how much of the space is there already. Every
    copy counts (jackal.copies). Of a source it is what its planned chunks are expected to take or,
    where none is planned, what its latest inventory has and no chunk.

    \b
    Examples:
      caf jackal price demo
      caf jackal price 10TB --days 365

    Exit status: 0; 2 not a size; 3 a setting or the wallet is wrong, or there is no such source; 6
    the database or 7 the chain failed; 11 the source has no inventory yet.
    """
    settings = load_settings()
    with opened_ledger(settings) as ledger:
        known = known_sources(settings, ledger.lookup)
    if what not in known and ("-" in what or not what[:1].isdigit()):
        raise settings.unknown_source(what, known)
    with opened_network(settings) as network:
        if what in known:
            size_bytes, chunks = _not_yet_archived(settings, network.ledger, what)
        else:
            size_bytes = parse_size(what, decimal=True)
            chunks = -(-size_bytes // _usual_chunk_bytes(settings))
        cost = network.store.cost(size_bytes, chunks, days)
        plan = network.store.chain.plan(network.store.wallet.address)
        free = plan.free_bytes if plan and plan.ends_at > network.store.chain.now() else 0
    charged = cost.charged_bytes
    if json:
        print_json(
            {
                "size_bytes": size_bytes,
                "chunks": chunks,
                "copies": cost.copies,
                "charged_bytes": charged,
                "days": days,
                "price_ujkl": cost.price_ujkl,
                "fees_ujkl": cost.fees_ujkl,
                "free_bytes": free,
                "missing_bytes": max(0, charged - free),
            }
        )
        return
    typer.echo(f"size     {show_size(size_bytes)} in about {counted(chunks, 'chunk')}")
    typer.echo(f"space    {show_size(charged)}, {cost.copies} times the size: every copy counts")
    priced = f"{cost.priced_as}," if cost.priced_as else "that space"
    typer.echo(f"price    {show_coins(cost.price_ujkl)} for {priced} for {days} days")
    typer.echo(f"again    every {days} days, as long as the objects are to be kept")
    typer.echo(f"fees     {show_coins(cost.fees_ujkl)} for the posts, at most")
    typer.echo(f"free     {show_size(free)} of the space that was bought")
    if charged > free:
        needed = charged + (plan.used_bytes if plan else 0)
        # A purchase sets the whole plan; see `buy`.
        typer.echo(
            f"missing  {show_size(charged - free)}: caf jackal buy --bytes "
            f"{max(needed, LEAST_BYTES)} --days {days}"
        )


def _not_yet_archived(settings: Settings, ledger: Ledger, source: str) -> tuple[int, int]:
    """Return the bytes and chunks that are still to be posted: those planned, else by the latest
    whole inventory.
    """
    registered = source in ledger.lookup.sources()
    waiting = ledger.chunks.list(source, NOT_POSTED) if registered else ()
    if waiting:
        return sum(chunk.stored_size_bytes or chunk.expected_size_bytes for chunk in waiting), len(
            waiting
        )
    with opened_run_context(settings, ledger, source) as context:
        snapshot = latest_whole_snapshot(
            context, hint=f"caf run {source} takes one; or give a size"
        )
    left = max(0, snapshot.object_bytes - ledger.chunks.account(source).located_bytes)
    return left, -(-left // _usual_chunk_bytes(settings, source))


def _usual_chunk_bytes(settings: Settings, source: str | None = None) -> int:
    if source is not None and source in settings.sources:
        return int(settings.sources[source].target_size)
    return int(SourceSettings.model_fields["target_size"].default)


def buy(
    size: Annotated[
        str,
        typer.Option("--bytes", metavar="SIZE", help="The space that the wallet then has: 1TB."),
    ],
    days: DaysOption,
    yes: Annotated[bool, typer.Option("--yes", help="Pay without asking.")] = False,
) -> None:
    r"""Buy space, once its price was shown and confirmed.

    SIZE is the whole space that the wallet has afterwards, from now for N days, not one that is
    added: what is left of an earlier purchase is taken off the price by the chain. Every copy of a
    chunk takes space. A purchase that was interrupted is seen through first, and nothing is bought
    twice.

    \b
    Examples:
      caf jackal buy --bytes 1TB --days 365
      caf jackal buy --bytes 1000000000 --days 30 --yes

    Exit status: 0 bought, or an earlier purchase has just been found to be; 1 not confirmed; 2 too
    little, or too short; 3 a setting or the wallet is wrong, or the chain may not verify proofs of
    the type that is set; 6 the database failed; 7 the chain failed, the wallet cannot pay, or the
    spend cap is reached; 10 a run is signing at this moment.
    """
    size_bytes = parse_size(size, decimal=True)
    if size_bytes < LEAST_BYTES:
        raise UsageError(
            f"{size_bytes:,} bytes are too few.",
            hint=f"The chain sells no less than {LEAST_BYTES:,}.",
        )
    with opened_network(load_settings()) as network:
        chain, address = network.store.chain, network.store.wallet.address
        chain.require_verified(network.store.proof_type)
        plan, now = chain.confirmed_plan(address)
        if plan is not None and size_bytes < plan.used_bytes:
            raise UsageError(
                f"{size_bytes:,} bytes are fewer than the {plan.used_bytes:,} that are used.",
                hint="SIZE is the whole space afterwards, not what is added to it.",
            )
        typer.echo(f"now      {_plan_line(plan, now)}", err=True)
        ends_at = now + timedelta(days=days)
        typer.echo(
            f"then     {show_size(size_bytes)}, until {ends_at:%Y-%m-%d %H:%M} UTC", err=True
        )
        if plan is not None and ends_at < plan.ends_at:
            note(
                f"the space would end earlier than it does now: on {ends_at:%Y-%m-%d}, not on "
                f"{plan.ends_at:%Y-%m-%d}"
            )
        typer.echo(
            "price    "
            f"{show_coins(chain.price(days, size_bytes))}{', less what is left of the plan' if plan else ''}",  # noqa: E501
            err=True,
        )
        typer.echo(f"balance  {show_coins(chain.balance(address))}", err=True)
        if any(each.purpose == "buy" for each in network.log.pending(network.account)):
            note(
                "an earlier purchase is pending; where it turns out to be included, nothing more "
                "is bought"
            )
        confirm("Buy it?", yes=yes, otherwise="nothing was bought")
        purchase = network.store.poster.buy(size_bytes, days, network.log)
        which = (
            "an earlier purchase was pending and is included, nothing more was bought:"
            if purchase.earlier
            else "bought"
        )
        cost = f"{'' if purchase.cost_told else 'at most '}{show_coins(purchase.cost)}"
        typer.echo(f"{which} for {cost} at height {purchase.height}, transaction {purchase.hash}")
        plan, now = chain.confirmed_plan(address)
        space = None if plan is None else (plan.space_bytes, plan.used_bytes, plan.ends_at)
        network.ledger.storage_plans.record(
            network.account, read_at=now, balance=chain.balance(address), plan=space, bought=True
        )
        typer.echo(f"the wallet has {_plan_line(plan, now)}")


# --- what the chain lists
# ------------------------------------------------------------------------------------------


def files(
    source: SourcesArgument = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Show the files that are as they should be, too.")
    ] = False,
    json: JsonOption = False,
) -> None:
    r"""Compare the files that the chain lists with the ledger.

    Of these archives: what this wallet posted, and other wallets that the ledger's chunks were
    posted by. missing: the ledger has it on the chain, and the chain does not list it. foreign:
    listed, and no chunk of the ledger, e.g. of an abandoned one.
    short: fewer copies than required. expiring: ends within jackal.warn_days. --json names every
    file, and the URLs at which its providers serve it.

    \b
    Examples:
      caf jackal files
      caf jackal files demo --json | jq 'select(.missing)'

    Exit status: 0, also where files are foreign, short or expiring; 3 a setting or the wallet is
    wrong, or there is no such source; 6 the database failed; 7 a chunk is missing, or the chain
    failed.
    """
    settings = load_settings()
    if source is not None:
        settings.source(source)
    missing = 0
    with opened_ledger(settings) as ledger:
        for name in [source] if source else sorted(settings.sources):
            found, urls = _compared(settings, ledger, name, with_urls=json)
            missing += len(found.missing)
            if json:
                _print_files_json(name, found, urls)
            else:
                _print_files(name, found, everything)
    if missing:
        raise StoredChunkMissing(
            f"{counted(missing, 'chunk')} of the ledger {'is' if missing == 1 else 'are'} not on "
            "the chain",
            hint="caf prove SOURCE marks them as damaged, caf repair SOURCE stores them again",
        )


def _compared(
    settings: Settings, ledger: Ledger, source: str, *, with_urls: bool
) -> tuple[ChainDiff, Mapping[str, str]]:
    """Return what the chain lists beside what the ledger has, and the URLs of the providers, where
    they are asked for.
    """
    with opened_run_context(settings, ledger, source) as context:
        store = jackal_of(context)
        ahead = timedelta(days=settings.jackal.warn_days)
        blocks = ahead.total_seconds() / store.chain.block_seconds()
        plan = store.chain.plan(store.wallet.address)
        urls = (
            {one.address: one.url.rstrip("/") for one in store.chain.providers()}
            if with_urls
            else {}
        )
        chunks = ledger.chunks.list(source)
        owners = {
            store.wallet.address,
            *(chunk.owner for chunk in chunks if chunk.owner),
        }  # also wallets used before
        found = compare(
            [*store.listed(context.archive_id, owners), *_adopted(store, chunks)],
            chunks,
            owner=store.wallet.address,
            required_copies=store.required_copies,
            expiring_at=store.chain.height() + int(blocks),
            plan_ends=plan is None or plan.ends_at <= store.chain.now() + ahead,
        )
        return found, urls


def _adopted(store: JackalStore, chunks: Sequence[Chunk]) -> Iterator[ChainFile]:
    """Yield the files of adopted chunks, which do not name the archive, as far as the chain has
    them.
    """
    for chunk in chunks:
        if chunk.adopted and chunk.merkle_root and chunk.owner and chunk.start is not None:
            file = store.chain.file(chunk.merkle_root, chunk.owner, chunk.start)
            if file is not None:
                yield file


def _print_files_json(source: str, found: ChainDiff, urls: Mapping[str, str]) -> None:
    for chunk, file in (*found.listed, *((chunk, None) for chunk in found.missing)):
        print_json(
            {
                "source": source,
                "chunk": chunk.name,
                "state": str(chunk.state),
                "merkle_root": chunk.merkle_root.hex() if chunk.merkle_root else None,
                "start": chunk.start,
                "size_bytes": chunk.stored_size_bytes,
                "missing": file is None,
                "foreign": False,
                "short": chunk.name in found.short,
                "expiring": chunk.name in found.expiring,
                **_file_json(file, urls),
            }
        )
    for file in found.foreign:
        print_json(
            {
                "source": source,
                "chunk": None,
                "state": None,
                "merkle_root": file.merkle_root.hex(),
                "start": file.start,
                "size_bytes": file.size_bytes,
                "missing": False,
                "foreign": True,
                "short": False,
                "expiring": False,
                **_file_json(file, urls),
            }
        )


def _file_json(file: ChainFile | None, urls: Mapping[str, str]) -> dict[str, object]:
    providers = sorted(set(file.providers)) if file else []
    root = file.merkle_root.hex() if file else ""
    return {
        "providers": providers,
        "downloads": [f"{urls[one]}/download/{root}" for one in providers if one in urls],
        "expires": (file.expires or None) if file else None,
    }


def _print_files(source: str, found: ChainDiff, everything: bool) -> None:
    console = Console(soft_wrap=True, markup=False, highlight=False)
    console.print(
        f"{source}: {counted(len(found.listed), 'chunk')} on the chain, {len(found.missing):,} "
        "missing, "
        f"{len(found.foreign):,} foreign, {len(found.short):,} short, {len(found.expiring):,} "
        "expiring"
    )
    rows = list(_rows(found, everything))
    if not rows:
        return
    table = Table("", "chunk", "Merkle root", box=None, pad_edge=False)
    for column in ("start", "copies", "size"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _rows(found: ChainDiff, everything: bool) -> Iterator[Sequence[str]]:
    for chunk in found.missing:
        yield _row("missing", chunk, None)
    for file in found.foreign:
        root, copies = f"{file.merkle_root.hex()[:16]}…", str(len(set(file.providers)))
        yield "foreign", "", root, str(file.start), copies, show_size(file.size_bytes)
    noted = dict.fromkeys(found.expiring, "expiring") | dict.fromkeys(found.short, "short")
    for chunk, listed in found.listed:
        if everything or chunk.name in noted:
            yield _row(noted.get(chunk.name, ""), chunk, listed)


def _row(what: str, chunk: Chunk, file: ChainFile | None) -> Sequence[str]:
    root = f"{chunk.merkle_root.hex()[:16]}…" if chunk.merkle_root else ""
    return (
        what,
        chunk.name,
        root,
        str(chunk.start),
        str(len(set(file.providers)) if file else 0),
        show_size(chunk.stored_size_bytes),
    )
