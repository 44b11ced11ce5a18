"""`caf queue`."""

import sys
from typing import Annotated

import typer

from caf_pipeline.cli.opening import opened_ledger, require_source
from caf_pipeline.cli.terminal import (
    JsonOption,
    SourceArgument,
    counted,
    print_json,
    printable,
    show_time,
)
from caf_pipeline.settings import load_settings


def queue(
    source: SourceArgument,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove the shown messages from the ledger.")
    ] = False,
    json: JsonOption = False,
) -> None:
    r"""Show messages of a source's queue that are not events.

    They are moved from the queue to the ledger, so that they block nothing. Valid events in them
    were processed. Fix the sender, then delete the messages with --remove; nothing else needs them.

    \b
    Example:
      caf queue photos --remove --json >> set-apart.jsonl

    \b
    Exit status: 0, 3, 6
    """
    settings = load_settings()
    with opened_ledger(settings) as ledger:
        require_source(settings, ledger.lookup, source)
        messages = (
            ledger.notices.messages_set_apart(source) if source in ledger.lookup.sources() else ()
        )
        for message in messages:
            body = message.body.decode("utf-8", "backslashreplace")
            if json:
                print_json(
                    message=message.message_id,
                    set_apart_at=message.set_apart_at,
                    reason=message.reason,
                    body=body,
                )
                continue
            time = show_time(message.set_apart_at)
            typer.echo(
                f"{printable(message.message_id)} of {time}: {printable(message.reason)}\n"
                f"  {printable(body)}"
            )
        if remove and messages:
            sys.stdout.flush()  # raises if the messages could not be written
            ledger.notices.remove_messages(source, [message.message_id for message in messages])
        if not json:
            number = counted(len(messages), "message") if messages else "no message"
            typer.echo(f"{number} {'removed' if remove and messages else 'set apart'}")
