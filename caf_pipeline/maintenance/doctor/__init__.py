"""The doctor: mends what a crash can leave of a source. `steps` continue the work."""
