"""The doctor: reports and mends what a crash can leave of a source."""
