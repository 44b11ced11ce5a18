"""`caf check`."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Final

import typer

from caf_pipeline.chunk_state import ChunkState
from caf_pipeline.cli.listing import CurrentOption, PrefixArgument, nothing_listed, status_filter
from caf_pipeline.cli.opening import opened_ledger, opened_lookup, opened_reader, opened_run_context
from caf_pipeline.cli.terminal import (
    JsonOption,
    SourceArgument,
    counted,
    exclusive,
    note,
    object_progress,
    print_json,
    printable,
    show_size,
)
from caf_pipeline.errors import (
    CafError,
    HeldByOther,
    IdentityMissing,
    IntegrityError,
    NotProven,
    RowAltered,
    StoreUnreachable,
    UsageError,
)
from caf_pipeline.ledger.records import Location
from caf_pipeline.records import Sample
from caf_pipeline.retrieval.check import CheckedObject, Openable, check_objects, sampled
from caf_pipeline.retrieval.holders import ROW
from caf_pipeline.retrieval.listing import list_objects
from caf_pipeline.retrieval.side_by_side import take_all
from caf_pipeline.settings import Settings, load_settings

DEFAULT_SHARE: Final = "1%"

_SHARE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)%")


@dataclass
class _Sums:
    listed: int = 0
    objects: int = 0
    size_bytes: int = 0
    wrong: int = 0
    altered: int = 0  # rows of the ledger; their chunks are not to blame
    unread: int = 0
    closed: int = 0
    unread_chunks: int = 0
    error: CafError | None = None  # of the first object that could not be read
    providers: dict[str, int] = field(default_factory=dict)
    """Objects that each provider returned wrong or not at all."""
    suspects: dict[str, Sample] = field(default_factory=dict)
    """A wrong object of each chunk, for `prove_chunk`."""


def check(  # noqa: PLR0917 - the command line's options
    source: SourceArgument,
    prefix: PrefixArgument = "",
    sample: Annotated[
        str | None,
        typer.Option(
            "--sample",
            metavar="SHARE",
            help=f"Share of the objects to read: 0.1%, 5%.  [default: {DEFAULT_SHARE}]",
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Read every object.")] = False,
    current: CurrentOption = False,
    json: JsonOption = False,
) -> None:
    r"""Read archived objects back and compare their SHA-256.

    Reads a random sample, at least one, of the objects that `caf ls --recursive` lists, and keeps
    nothing.

    If the chunk's own manifest contradicts the ledger's row of an object, the row was altered. Such
    an object is "altered", and its chunk is not to blame.

    An object is right if any provider returns it right. The command counts, for each provider, the
    objects that another one had to supply. It then proves these objects' chunks as `caf prove`
    does, and marks damaged chunks for `caf repair`.

    A chunk that a rebuild restored is read whole, once, before its first object, and compared with
    its Merkle root. That needs the right to write to the ledger.

    An object in an encrypted chunk is read only if an identity opens the chunk. Others are counted
    as not opened.

    Prints a line for each wrong object, then the sums. --json prints {"key": …} for an object, then
    {"objects_checked": …}.

    \b
    Example:
      caf check demo packages/ --full --json | jq 'select(.error)'

    \b
    Exit status: 6
      0   All objects read are right.
      2   SHARE is not a share.
      3   Wrong settings or source, or no identity opens some object's chunk.
      7   Some objects, or restored chunks, could not be read now; none is wrong.
      9   No provider returns some object right, or rows of the ledger were altered.
      11  No archived key begins with PREFIX.
    """
    exclusive(sample=sample is not None, full=full)
    share = 1.0
    if not full:
        text = DEFAULT_SHARE if sample is None else sample
        match = _SHARE.fullmatch(text.strip())
        share = float(match[1]) / 100 if match else 0.0
        if not 0 < share <= 1:
            raise UsageError(
                f"{text!r} is not a share of the objects.",
                hint="Give a percentage above 0: 0.1%, 5%, 100%.",
            )
    settings, sums = load_settings(), _Sums()

    def listed() -> Iterator[Location]:
        for location in list_objects(lookup, source, prefix, include=status_filter(current)):
            sums.listed += 1
            yield location

    def take(checked: CheckedObject) -> None:
        _take(sums, checked, json)
        advance(checked.location.size_bytes)

    with (
        opened_lookup(settings) as lookup,
        opened_reader(settings, lookup, source) as store,
        object_progress(f"checking {source}") as advance,
    ):
        openable = Openable(sampled(listed(), share), store)
        unread = _UnreadChunks(settings, source, set(lookup.unread_chunks(source)))
        ended = take_all(check_objects(unread.read_before(openable, take), store), take)
        if not sums.listed:
            raise nothing_listed(lookup, source, prefix, current)
        sums.closed, sums.unread_chunks = openable.closed_count, len(unread.not_compared)
        _print_sums(source, sums, json)
    damaged = bool(sums.wrong or sums.suspects) and _mark_damaged(settings, source, sums)
    if sums.wrong:
        if ended:
            note(str(ended))
        raise IntegrityError(
            f"no provider gives {counted(sums.wrong, 'object')} of '{source}' as archived",
            hint=f"'caf repair {source}' stores damaged chunks again"
            if damaged
            else "no chunk was found damaged: 'caf prove' and 'caf doctor' look again",
        )
    if sums.altered:
        raise RowAltered(
            f"{counted(sums.altered, 'row')} of '{source}' in the ledger differ from the chunks' "
            f"own manifests; {'some' if damaged else 'no'} chunk is damaged",
            hint=f"'caf repair {source}' stores damaged chunks again" if damaged else ROW,
        )
    if ended:
        raise ended
    if sums.error:
        raise type(sums.error)(
            f"{counted(sums.unread, 'object')} of '{source}' could not be read now",
            hint=sums.error.hint or "try again later",
        )
    if unread.not_compared:
        name, reason = min(unread.not_compared.items())
        raise NotProven(
            f"{counted(sums.unread_chunks, 'restored chunk')} of '{source}' could not be compared "
            f"with the Merkle root; {name}: {reason}",
            hint=f"'caf prove {source}' compares them, on a machine that may write to the ledger",
        )
    if sums.closed:
        raise IdentityMissing(
            f"{counted(sums.closed, 'object')} of '{source}' could not be compared: "
            f"{openable.reason}",
            hint="check them on a machine with the identity",
        )


class _UnreadChunks:
    """Chunks that a rebuild restored. `not_compared` has why a chunk could not be read whole."""

    def __init__(self, settings: Settings, source: str, names: set[str]) -> None:
        self.not_compared: dict[str, str] = {}
        self._wrong: dict[str, str] = {}
        self._names = names
        self._settings = settings
        self._source = source

    def read_before(
        self, locations: Iterable[Location], take: Callable[[CheckedObject], None]
    ) -> Iterator[Location]:
        """Yield locations; read an unread chunk whole before its first. `take` gets wrong ones."""
        for location in locations:
            chunks = {part.chunk for part in location.ranges}
            for name in sorted(chunks & self._names):
                self._names.remove(name)
                self._compare(name)
            if wrong := sorted(chunks & self._wrong.keys()):
                error = IntegrityError(f"chunk {wrong[0]} is damaged: {self._wrong[wrong[0]]}")
                take(CheckedObject(location, error))
            else:
                yield location

    def _compare(self, name: str) -> None:
        # Loaded here because few archives were rebuilt.
        from caf_pipeline.maintenance.scrub import prove_chunk  # noqa: PLC0415

        note(f"a rebuild restored chunk {name}: reading it whole once")
        settings, source = self._settings, self._source
        try:
            with (
                opened_ledger(settings) as ledger,
                opened_run_context(settings, ledger, source, register=False) as context,
            ):
                report = prove_chunk(context, name, whole=True)
        except CafError as error:
            self.not_compared[name] = str(error)
            return
        if report.chunk.unread:
            is_wrong = report.explanation and all(check.fault for check in report.checks)
            (self._wrong if is_wrong else self.not_compared)[name] = report.reason


def _mark_damaged(settings: Settings, source: str, sums: _Sums) -> bool:
    # Loaded here because most checks find nothing wrong.
    from caf_pipeline.maintenance.scrub import prove_chunk  # noqa: PLC0415

    with opened_ledger(settings) as ledger:
        if sums.suspects and source in settings.sources:
            with opened_run_context(settings, ledger, source) as context:
                for name, an_object in sums.suspects.items():
                    if ledger.chunks.get(name).state is not ChunkState.LOCATED:
                        continue
                    try:
                        report = prove_chunk(context, name, an_object=an_object)
                    except (HeldByOther, StoreUnreachable) as error:
                        note(f"{name} could not be proven: {error}")
                        continue
                    if not report.proven:
                        note(f"{name} is {report.verdict}: {report.reason}")
        return bool(ledger.chunks.list(source, [ChunkState.DAMAGED]))


def _take(sums: _Sums, checked: CheckedObject, json: bool) -> None:
    sums.objects += 1
    for provider in checked.failed:
        sums.providers[provider] = sums.providers.get(provider, 0) + 1
    is_altered = isinstance(checked.error, RowAltered)
    errors = [*checked.failed.values(), *([checked.error] if checked.error else [])]
    if any(error.permanent for error in errors):
        for part in checked.location.ranges:
            length = part.end_byte - part.start_byte
            if length:
                sums.suspects.setdefault(part.chunk, Sample(part.start_byte, length, part.sha256))
    error, key = checked.error, checked.location.row.key
    if error is None:
        sums.size_bytes += checked.location.size_bytes
        return
    if is_altered:
        sums.altered += 1
    elif error.permanent:
        sums.wrong += 1
    else:
        sums.unread += 1
        sums.error = sums.error or error
    result = "altered" if is_altered else "wrong" if error.permanent else "unread"
    if json:
        print_json(key=key, result=result, error=error)
    else:
        typer.echo(f"{result:6}  {printable(key)}: {printable(str(error))}")


def _print_sums(source: str, sums: _Sums, json: bool) -> None:
    if json:
        print_json(
            objects_checked=sums.objects,
            objects_listed=sums.listed,
            bytes_right=sums.size_bytes,
            wrong=sums.wrong,
            altered=sums.altered,
            unread=sums.unread,
            not_opened=sums.closed,
            unread_chunks=sums.unread_chunks,
            providers_passed_over=sums.providers,
        )
        return
    closed = f", {sums.closed:,} not opened" if sums.closed else ""
    typer.echo(
        f"{source}: {counted(sums.objects, 'object')} of {sums.listed:,} read, "
        f"{sums.wrong:,} wrong, {sums.unread:,} could not be read{closed} "
        f"({show_size(sums.size_bytes)} right)"
    )
    if sums.altered:
        typer.echo(f"{counted(sums.altered, 'object')} with an altered row in the ledger")
    for provider, objects in sorted(sums.providers.items()):
        typer.echo(
            f"another provider replaced {printable(provider)} for {counted(objects, 'object')}"
        )
