"""Dagster's GraphQL API in this process, with a real instance and a real code server."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dagster import DagsterInstance
from dagster_graphql.cli import execute_query

from caf_pipeline.dagster_private import WorkspaceFileTarget
from caf_pipeline_tests.support.dagster_private import WorkspaceProcessContext

WORKSPACE = Path(__file__).parents[2] / "workspace.yaml"


@dataclass(frozen=True)
class Webserver:
    """Answers GraphQL queries like Dagster's webserver."""

    context: WorkspaceProcessContext

    def ask(self, query: str, **variables: Any) -> dict[str, Any]:
        """Return the data of a query's answer."""
        answer: dict[str, Any] = execute_query(self.context, query, variables)
        assert "errors" not in answer, answer
        return answer["data"]


@contextmanager
def webserver(instance: DagsterInstance) -> Iterator[Webserver]:
    """Serve the definitions of workspace.yaml; the code server has this process's environment."""
    with WorkspaceProcessContext(instance, WorkspaceFileTarget([str(WORKSPACE)])) as context:
        yield Webserver(context)
    # Otherwise the garbage collector finds a running server in another test.
    context._grpc_server_registry.wait_for_processes()


def metadata_of(entries: list[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return metadata entries by their labels."""
    return {entry["label"]: entry for entry in entries}
