"""`caf queue`: messages of a source's queue that are no event of its bucket."""

import sys
from typing import Annotated

import typer

from caf_pipeline.cli.opened_ledger import opened_ledger
from caf_pipeline.cli.opening import require_source
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
        bool, typer.Option("--remove", help="Remove what is shown from the ledger.")
    ] = False,
    json: JsonOption = False,
) -> None:
    r"""Show messages of a source's queue that are not events.

    Each is shown with the reason why it is no event of the source's bucket. They were set apart in
    the ledger, whole, when they were taken from the queue, so that they hold nothing up. Of a
    message with several events those that are right were taken. Nothing else needs what is set
    apart: once its reason is known, and mended where the messages come from, --remove removes it.

    \b
    Examples:
      caf queue photos
      caf queue photos --remove --json >> set-apart.jsonl

    Exit status: 0; 3 a setting is wrong or there is no such source; 6 the database failed.
    """
    settings = load_settings()
    with opened_ledger(settings) as ledger:
        require_source(settings, ledger.lookup, source)
        messages = (
            ledger.notices.messages_set_apart(source) if source in ledger.lookup.sources() else ()
        )
        for one in messages:
            body = one.body.decode("utf-8", "backslashreplace")
            if json:
                at = one.set_apart_at.isoformat()
                print_json(
                    {
                        "message": one.message_id,
                        "set_apart_at": at,
                        "reason": one.reason,
                        "body": body,
                    }
                )
            else:
                typer.echo(
                    f"{printable(one.message_id)} of {show_time(one.set_apart_at)}: "
                    f"{printable(one.reason)}"
                )
                typer.echo(f"  {printable(body)}")
        if remove and messages:
            sys.stdout.flush()  # what could not be written is not removed
            ledger.notices.remove_messages(source, [one.message_id for one in messages])
        if not json:
            said = counted(len(messages), "message") if messages else "no message"
            typer.echo(f"{said} {'removed' if remove and messages else 'set apart'}")
