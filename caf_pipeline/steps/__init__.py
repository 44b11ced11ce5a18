"""The work of a run, in order: planning a source, processing one chunk, and auditing both.

`maintenance` covers chunks that are located.
"""
