"""`caf adopt`: CAF files of other programs that are on the chain already, taken over without
uploading them again.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from caf_pipeline.cli.opened_ledger import opened_ledger
from caf_pipeline.cli.run_opening import opened_run_context
from caf_pipeline.cli.terminal import (
    JsonOption,
    SourceArgument,
    a_path,
    counted,
    note,
    print_json,
    printable,
    progress,
)
from caf_pipeline.errors import CafError, UsageError
from caf_pipeline.maintenance import adopt as steps
from caf_pipeline.maintenance.adopt import AdoptionOptions, FileAdoption
from caf_pipeline.run_context import RunContext
from caf_pipeline.settings import load_settings
from caf_pipeline.source.protocol import UnaskedObjects


def adopt(  # noqa: PLR0917 - the command line's options
    source: SourceArgument,
    files: Annotated[
        list[Path] | None,
        typer.Argument(parser=a_path, metavar="[FILE...]", help="CAF files of this machine."),
    ] = None,
    from_chain: Annotated[
        bool,
        typer.Option(
            "--from-chain",
            help="Take what the chain lists of the wallet, and bring it here to be read.",
        ),
    ] = False,
    strip: Annotated[
        int,
        typer.Option(
            "--strip",
            metavar="N",
            min=0,
            help="Leave out the first N parts of members' keys: 1 for jackal-js-worker.",
        ),
    ] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tell what would be adopted; load nothing.")
    ] = False,
    lenient: Annotated[
        bool,
        typer.Option(
            "--lenient",
            help="Also read an index with equal keys (the last counts) or text that is not UTF-8.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    r"""Take over CAF files that other programs posted.

    Those of gocaf and jackal-js-worker are known; nothing is uploaded again. Each file is read as a
    whole here. It counts where the chain has a file of the wallet, or of one that posted the
    ledger's chunks, with exactly its Merkle root and size, and as many copies as required give
    pieces of it back. A member becomes the location of an object of the newest whole inventory
    where key and size are equal and the ETag is the MD5 of its bytes. All others are left out,
    counted by reason and, with --json, listed; they are archived by the next run like any object.
    --strip leaves out the first parts of members' keys, which jackal-js-worker begins with the
    task's id.

    The file then is a chunk of the ledger, which caf get, restore, check, prove and repair know
    like any other. Of its objects no headers and no user metadata are known: caf safe-to-delete
    never lists them. Adopting a file twice changes nothing.

    \b
    Examples:
      caf plan demo
      caf adopt demo batch_1760000000000.caf --strip 1 --dry-run
      caf adopt demo --from-chain --strip 1 --json

    Exit status: 0 each file is adopted, or known, or has no object that is not archived; 1 some
    files were refused; 2 wrong arguments; 3 a setting or the wallet is wrong, or there is no such
    source; 4 the one FILE is missing or no CAF file; 6 the database failed; 7 the one file is not
    on the chain or lacks copies, or the chain failed; 8 the staging folder failed; 9 the one file's
    bytes are nowhere, or the inventory is damaged; 10 another run plans; 11 there is no whole
    inventory.
    """
    if bool(files) == from_chain:
        raise UsageError(
            "caf adopt takes files, or --from-chain.",
            hint="Name CAF files, or give --from-chain and no file.",
        )
    settings = load_settings()
    settings.source(source)
    kinds: Counter[steps.AdoptionKind] = Counter()
    rows, left_out = 0, Counter[str]()
    errors = list[CafError]()

    def tell(member: str, reason: str) -> None:
        if json:
            print_json({"source": source, "member": member, "left_out": reason})

    objects = UnaskedObjects("files are adopted by an inventory that was taken")
    with (
        opened_ledger(settings) as ledger,
        opened_run_context(settings, ledger, source, objects, register=not dry_run) as context,
        progress("reading", None) as advance,
    ):
        for one in _adoptions(
            context, files or (), steps.AdoptionOptions(strip, dry_run, tell, advance, lenient)
        ):
            kinds[one.kind] += 1
            rows += one.rows
            left_out.update(one.left_out)
            if one.error:
                errors.append(one.error)
            _print(source, one, dry_run=dry_run, json=json)
    _print_sums(source, kinds, rows, left_out, dry_run=dry_run, json=json)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise CafError(
            f"{counted(len(errors), 'file')} could not be adopted; the reasons are above",
            hint=errors[0].hint,
        )


def _adoptions(
    context: RunContext, files: list[Path] | tuple[()], terms: AdoptionOptions
) -> Iterator[FileAdoption]:
    return (
        steps.adopt_files(context, files, terms)
        if files
        else steps.adopt_from_chain(context, terms)
    )


def _print(source: str, one: FileAdoption, *, dry_run: bool, json: bool) -> None:
    if json:
        print_json(_described(source, one, dry_run))
    elif one.error:
        note(f"{one.name}: refused: {one.error}")
    else:
        typer.echo(printable(f"{one.name}: {_said(one, dry_run)}"))


def _described(source: str, one: FileAdoption, dry_run: bool) -> dict[str, Any]:
    posting = one.file.posting if one.file else None
    return {
        "source": source,
        "file": one.name,
        "kind": str(one.kind),
        "chunk": one.chunk or None,
        "merkle_root": posting.merkle_root.hex() if posting else None,
        "owner": posting.owner if posting else None,
        "start": posting.start if posting else None,
        "size_bytes": posting.stored_size_bytes if posting else None,
        "copies": list(one.copies),
        "members": one.members,
        "would_adopt" if dry_run else "adopted": one.rows,
        "left_out": {str(reason): count for reason, count in one.left_out.items()},
        "why": str(one.error) if one.error else None,
    }


def _said(one: FileAdoption, dry_run: bool) -> str:
    left_out = ", ".join(
        f"{count:,} {reason.replace('_', ' ')}" for reason, count in one.left_out.items()
    )
    rest = f"; left out: {left_out}" if left_out else ""
    if one.kind == "adopted":
        done = "would be adopted" if dry_run else "adopted"
        return (
            f"{done} as {one.chunk}: {counted(one.rows, 'object')} of "
            f"{counted(one.members, 'member')}{rest}"
        )
    return {
        "known": f"known already, as {one.chunk}",
        "nothing_new": "nothing to adopt: what it has of the source is archived, or under "
        f"way{rest}",
        "no_object": f"nothing to adopt: no member is an object of the newest inventory{rest}",
        "not_caf": "no CAF file",
        "ours": "a chunk of this software: 'caf rebuild' restores it, with its headers and user "
        f"metadata{rest}",
    }[one.kind]


def _print_sums(
    source: str,
    kinds: Counter[Any],
    rows: int,
    left_out: Counter[str],
    *,
    dry_run: bool,
    json: bool,
) -> None:
    if json:
        print_json(
            {
                "source": source,
                "files": {str(kind): count for kind, count in sorted(kinds.items())},
                "would_adopt" if dry_run else "adopted": rows,
                "left_out": {str(reason): count for reason, count in sorted(left_out.items())},
            }
        )
        return
    said = (
        ", ".join(f"{count:,} {kind.replace('_', ' ')}" for kind, count in sorted(kinds.items()))
        or "nothing is listed"
    )
    typer.echo(
        f"{source}: {said}; {counted(rows, 'object')} {'would be ' if dry_run else ''}adopted"
    )
