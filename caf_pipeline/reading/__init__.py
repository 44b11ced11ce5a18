"""Reads the index, the manifest and samples of one chunk. `store` has its bytes."""
