"""`caf pause`, `caf resume` and `caf limit`. Current runs apply them within seconds."""

from typing import Annotated, Final

import typer

from caf_pipeline.cli.opening import opened_ledger
from caf_pipeline.cli.terminal import (
    JsonOption,
    parse_size,
    print_json,
    printable,
    show_coins,
    show_size,
)
from caf_pipeline.errors import UsageError
from caf_pipeline.settings import load_settings
from caf_pipeline.throttle import open_throttle

NOTHING: Final = "none"
DEFAULT: Final = "default"
_NO_BANDWIDTH_LIMIT: Final = "0"  # see `OperatorControls`
_NO_SPEND_CAP: Final = "-1"


def pause(
    reason: Annotated[
        str, typer.Argument(metavar="[REASON]", help="Shown wherever something waits.")
    ] = "paused by an operator",
) -> None:
    r"""Hold every run where it is, and launch no more.

    Nothing fails and nothing is lost: uploads stop between two pieces, and sensors show the reason.

    \b
    Example:
      caf pause "network maintenance"

    \b
    Exit status: 0, 3, 6
      2  REASON is empty.
    """
    if not reason.strip():
        raise UsageError(
            "a pause needs a reason.", hint='for example: caf pause "network maintenance"'
        )
    with opened_ledger(load_settings()) as ledger:
        ledger.controls.set("paused", reason.strip())
    typer.echo(f"paused: {printable(reason.strip())}")


def resume() -> None:
    r"""End a pause.

    After `caf backup --restore --unverified`, the pause ends only if `caf doctor` has found that
    the ledger fits the store.

    \b
    Exit status: 0, 3, 6
      1  The restored ledger is not yet compared with the store.
    """
    with opened_ledger(load_settings()) as ledger:
        ledger.controls.set("paused", None)
    typer.echo("nothing is paused now: runs continue within seconds")


def limit(
    bandwidth: Annotated[
        str | None,
        typer.Option(
            "--bandwidth",
            metavar="SIZE|none|default",
            help="Bytes a second for all uploads together: 20MiB.",
        ),
    ] = None,
    spend_cap: Annotated[
        str | None,
        typer.Option(
            "--spend-cap",
            metavar="UJKL|none|default",
            help="Most that this ledger may spend on transactions.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    r"""Limit what runs may upload and spend.

    Sets and shows the limits of all runs, including current ones. `none` removes a limit; `default`
    restores the setting jackal.bandwidth or jackal.spend_cap.

    \b
    Example:
      caf limit --bandwidth 20MiB --spend-cap 5000000

    \b
    Exit status: 0, 3, 6
      2  A value is not a limit.
    """
    settings = load_settings()
    changes: dict[str, str | None] = {}
    if bandwidth in (NOTHING, DEFAULT):
        changes["bandwidth"] = _NO_BANDWIDTH_LIMIT if bandwidth == NOTHING else None
    elif bandwidth is not None:
        rate = parse_size(bandwidth.removesuffix("/s"))
        if rate <= 0:
            raise UsageError(
                "a bandwidth limit of 0 would stop every upload.",
                hint=f"`--bandwidth {NOTHING}` removes the limit; `caf pause` stops uploads",
            )
        changes["bandwidth"] = str(rate)
    if spend_cap is not None:
        amount = spend_cap.removesuffix("ujkl").replace("_", "").replace(",", "")
        if spend_cap in (NOTHING, DEFAULT):
            changes["spend_cap"] = _NO_SPEND_CAP if spend_cap == NOTHING else None
        elif amount.isascii() and amount.isdigit():
            changes["spend_cap"] = amount
        else:
            raise UsageError(
                f"{spend_cap!r} is not an amount.", hint="give whole ujkl: 1 JKL is 1000000"
            )
    with opened_ledger(settings) as ledger:
        for name, value in changes.items():
            ledger.controls.set(name, value)
        current = ledger.controls.current()
        throttle = open_throttle(settings.jackal, ledger.controls.current)
        limit_rate, cap = throttle.limit() or None, throttle.spend_cap()
    if json:
        print_json(paused=current.paused or None, bandwidth=limit_rate, spend_cap=cap)
        return
    bandwidth = "no limit" if limit_rate is None else f"{show_size(limit_rate)} a second"
    typer.echo(f"bandwidth  {bandwidth}{_origin(current.bandwidth)}")
    spending = "none" if cap is None else show_coins(cap)
    typer.echo(f"spend cap  {spending}{_origin(current.spend_cap)}")
    if current.paused:
        typer.echo(f"paused: {printable(current.paused)}")


def _origin(operator_limit: int | None) -> str:
    return " (settings)" if operator_limit is None else " (set by an operator)"
