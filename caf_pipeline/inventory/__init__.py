"""Snapshots of a source, chunk plans and manifests, without clock, environment or network.

Listing a bucket is in `source`, recording a plan in `steps`.
"""
