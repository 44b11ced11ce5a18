"""Adapters that list and read a source's objects; only `wiring` opens one."""
