"""`caf adopt`."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from caf_pipeline.cli.opening import opened_ledger, opened_run_context
from caf_pipeline.cli.terminal import (
    DryRunOption,
    JsonOption,
    SourceArgument,
    counted,
    note,
    parse_path,
    print_json,
    printable,
    progress,
)
from caf_pipeline.errors import CafError, UsageError
from caf_pipeline.maintenance import adopt as steps
from caf_pipeline.maintenance.adopt import FileAdoption
from caf_pipeline.settings import load_settings
from caf_pipeline.source.protocol import UnavailableSource


def adopt(  # noqa: PLR0917 - the command line's options
    source: SourceArgument,
    files: Annotated[
        list[Path] | None,
        typer.Argument(parser=parse_path, metavar="[FILE...]", help="CAF files on this machine."),
    ] = None,
    from_chain: Annotated[
        bool,
        typer.Option(
            "--from-chain",
            help="Adopt what the chain lists of the wallet; download it to staging.",
        ),
    ] = False,
    strip: Annotated[
        int,
        typer.Option(
            "--strip",
            metavar="N",
            min=0,
            help="Remove the first N parts of members' keys: 1 for jackal-js-worker.",
        ),
    ] = 0,
    dry_run: DryRunOption = False,
    lenient: Annotated[
        bool,
        typer.Option(
            "--lenient",
            help="Accept equal keys in an index (the last counts), and text that is not UTF-8.",
        ),
    ] = False,
    json: JsonOption = False,
) -> None:
    r"""Adopt CAF files that other programs posted.

    Adopts files of gocaf and jackal-js-worker without uploading them again. The chain must list
    exactly the file's Merkle root and size, for the wallet or one that posted the ledger's chunks.
    The required number of copies must return pieces of it.

    A member becomes the location of an object of the newest complete inventory if key and size are
    equal, and the ETag is the MD5 of its bytes. Others are counted by reason, and listed by --json.
    The next run archives them. --dry-run judges each file alone, so an object in two files counts
    twice.

    caf get, restore, check, prove and repair can use the file like a chunk. Its objects have no
    headers and no user metadata, so caf safe-to-delete never lists them. Adopting a file twice
    changes nothing.

    \b
    Examples:
      caf adopt demo batch_1760000000000.caf --strip 1 --dry-run
      caf adopt demo --from-chain --strip 1 --json

    \b
    Exit status: 6, 8, 10
      0   Each file is adopted, known, or has no object to adopt.
      1   Some files were refused.
      3   Wrong settings, wallet or source.
      4   The only FILE is missing or not a CAF file.
      7   The only file is not on the chain or lacks copies, or the chain failed.
      9   No copy of the only file is right, or the inventory is damaged.
      11  There is no complete inventory: run `caf plan`.
    """
    if bool(files) == from_chain:
        raise UsageError(
            "caf adopt takes files, or --from-chain.",
            hint="Give either CAF files or --from-chain.",
        )
    settings = load_settings()
    settings.source(source)
    kinds: Counter[steps.AdoptionKind] = Counter()
    rows, left_out = 0, Counter[str]()
    errors = list[CafError]()

    def print_left_out(member: str, reason: str) -> None:
        if json:
            print_json(source=source, member=member, left_out=reason)

    objects = UnavailableSource("files are adopted by an inventory that was taken")
    with (
        opened_ledger(settings) as ledger,
        opened_run_context(settings, ledger, source, objects, register=not dry_run) as context,
        progress("reading", None) as advance,
    ):
        terms = steps.AdoptionOptions(strip, dry_run, print_left_out, advance, lenient)
        for adoption in (
            steps.adopt_files(context, files, terms)
            if files
            else steps.adopt_from_chain(context, terms)
        ):
            kinds[adoption.kind] += 1
            rows += adoption.rows
            left_out.update(adoption.left_out)
            if adoption.error:
                errors.append(adoption.error)
            if json:
                print_json(**_as_json(source, adoption, dry_run))
            elif adoption.error:
                note(f"{adoption.name}: refused: {adoption.error}")
            else:
                typer.echo(printable(f"{adoption.name}: {_sentence(adoption)}"))
    if json:
        print_json(
            source=source,
            files=dict(sorted(kinds.items())),
            **{"would_adopt" if dry_run else "adopted": rows},
            left_out=dict(sorted(left_out.items())),
        )
    else:
        counts = [f"{count:,} {_in_words(kind)}" for kind, count in sorted(kinds.items())]
        would = "would be " if dry_run else ""
        typer.echo(
            f"{source}: {', '.join(counts) or 'nothing is listed'}; "
            f"{counted(rows, 'object')} {would}adopted"
        )
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise CafError(
            f"{counted(len(errors), 'file')} could not be adopted; the reasons are above",
            hint=errors[0].hint,
        )


def _as_json(source: str, adoption: FileAdoption, dry_run: bool) -> dict[str, Any]:
    posting = adoption.file.posting if adoption.file else None
    return {
        "source": source,
        "file": adoption.name,
        "kind": adoption.kind,
        "chunk": adoption.chunk or None,
        "merkle_root": posting.merkle_root if posting else None,
        "owner": posting.owner if posting else None,
        "start": posting.start if posting else None,
        "size_bytes": posting.stored_size_bytes if posting else None,
        "copies": adoption.copies,
        "members": adoption.members,
        "would_adopt" if dry_run else "adopted": adoption.rows,
        "left_out": adoption.left_out,
        "why": adoption.error,
    }


def _in_words(kind: str) -> str:
    return kind.replace("would_adopt", "would be adopted").replace("_", " ")


def _sentence(adoption: FileAdoption) -> str:
    reasons = [
        f"{count:,} {reason.replace('_', ' ')}" for reason, count in adoption.left_out.items()
    ]
    rest = f"; left out: {', '.join(reasons)}" if reasons else ""
    if adoption.kind in {"adopted", "would_adopt"}:
        return (
            f"{_in_words(adoption.kind)} as {adoption.chunk}: {counted(adoption.rows, 'object')} "
            f"of {counted(adoption.members, 'member')}{rest}"
        )
    return {
        "known": f"known already, as {adoption.chunk}",
        "nothing_new": f"nothing to adopt: its objects are archived or under way{rest}",
        "no_object": f"nothing to adopt: no member is an object of the newest inventory{rest}",
        "not_caf": "not a CAF file",
        "ours": "a chunk of this software: 'caf rebuild' restores it, with its headers and user "
        f"metadata{rest}",
    }[adoption.kind]
