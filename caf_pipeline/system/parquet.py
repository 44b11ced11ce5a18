"""Parquet files that are complete or missing, and DuckDB queries in bounded memory."""

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
"""Rows in memory together: 10 MB with keys of 100 bytes."""

_DISTINCT: Final = frozenset({"key", "etag", "object_version", "size_bytes"})
"""Columns with mostly distinct values, which get no dictionary.

Dictionaries took a quarter of the time to write a snapshot, and half to read it.
"""


_SUM: Final = ".sha256"
"""Suffix of a metadata name for its SHA-256 in hex."""


@dataclass(frozen=True, slots=True)
class QueryBudget:
    """Memory and threads of a sort or join.

    Beyond `memory_bytes` it spills into a folder beside its output.
    """

    memory_bytes: int = 256 << 20
    threads: int = 2


DEFAULT_BUDGET: Final = QueryBudget()


@contextlib.contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Translate errors of files and DuckDB while `path` is made.

    Raises:
        StagingError: The disk is full, or a file cannot be written.
        IntegrityError: An input is damaged or missing.
    """
    try:
        yield
    except duckdb.IOException as error:
        if "No files found" in str(error):
            raise IntegrityError(
                f"a file is missing: {first_line(error)}", hint="take the inventory again"
            ) from error
        raise _no_room(path, first_line(error)) from error
    except duckdb.OutOfMemoryException as error:
        raise _no_room(path, first_line(error)) from error
    except (duckdb.Error, pa.ArrowInvalid) as error:
        raise IntegrityError(
            f"{path} cannot be made, since an input file is damaged: {first_line(error)}",
            hint="take the inventory again",
        ) from error
    except OSError as error:
        raise _no_room(path, error.strerror or first_line(error)) from error


def _no_room(path: Path, reason: str) -> StagingError:
    return StagingError(
        f"{path} cannot be written: {reason}",
        hint="free space on that disk (sorts and joins spill there), or check the permissions",
    )


class WholeParquet:
    """A Parquet file under a temporary name until it is published."""

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
        """Keeps up to a row group in memory."""
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
        """Adds metadata with checksums. Pages have their own."""
        self._flush()
        sums = {
            f"{name}{_SUM}": hashlib.sha256(text.encode()).hexdigest()
            for name, text in metadata.items()
        }
        self._writer.add_key_value_metadata({**metadata, **sums})
        self._writer.close()
        self.whole.seal()

    def publish(self) -> None:
        self.whole.publish()

    def abort(self) -> None:
        # The last flush fails on a full disk, too; its bytes are removed anyway.
        with contextlib.suppress(OSError, ValueError):
            self._writer.close()
        self.whole.abort()


def stated(file: pq.FileMetaData, name: str) -> bytes:
    """Return metadata that was passed to `WholeParquet.close`.

    Raises:
        KeyError: It or its checksum is missing.
        ValueError: It is damaged.
    """
    metadata: dict[bytes, bytes] = file.metadata or {}
    text = metadata[name.encode()]
    digest = hashlib.sha256(text).hexdigest().encode()
    if metadata[f"{name}{_SUM}".encode()] != digest:
        raise ValueError(f"the metadata {name} is damaged")
    return text


def write_whole(
    batches: Iterable[pa.RecordBatch], path: Path, schema: pa.Schema, *, durable: bool = False
) -> WholeParquet:
    """Write batches as one file, or leave nothing.

    Columns outside of `schema` are dropped; their order is free. A file that is not `durable` may
    be lost in a crash.
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
    """Return a Parquet file, or a folder's Parquet files by name."""
    return sorted(path.glob("*.parquet")) if path.is_dir() else [path]


def sum_of(batch: pa.RecordBatch, column: str) -> int:
    """Sum an integer column."""
    return int(pc.sum(batch.column(column)).as_py() or 0)


class Query:
    """DuckDB over Parquet files within a budget. Spills into a temporary folder beside `path`.

    SQL may call `functions` by name, and `macros`, each `name(…) AS …`.
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
            # Protects the spill folder from a process that removes leftovers.
            stack.enter_context(writing_into(self._path.parent))
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
        """Define a view with the columns of the first file.

        Paths may contain any character, including those of glob patterns.
        """
        files = [file for path in paths for file in files_of(path)]
        literals = ", ".join(
            "'" + glob_escape(str(path)).replace("'", "''") + "'" for path in files
        )
        self.view(name, f"SELECT * FROM read_parquet([{literals}])")

    def view(self, name: str, sql: str) -> None:
        self.connection.execute(f"CREATE OR REPLACE VIEW {name} AS {sql}")

    def hold(self, name: str, sql: str) -> int:
        self.connection.execute(f"CREATE OR REPLACE TABLE {name} AS {sql}")
        return int(self.rows(f"SELECT count(*) FROM {name}")[0][0])

    def rows_of(self, name: str, rows: pa.Table) -> None:
        self.connection.register(name, rows)

    def batches(self, sql: str) -> Iterator[pa.RecordBatch]:
        # In DuckDB 2.0, `execute(…).to_arrow_reader` copies all rows first; `sql` streams. Without
        # the setting `preserve_insertion_order`, sorted rows came in another order.
        yield from self.connection.sql(sql).to_arrow_reader(ROWS_PER_GROUP)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        return self.connection.execute(sql).fetchall()
