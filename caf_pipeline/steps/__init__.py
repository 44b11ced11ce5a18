"""The work of a run: planning a source, processing one chunk, and auditing both."""
