"""The packing journal, with which the next run resumes an interrupted packing."""
