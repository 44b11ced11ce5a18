"""Which objects may be deleted at their source, by what is known now of each of them.

Nothing here deletes: S3 does, from the list that is written. What the source has is asked through
`source.protocol`.
"""
