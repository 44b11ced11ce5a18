"""What happens to stored chunks afterwards.

They are looked at again and again, read back as a whole, repaired, put back into an empty ledger; and it is said what may be
deleted at the source.
"""
