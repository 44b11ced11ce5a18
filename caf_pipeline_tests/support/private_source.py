"""A command line whose source `src` is private and archived, with keys that tests search for."""

from pathlib import Path

from caf_pipeline.encryption.identities import IDENTITY_VARIABLE
from caf_pipeline.formats import age
from caf_pipeline_tests.support.command_line import KEYS, CommandLine, archive_source, source_text
from caf_pipeline_tests.support.memory_source import MemorySource

IDENTITY = age.new_identity()
WITH_IDENTITY = {IDENTITY_VARIABLE: IDENTITY.reveal()}


def private_text(endpoint: str, bucket: str, **more: str) -> str:
    """Return a private source `src` and its recipient as TOML."""
    recipients = f'[encryption]\nrecipients = ["{IDENTITY.recipient}"]\n'
    return source_text(endpoint, bucket, public="false", **more) + recipients


def private_command_line(
    folder: Path, database_url: str, bodies: dict[str, bytes], **more: str
) -> CommandLine:
    """Return a command line without the identity that has archived these objects."""
    caf = CommandLine(folder, KEYS | {"CAF_DATABASE_URL": database_url})
    caf.settings(private_text("http://127.0.0.1:9", "b", **more))
    archive_source(caf, objects=MemorySource(bodies))
    return caf
