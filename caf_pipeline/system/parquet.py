"""Parquet files that are whole or not there at all, and DuckDB over them in bounded memory."""

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from glob import escape as glob_escape
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from caf_pipeline.errors import IntegrityError, StagingError, first_line
from caf_pipeline.system.atomic_files import WholeFile
from caf_pipeline.system.folder_lock import writing_into

ROWS_PER_GROUP: Final = 65_536
"""Rows of a row group, which are held in memory at once: some 10 MB with keys of 100 bytes."""

_DISTINCT: Final = frozenset({"key", "etag", "object_version", "size_bytes"})
"""Columns whose rows nearly all differ.

A dictionary of them, which Parquet gives up once it is full, took a quarter of the time to write a
snapshot and half of the time to read it.
"""


_SUM: Final = ".sha256"
"""Behind the name of metadata: its checksum, in hex."""


@dataclass(frozen=True, slots=True)
class QueryBudget:
    """What a sort or join may take at once.

    Beyond `memory_bytes` it spills into a folder beside the file that it is for.
    """

    memory_bytes: int = 256 << 20
    threads: int = 2


DEFAULT_BUDGET: Final = QueryBudget()


@contextlib.contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Translate what files and DuckDB raise while `path` is worked on: StagingError, or
    IntegrityError for a bad input.
    """
    try:
        yield
    except duckdb.IOException as error:
        if "No files found" in str(error):  # DuckDB's words for a file that is not there
            raise IntegrityError(
                f"a file is missing: {first_line(error)}", hint="take the inventory again"
            ) from error
        raise _no_room(path, first_line(error)) from error
    except duckdb.OutOfMemoryException as error:
        raise _no_room(path, first_line(error)) from error
    except (duckdb.Error, pa.ArrowInvalid) as error:
        raise IntegrityError(
            f"{path} cannot be made, since a file that it is made of is damaged: "
            f"{first_line(error)}",
            hint="take the inventory again",
        ) from error
    except OSError as error:
        raise _no_room(path, error.strerror or first_line(error)) from error


def _no_room(path: Path, reason: str) -> StagingError:
    return StagingError(
        f"{path} cannot be written: {reason}",
        hint="make room on that disk (sorts and joins spill beside the file) or mend the folder's "
        "permissions",
    )


class WholeParquet:
    """A Parquet file while it is written: counted, and under a temporary name until it is
    published.
    """

    def __init__(self, path: Path, schema: pa.Schema, *, durable: bool = True) -> None:
        self.whole = WholeFile(path, path.with_name(f".{path.name}.tmp"), durable=durable)
        self.row_count = 0
        self._schema = schema
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = 0
        dictionaries = [name for name in schema.names if name not in _DISTINCT]
        self._writer = pq.ParquetWriter(
            self.whole.file,
            schema,
            compression="zstd",
            write_page_checksum=True,
            use_dictionary=dictionaries,
        )

    def write(self, batch: pa.RecordBatch) -> None:
        """Take rows; a row group is held in memory."""
        self._waiting.append(batch)
        self._waiting_rows += batch.num_rows
        self.row_count += batch.num_rows
        if self._waiting_rows >= ROWS_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        table = pa.Table.from_batches(self._waiting, self._schema)
        self._waiting, self._waiting_rows = [], 0
        self._writer.write_table(table, row_group_size=ROWS_PER_GROUP)

    def close(self, metadata: Mapping[str, str]) -> None:
        """End the temporary file with this metadata and its checksums: those of pages say nothing
        of a file's end.
        """
        self._flush()
        sums = {
            f"{name}{_SUM}": hashlib.sha256(text.encode()).hexdigest()
            for name, text in metadata.items()
        }
        self._writer.add_key_value_metadata({**metadata, **sums})
        self._writer.close()
        self.whole.seal()

    def publish(self) -> None:
        """Give the closed file its name."""
        self.whole.publish()

    def abort(self) -> None:
        """Remove the temporary file; does nothing after `publish`."""
        with contextlib.suppress(
            OSError, ValueError
        ):  # a full disk fails the last flush too; the bytes are being removed
            self._writer.close()
        self.whole.abort()


def stated(file: pq.FileMetaData, name: str) -> bytes:
    """Return the metadata that a file was closed with under a name.

    Raises:
        KeyError: it has none, or no checksum of it. ValueError: it is not as it was written.
    """
    said: dict[bytes, bytes] = file.metadata or {}
    text = said[name.encode()]
    digest = hashlib.sha256(text).hexdigest().encode()
    if said[f"{name}{_SUM}".encode()] != digest:
        raise ValueError(f"{name} is not as it was written")
    return text


def write_whole(
    batches: Iterable[pa.RecordBatch], path: Path, schema: pa.Schema, *, durable: bool = False
) -> WholeParquet:
    """Write batches (their columns in any order, more are dropped) as one file, or leave nothing.

    Unless it is to be `durable`, it is for the step under way: after a crash of the machine that
    begins again.
    """
    file = WholeParquet(path, schema, durable=durable)
    try:
        for batch in batches:
            file.write(batch.select(schema.names).cast(schema))
        file.close({})
        file.publish()
    finally:
        file.abort()
    return file


def files_of(path: Path) -> list[Path]:
    """Return a Parquet file, or those of a folder in the order of their names."""
    return sorted(path.glob("*.parquet")) if path.is_dir() else [path]


def sum_of(batch: pa.RecordBatch, column: str) -> int:
    """Return the sum of a column of integers."""
    return int(pc.sum(batch.column(column)).as_py() or 0)


class Query:
    """DuckDB over Parquet files, within a budget, spilling into a folder beside `path` that is
    removed at the end.

    SQL may call the functions by their names, and the macros, each `name(…) AS …`.
    """

    def __init__(
        self,
        path: Path,
        budget: QueryBudget,
        *,
        functions: Mapping[str, Callable[[bytes], str]],
        macros: Iterable[str],
    ) -> None:
        self._path = path
        self._budget = budget
        self._functions = functions
        self._macros = macros
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                writing_into(self._path.parent)
            )  # who tidies up there leaves the folder alone meanwhile
            spill = stack.enter_context(
                tempfile.TemporaryDirectory(prefix=".caf-spill-", dir=self._path.parent)
            )
            config: dict[str, str | bool | int | float | list[str]] = {
                "memory_limit": f"{max(1, self._budget.memory_bytes >> 20)}MiB",
                "threads": self._budget.threads,
                "temp_directory": spill,
            }
            self.connection = stack.enter_context(duckdb.connect(":memory:", config=config))
            for name, function in self._functions.items():
                self.connection.create_function(name, function, ["BLOB"], "VARCHAR")
            for macro in self._macros:
                self.connection.execute(f"CREATE MACRO {macro}")
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def table(self, name: str, *paths: Path) -> None:
        """Give Parquet files, or folders of them, a name, as one table, with the columns of the
        first one.

        Their paths may hold any character, also those of glob patterns.
        """
        files = [file for path in paths for file in files_of(path)]
        literals = ", ".join(
            "'" + glob_escape(str(path)).replace("'", "''") + "'" for path in files
        )
        self.view(name, f"SELECT * FROM read_parquet([{literals}])")

    def view(self, name: str, sql: str) -> None:
        """Give a query a name, which may have stood for another before."""
        self.connection.execute(f"CREATE OR REPLACE VIEW {name} AS {sql}")

    def hold(self, name: str, sql: str) -> int:
        """Keep the rows of a query under a name, which may have stood for others before; return how
        many they are.
        """
        self.connection.execute(f"CREATE OR REPLACE TABLE {name} AS {sql}")
        return int(self.rows(f"SELECT count(*) FROM {name}")[0][0])

    def rows_of(self, name: str, rows: pa.Table) -> None:
        """Give rows in memory a name, which may have stood for others before."""
        self.connection.register(name, rows)

    def batches(self, sql: str) -> Iterator[pa.RecordBatch]:
        """Yield the rows in the order of the query, in batches as they come."""
        # DuckDB 2.0 warns that `execute(…).to_arrow_reader` copies all rows first; `sql` streams.
        # DuckDB's setting `preserve_insertion_order` stays on: without it, sorted rows came out of
        # order here.
        yield from self.connection.sql(sql).to_arrow_reader(ROWS_PER_GROUP)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Return all rows of a small result."""
        return self.connection.execute(sql).fetchall()
