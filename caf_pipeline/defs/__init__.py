"""The definitions that Dagster loads; `automation` decides for sensors.

This module imports nothing, so that `naming` loads without Dagster.
"""
