"""A store whose providers fail in the middle of an answer."""

from caf_pipeline.errors import StoreUnreachable
from caf_pipeline_tests.support.several_folders import SeveralFolders


class BreakingFolders(SeveralFolders):
    """Providers that fail after `breaks` bytes of an answer, and record what was `asked`."""

    def __init__(self, folder):
        super().__init__(folder)
        self.breaks = {}
        self.asked = []

    def read(self, posting, start_byte, end_byte, *, provider=None):
        self.asked.append((provider, start_byte, end_byte))
        remaining = self.breaks.get(provider, end_byte)
        for piece in super().read(posting, start_byte, end_byte, provider=provider):
            if len(piece) > remaining:
                yield piece[:remaining]
                raise StoreUnreachable(f"{provider} broke off")
            remaining -= len(piece)
            yield piece
