"""The rights of an ordinary user, for tests that may run as root."""

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def ordinary_user() -> Iterator[None]:
    """Drop root's rights while the context lasts, so that file modes apply."""
    user_id = os.geteuid()
    os.seteuid(user_id or 65534)
    try:
        yield
    finally:
        os.seteuid(user_id)
