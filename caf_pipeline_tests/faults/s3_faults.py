"""Faults of S3's answers that a retry overcomes."""

PASSING = {
    "a connection reset in the middle of a body": lambda s3, **which: s3.reset_after(700, **which),
    "a body cut short, its Content-Length too": lambda s3, **which: s3.cut_body(
        1, honest=True, **which
    ),
    "a body cut short under its full Content-Length": lambda s3, **which: s3.cut_body(
        1, honest=False, **which
    ),
    "the right bytes under a wrong ETag": lambda s3, **which: s3.wrong_etag(**which),
    "500 for a GET": lambda s3, **which: s3.fail(500, "InternalError", **which),
    "a GET that hangs, then is answered": lambda s3, **which: s3.hang(0.3, **which),
}
