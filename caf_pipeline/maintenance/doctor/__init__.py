"""The doctor: reports what a crash can leave of a source, and mends what needs no run."""
