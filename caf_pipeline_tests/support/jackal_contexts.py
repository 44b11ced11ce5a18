"""Fixtures of run contexts on the loopback network.

wallet          a new wallet with coins and space
jackal_context  opens a run context, and closes its store at the end of the test
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from caf_pipeline.run_context import RunContext
from caf_pipeline_tests.loopback.network import LoopbackNetwork
from caf_pipeline_tests.support.jackal_command_line import NewWallet, wallet_with_space
from caf_pipeline_tests.support.jackal_network import jackal_settings
from caf_pipeline_tests.support.jackal_stores import open_jackal_store
from caf_pipeline_tests.support.run_contexts import a_run_context


@pytest.fixture
def wallet(network: LoopbackNetwork) -> NewWallet:
    return wallet_with_space(network)


@pytest.fixture
def jackal_context(tmp_path: Path, network: LoopbackNetwork) -> Iterator[Callable[..., RunContext]]:
    """Args: settings: as of `a_run_context`; `jackal` has changes of the network's settings."""
    with ExitStack() as opened:

        def open_context(source, ledger, *, folder=tmp_path, jackal, **settings: Any) -> RunContext:
            context = a_run_context(
                folder,
                source,
                ledger,
                store=open_jackal_store,
                jackal=jackal_settings(network, **jackal),
                **settings,
            )
            opened.callback(context.store.close)
            return context

        yield open_context
