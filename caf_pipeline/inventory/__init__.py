"""Snapshots of a source, chunk plans and manifests, without clock, environment or network."""
