"""The definitions that Dagster loads, with one module for each of its concepts.

Function bodies read config, call a step and return metadata. `automation` decides for sensors.
This module imports nothing, so that `naming` loads without Dagster.
"""
