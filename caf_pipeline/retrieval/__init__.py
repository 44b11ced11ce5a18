"""Reads archived objects: look-ups, listings, restores, and the public API (`archive.Archive`)."""
