"""Opens the ledger for commands that write or need more than locations."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

from caf_pipeline.cli.terminal import note
from caf_pipeline.ledger.ledger import Ledger
from caf_pipeline.run_wiring import open_ledger
from caf_pipeline.settings import Settings
from caf_pipeline.waits import Announcer, Waits


@contextmanager
def opened_ledger(settings: Settings) -> Iterator[Ledger]:
    """Yield the open ledger."""
    with closing(open_ledger(settings, Waits(Announcer(note)))) as ledger:
        yield ledger
