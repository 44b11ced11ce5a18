"""What Dagster's tools load: the definitions for the settings found in the working directory and
the environment.
"""

from caf_pipeline.entry import GarbageCollectionPaused

with GarbageCollectionPaused():  # on its own: it comes before DuckDB
    from dagster import Definitions
with GarbageCollectionPaused():
    from caf_pipeline.defs.build import build_defs
    from caf_pipeline.errors import SettingsError, with_hint
    from caf_pipeline.settings import load_settings


def _load() -> Definitions:
    try:
        settings = load_settings()
    except SettingsError as error:
        # This is what the UI shows of a code location that cannot be loaded: the sentence and the
        # hint, nothing of ours below.
        raise SettingsError(with_hint(error)) from None
    return build_defs(settings)


defs = _load()
