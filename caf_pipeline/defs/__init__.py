"""What Dagster sees: a module for each of its concepts. Bodies read config, call a step and return metadata.

This package imports nothing, so that the light modules (`home`, `naming`) can be used without loading Dagster.
"""
