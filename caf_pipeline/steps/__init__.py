"""What a run does, in order: the plan of a source, the steps of one chunk, and the audit of each by
other evidence.

What happens to a chunk after it is located is `maintenance`.
"""
