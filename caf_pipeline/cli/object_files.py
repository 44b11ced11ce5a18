"""What a command on files opens of the archive: an object in the place of a file, and a tar archive
that is an object.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from caf_pipeline.cli.cotar import OpenedCotar, opened_cotar
from caf_pipeline.cli.opening import opened_lookup, opened_reader
from caf_pipeline.retrieval.object_ranges import ObjectRanges
from caf_pipeline.retrieval.reader import ArchivedObject, fetch
from caf_pipeline.settings import load_settings


@contextmanager
def opened_object(source: str, key: str) -> Iterator[ObjectRanges]:
    """Open an archived object to be read in ranges, while the context lasts.

    Raises:
        As `opened_reader` and `fetch`.
    """
    settings = load_settings()
    with opened_lookup(settings) as lookup, opened_reader(settings, lookup, source) as store:
        yield ObjectRanges(fetch(lookup, store, source, key))


def opened_tar(found: ArchivedObject) -> AbstractContextManager[OpenedCotar]:
    """Open an object that is a .tar.co. Raises as `opened_cotar`."""
    return opened_cotar(ObjectRanges(found))
