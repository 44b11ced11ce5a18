"""Packing writes one chunk into staging: it fetches objects and builds one CAF file."""
