"""`caf jackal`: the wallet, prices, purchases, and the files on the chain."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Final

import typer

from caf_pipeline.chunk_state import NOT_POSTED, ChunkState, has_reached
from caf_pipeline.cli.opening import RUN, known_sources, opened_ledger, opened_run_context
from caf_pipeline.cli.terminal import (
    JsonOption,
    SourcesArgument,
    YesOption,
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
from caf_pipeline.records import Chunk, TransactionLog
from caf_pipeline.settings import Settings, SourceSettings, load_settings
from caf_pipeline.steps.inventories import latest_whole_snapshot
from caf_pipeline.store.jackal import LEAST_BYTES, LEAST_DAYS
from caf_pipeline.store.jackal.answers import ChainFile, StoragePlan
from caf_pipeline.store.jackal.chain_diff import ChainDiff, compare
from caf_pipeline.store.jackal.storage_forecast import plan_of, space_warning, warn_period
from caf_pipeline.store.jackal.wallet import mnemonic_sources
from caf_pipeline.store.jackal.write import JackalStore
from caf_pipeline.system.processes import this_process
from caf_pipeline.system.quantities import table_lines
from caf_pipeline.throttle import open_throttle
from caf_pipeline.waits import Announcer, Waits
from caf_pipeline.wiring import jackal_of, open_jackal, read_space

MOST_DAYS: Final = 36_500

DaysOption = Annotated[
    int, typer.Option("--days", metavar="N", min=LEAST_DAYS, max=MOST_DAYS, help="Days of storage.")
]


# --- the wallet and its space


@dataclass(frozen=True, slots=True)
class Network:
    """`account` is the wallet's name in the ledger."""

    ledger: Ledger
    store: JackalStore
    log: TransactionLog
    account: str


@contextmanager
def opened_network(settings: Settings) -> Iterator[Network]:
    """Yield the open ledger and Jackal."""
    holder = this_process(RUN)
    with (
        opened_ledger(settings) as ledger,
        closing(open_jackal(settings, ledger, holder, Waits(Announcer(note)))) as store,
    ):
        account = f"{settings.jackal.chain_id}/{store.wallet.address}"
        yield Network(ledger, store, ledger.transactions(holder), account)


def wallet(context: typer.Context, json: JsonOption = False) -> None:
    r"""Show the wallet's coins, space and spending.

    Spending is the sum of this ledger's transactions; other programs may use the wallet, too. A
    purchase counts with the amount charged, or with the list price, which is the maximum, if no
    node reported it.

    \b
    Example:
      caf jackal wallet --json | jq .plan.free_bytes

    \b
    Exit status: 6, 7
      0  The wallet is shown, even without space.
      3  Wrong settings or wallet.
    """
    if context.invoked_subcommand:
        return
    settings = load_settings()
    with opened_network(settings) as network:
        address = network.store.wallet.address
        reading = read_space(network.ledger, network.store)
        spent = network.log.spent(network.account)
        at_list_price = network.log.at_list_price(network.account)
        throttle = open_throttle(settings.jackal, network.ledger.controls.current)
        cap, rate, paused = throttle.spend_cap(), throttle.limit() or None, throttle.paused()
        chunks = network.ledger.chunks.list()
    types = Counter(
        chunk.proof_type for chunk in chunks if has_reached(chunk.state, ChunkState.POSTED)
    )
    plan, balance, now = plan_of(reading), reading.balance, reading.read_at
    warning = space_warning(reading, now, settings.jackal.warn_days)
    words = settings.jackal.mnemonic
    words_from, *not_used = mnemonic_sources(
        words.get_secret_value() if words else None, settings.jackal.mnemonic_file
    )
    if json:
        print_json(
            address=address,
            chain_id=settings.jackal.chain_id,
            words_from=words_from,
            words_not_used=not_used,
            proof_type=settings.jackal.proof_type,
            posted_by_proof_type=dict(sorted(types.items())),
            balance_ujkl=balance,
            plan=None
            if plan is None
            else {
                "space_bytes": plan.space_bytes,
                "used_bytes": plan.used_bytes,
                "free_bytes": plan.free_bytes,
                "ends_at": plan.ends_at,
            },
            latest_end=reading.latest_end,
            warning=warning or None,
            spent_ujkl=spent,
            purchases_at_list_price=at_list_price,
            spend_cap_ujkl=cap,
            bandwidth=rate,
            paused=paused or None,
        )
        return
    typer.echo(f"address    {address} on {settings.jackal.chain_id}")
    unused = f"; not used: {printable(', '.join(not_used))}" if not_used else ""
    typer.echo(f"words      from {printable(words_from)}{unused}")
    typer.echo(f"balance    {show_coins(balance)}")
    typer.echo(f"space      {_plan_line(plan, now)}")
    if reading.latest_end:
        typer.echo(
            f"latest end {reading.latest_end:%Y-%m-%d %H:%M} UTC, of all ends that were read "
            "since the last purchase"
        )
    if warning:
        typer.echo(f"warning    {warning}")
    typer.echo(
        f"spent      {show_coins(spent)} by this ledger's transactions; cap: "
        f"{'none' if cap is None else show_coins(cap)}"
    )
    if at_list_price:
        purchases = counted(at_list_price, "purchase")
        typer.echo(f"           at most: {purchases} at list price, as no node reported the cost")
    proofs = f"type {settings.jackal.proof_type}"
    if others := types.total() - types[settings.jackal.proof_type]:
        keep = "keeps its type" if others == 1 else "keep their type"
        proofs += f" for new chunks; {counted(others, 'chunk')} posted with another type {keep}"
    typer.echo(f"proofs     {proofs}")
    limit = "no limit" if rate is None else f"{show_size(rate)} a second for all uploads together"
    typer.echo(f"bandwidth  {limit}")
    if paused:
        typer.echo(f"paused     {paused}")


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


def price(
    what: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE|SIZE", help="A source, for what is not archived yet, or a size: 1TB."
        ),
    ],
    days: DaysOption = LEAST_DAYS,
    json: JsonOption = False,
) -> None:
    r"""Show what storing a source or a size would cost.

    Shows the space, its price, the fees, and the wallet's free space. Every copy counts
    (jackal.copies). A source's size is the expected size of its planned chunks, or else the part of
    the latest inventory that no chunk has.

    \b
    Examples:
      caf jackal price demo
      caf jackal price 10TB --days 365

    \b
    Exit status: 0, 6, 7
      2   The argument is not a size.
      3   Wrong settings, wallet or source.
      11  The source has no inventory yet.
    """
    settings = load_settings()
    with opened_ledger(settings) as ledger:
        sources = known_sources(settings, ledger.lookup)
    if what not in sources and ("-" in what or not what[:1].isdigit()):
        raise settings.unknown_source(what, sources)
    with opened_network(settings) as network:
        if what in sources:
            size_bytes, chunks = _not_yet_archived(settings, network.ledger, what)
        else:
            size_bytes = parse_size(what, decimal=True)
            chunks = -(-size_bytes // _usual_chunk_bytes(settings))
        cost = network.store.cost(size_bytes, chunks, days)
        reading = read_space(network.ledger, network.store)
        plan = plan_of(reading)
        free = plan.free_bytes if plan and plan.ends_at > reading.read_at else 0
    charged = cost.charged_bytes
    if json:
        print_json(
            size_bytes=size_bytes,
            chunks=chunks,
            copies=cost.copies,
            charged_bytes=charged,
            days=days,
            price_ujkl=cost.price_ujkl,
            price_usd=cost.list_usd,
            fees_ujkl=cost.fees_ujkl,
            free_bytes=free,
            missing_bytes=max(0, charged - free),
        )
        return
    typer.echo(f"size     {show_size(size_bytes)} in about {counted(chunks, 'chunk')}")
    typer.echo(f"space    {show_size(charged)}, {cost.copies} times the size: every copy counts")
    typer.echo(f"price    {cost.price_sentence}")
    typer.echo(f"again    every {days} days, as long as you keep the objects")
    typer.echo(f"fees     {show_coins(cost.fees_ujkl)} for the posts, at most")
    typer.echo(f"free     {show_size(free)} of the bought space")
    if charged > free:
        needed = charged + (plan.used_bytes if plan else 0)
        # A purchase sets the total space; see `buy`.
        typer.echo(
            f"missing  {show_size(charged - free)}: caf jackal buy --bytes "
            f"{max(needed, LEAST_BYTES)} --days {days}"
        )


def _not_yet_archived(settings: Settings, ledger: Ledger, source: str) -> tuple[int, int]:
    registered = source in ledger.lookup.sources()
    if registered and (waiting := ledger.chunks.list(source, NOT_POSTED)):
        sizes = [chunk.stored_size_bytes or chunk.expected_size_bytes for chunk in waiting]
        return sum(sizes), len(sizes)
    with opened_run_context(settings, ledger, source) as context:
        snapshot = latest_whole_snapshot(
            context, hint=f"caf run {source} takes one; or give a size"
        )
    remaining = max(0, snapshot.object_bytes - ledger.chunks.account(source).located_bytes)
    return remaining, -(-remaining // _usual_chunk_bytes(settings, source))


def _usual_chunk_bytes(settings: Settings, source: str | None = None) -> int:
    if source is not None and source in settings.sources:
        return int(settings.sources[source].target_size)
    return int(SourceSettings.model_fields["target_size"].default)


def buy(
    size: Annotated[
        str,
        typer.Option("--bytes", metavar="SIZE", help="Total space of the wallet afterwards: 1TB."),
    ],
    days: DaysOption,
    yes: YesOption = False,
) -> None:
    r"""Buy space, once its price was shown and confirmed.

    SIZE is the total space afterwards, for N days from now. It is not added to earlier space: the
    chain deducts the remaining plan's value from the price. Every copy of a chunk takes space. An
    interrupted purchase is settled first, so nothing is bought twice.

    \b
    Example:
      caf jackal buy --bytes 1TB --days 365

    \b
    Exit status: 6
      0   The space is bought.
      1   You did not confirm.
      2   The size or the time is too small.
      3   Wrong settings or wallet, or the chain may not verify this proof type.
      7   The chain failed, the wallet cannot pay, or the spend cap is reached.
      10  A run is signing a transaction.
    """
    size_bytes = parse_size(size, decimal=True)
    if size_bytes < LEAST_BYTES:
        raise UsageError(
            f"{show_size(size_bytes)} is too little.",
            hint=f"The chain sells at least {show_size(LEAST_BYTES)}.",
        )
    with opened_network(load_settings()) as network:
        chain, address = network.store.chain, network.store.wallet.address
        chain.require_verified(network.store.proof_type)
        plan, now = chain.confirmed_plan(address)
        if plan is not None and size_bytes < plan.used_bytes:
            raise UsageError(
                f"{show_size(size_bytes)} is less than the {show_size(plan.used_bytes)} in use.",
                hint="SIZE is the total space afterwards.",
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
        deduction = ", less the remaining value of the plan" if plan else ""
        price = show_coins(chain.price(days, size_bytes))
        typer.echo(f"price    {price}{deduction}", err=True)
        typer.echo(f"balance  {show_coins(chain.balance(address))}", err=True)
        if any(pending.purpose == "buy" for pending in network.log.pending(network.account)):
            note("an earlier purchase is pending; if it is included, nothing more is bought")
        confirm("Buy it?", yes=yes, otherwise="nothing was bought")
        purchase = network.store.poster.buy(size_bytes, days, network.log)
        which = (
            "an earlier purchase was pending and is included, nothing more was bought:"
            if purchase.earlier
            else "bought"
        )
        cost = f"{'' if purchase.cost_told else 'at most '}{show_coins(purchase.cost)}"
        typer.echo(f"{which} for {cost} at height {purchase.height}, transaction {purchase.hash}")
        reading = read_space(network.ledger, network.store, bought=True)
        typer.echo(f"the wallet has {_plan_line(plan_of(reading), reading.read_at)}")


# --- what the chain lists


def files(
    source: SourcesArgument = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Show also the files without problems.")
    ] = False,
    json: JsonOption = False,
) -> None:
    r"""Compare the files that the chain lists with the ledger.

    Covers this archive's files that this wallet posted, or that other wallets posted for the
    ledger's chunks. `missing`: the chain does not list a chunk of the ledger. `foreign`: no chunk
    of the ledger. `short`: too few copies. `expiring`: ends soon, by jackal.warn_days. --json shows
    every file, and the URLs of its providers.

    \b
    Example:
      caf jackal files demo --json | jq 'select(.missing)'

    \b
    Exit status: 6
      0  No file is missing.
      3  Wrong settings, wallet or source.
      7  A chunk is missing, or the chain failed.
    """
    settings = load_settings()
    if source is not None:
        settings.source(source)
    missing = 0
    with opened_ledger(settings) as ledger:
        for name in [source] if source else sorted(settings.sources):
            diff, urls = _compared(settings, ledger, name, with_urls=json)
            missing += len(diff.missing)
            if json:
                _print_files_json(name, diff, urls)
            else:
                _print_files(name, diff, everything)
    if missing:
        raise StoredChunkMissing(
            f"{counted(missing, 'chunk')} of the ledger {'is' if missing == 1 else 'are'} not on "
            "the chain",
            hint="caf prove SOURCE marks them as damaged, caf repair SOURCE stores them again",
        )


def _compared(
    settings: Settings, ledger: Ledger, source: str, *, with_urls: bool
) -> tuple[ChainDiff, Mapping[str, str]]:
    with opened_run_context(settings, ledger, source) as context:
        store = jackal_of(context)
        warn_days = settings.jackal.warn_days
        blocks = timedelta(days=warn_days).total_seconds() / store.chain.block_seconds()
        plan = store.chain.plan(store.wallet.address)
        urls = {}
        if with_urls:
            urls = {
                provider.address: provider.url.rstrip("/") for provider in store.chain.providers()
            }
        chunks = ledger.chunks.list(source)
        # Chunks may be posted by wallets that were used before.
        owners = {store.wallet.address, *(chunk.owner for chunk in chunks if chunk.owner)}
        listed = [
            file
            for archive_id in ledger.sources.archive_ids(source)
            for file in store.listed(archive_id, owners)
        ]
        for chunk in chunks:  # the notes of adopted files do not name the archive
            if chunk.adopted and chunk.merkle_root and chunk.owner and chunk.start is not None:
                file = store.chain.file(chunk.merkle_root, chunk.owner, chunk.start)
                if file is not None:
                    listed.append(file)
        diff = compare(
            listed,
            chunks,
            owner=store.wallet.address,
            required_copies=store.required_copies,
            expiring_at=store.chain.height() + int(blocks),
            plan_ends=plan is None
            or plan.ends_at <= store.chain.now() + warn_period(plan, warn_days),
        )
        return diff, urls


def _print_files_json(source: str, diff: ChainDiff, urls: Mapping[str, str]) -> None:
    files: list[tuple[Chunk | ChainFile, ChainFile | None]] = [
        *diff.listed,
        *((chunk, None) for chunk in diff.missing),
        *((file, file) for file in diff.foreign),
    ]
    for subject, file in files:
        chunk = subject if isinstance(subject, Chunk) else None
        root = subject.merkle_root.hex() if subject.merkle_root else ""
        providers = sorted(set(file.providers)) if file else []
        print_json(
            source=source,
            chunk=chunk.name if chunk else None,
            state=chunk.state if chunk else None,
            merkle_root=root or None,
            start=subject.start,
            size_bytes=_size_bytes(subject),
            missing=file is None,
            foreign=chunk is None,
            short=chunk is not None and chunk.name in diff.short,
            expiring=chunk is not None and chunk.name in diff.expiring,
            providers=providers,
            downloads=[
                f"{urls[provider]}/download/{root}" for provider in providers if provider in urls
            ],
            expires=(file.expires or None) if file else None,
        )


def _print_files(source: str, diff: ChainDiff, everything: bool) -> None:
    typer.echo(
        f"{source}: {counted(len(diff.listed), 'chunk')} on the chain, {len(diff.missing):,} "
        f"missing, {len(diff.foreign):,} foreign, {len(diff.short):,} short, "
        f"{len(diff.expiring):,} expiring"
    )
    problems = dict.fromkeys(diff.expiring, "expiring") | dict.fromkeys(diff.short, "short")
    rows = [
        *(_row("missing", chunk, None) for chunk in diff.missing),
        *(_row("foreign", file, file) for file in diff.foreign),
        *(
            _row(problems.get(chunk.name, ""), chunk, listed)
            for chunk, listed in diff.listed
            if everything or chunk.name in problems
        ),
    ]
    names = ("", "chunk", "Merkle root", "start", "copies", "size")
    for line in table_lines(names, rows, right=names[3:]) if rows else ():
        typer.echo(line)


def _row(
    problem: str, subject: Chunk | ChainFile, file: ChainFile | None
) -> tuple[str, str, str, str, str, str]:
    return (
        problem,
        subject.name if isinstance(subject, Chunk) else "",
        f"{subject.merkle_root.hex()[:16]}…" if subject.merkle_root else "",
        str(subject.start),
        str(len(set(file.providers)) if file else 0),
        show_size(_size_bytes(subject)),
    )


def _size_bytes(subject: Chunk | ChainFile) -> int:
    return subject.stored_size_bytes if isinstance(subject, Chunk) else subject.size_bytes
