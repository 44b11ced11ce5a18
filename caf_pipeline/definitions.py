"""The definitions that Dagster's tools load, by the settings of the working directory."""

from caf_pipeline.entry import GarbageCollectionPaused

with GarbageCollectionPaused():  # separate, since it must end before DuckDB is loaded
    from dagster import Definitions
with GarbageCollectionPaused():
    from caf_pipeline.defs.build import build_defs
    from caf_pipeline.errors import SettingsError, with_hint
    from caf_pipeline.settings import load_settings


def _load() -> Definitions:
    try:
        settings = load_settings()
    except SettingsError as error:
        # The UI shows this error for the code location: message and hint, without a traceback.
        raise SettingsError(with_hint(error)) from None
    return build_defs(settings)


defs = _load()
