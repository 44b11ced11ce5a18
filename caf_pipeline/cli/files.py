"""Opens files for commands. Only an archived object needs settings and a database."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from caf_pipeline.errors import StagingError, UsageError
from caf_pipeline.system.ranges import FileRanges, open_ranges


def open_s3(address: str) -> FileRanges:
    """Open a file at `s3://bucket/key`."""
    from caf_pipeline.source.s3.ranges import S3File  # noqa: PLC0415  loading it takes 0.5 s

    return S3File(address)


@contextmanager
def opened_ranges(words: Sequence[str]) -> Iterator[FileRanges]:
    """Open a FILE (one word) or an archived object (SOURCE and KEY) for reading in ranges.

    Raises UsageError for more than two words, and like `open_ranges` and `retrieval.fetch`.
    """
    if len(words) > 2:
        raise UsageError(
            f"{len(words)} arguments do not name a file.",
            hint="Give FILE, or SOURCE and KEY of an archived object.",
        )
    if len(words) == 1:
        with open_ranges(words[0], open_s3) as file:
            yield file
        return
    # Loaded here because a file needs no database.
    from caf_pipeline.cli.opening import opened_lookup, opened_reader  # noqa: PLC0415
    from caf_pipeline.retrieval.object_ranges import ObjectRanges  # noqa: PLC0415
    from caf_pipeline.retrieval.reader import fetch  # noqa: PLC0415
    from caf_pipeline.settings import load_settings  # noqa: PLC0415

    source, key = words
    settings = load_settings()
    with opened_lookup(settings) as lookup, opened_reader(settings, lookup, source) as store:
        yield ObjectRanges(fetch(lookup, store, source, key))


@contextmanager
def replacing(path: Path, *inputs: str) -> Iterator[None]:
    """Translate OSErrors while `path` is written.

    Raises:
        UsageError: `path` exists and is not a regular file, or is one of the inputs.
        StagingError: It cannot be written.
    """
    try:
        if path.exists():
            if not path.is_file():
                raise UsageError(f"{str(path)!r} is not a file that can be replaced.")
            if any(os.path.exists(name) and path.samefile(name) for name in inputs):
                raise UsageError(
                    f"{str(path)!r} would replace what is read.", hint="Name another file."
                )
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StagingError(
            f"{str(path)!r} cannot be written: {error.strerror}.",
            hint="Name a file in a folder with room.",
        ) from error
