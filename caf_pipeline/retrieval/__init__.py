"""Reads archived objects: look-ups, listings, restores, `archive.Archive`. `cli` prints them."""
