"""Where objects come from: an adapter for each kind of source; only `wiring` opens one.

S3 is the only kind. What is made of a listing is `inventory`, who asks for it is `steps`, and where
objects end up is `store`.
"""
