"""The doctor: finds what a crash can leave of a source, says it, and mends what can be mended without a run."""
