"""What a command on files opens: a file by its name, an archived object in its place, and the file
that it writes.

Commands on files alone need neither settings nor a database, so that those are loaded only for an
archived object.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from caf_pipeline.errors import StagingError, UsageError
from caf_pipeline.system.ranges import FileRanges, open_ranges


def open_s3(address: str) -> FileRanges:
    """Open a file by `s3://bucket/key`."""
    from caf_pipeline.source.s3.ranges import S3File  # noqa: PLC0415  half a second that only s3:// needs

    return S3File(address)


@contextmanager
def opened_ranges(words: Sequence[str]) -> Iterator[FileRanges]:
    """Open what two words or one name, while the context lasts: an archived object by SOURCE and
    KEY, or a FILE.

    Raises:
        UsageError: more words. Else as `open_ranges`, and as `object_files.opened_object`.
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
    from caf_pipeline.cli.object_files import opened_object  # noqa: PLC0415  a file needs no database

    with opened_object(*words) as file:
        yield file


@contextmanager
def replacing(path: Path, *read: str) -> Iterator[None]:
    """Write a file while the context lasts.

    Raises: UsageError: something else than a file stands there, or it is one of those that are
        read. StagingError: an OSError inside.
    """
    try:
        if path.exists():
            if not path.is_file():
                raise UsageError(f"{str(path)!r} is not a file that can be replaced.")
            if any(os.path.exists(one) and path.samefile(one) for one in read):
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
