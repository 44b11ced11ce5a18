"""The processes around Dagster: commands, run launchers, storage and logs. Definitions: `defs`."""
