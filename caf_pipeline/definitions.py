"""The definitions that Dagster's tools load, by the settings of the working directory."""

from dagster import Definitions

from caf_pipeline.defs.build import build_decrypting_defs, build_own_defs
from caf_pipeline.errors import SettingsError, with_hint
from caf_pipeline.settings import Settings, load_settings


def _load() -> Settings:
    try:
        return load_settings()
    except SettingsError as error:
        # The UI shows this error for the code location: message and hint, without a traceback.
        raise SettingsError(with_hint(error)) from None


def decrypting() -> Definitions:
    """Return the jobs for a machine with the identity. Dagster's option `--attribute` names it."""
    return build_decrypting_defs(_load())


defs = build_own_defs(_load())
