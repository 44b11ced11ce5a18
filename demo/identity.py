"""The demo's key: an identity in the file that the settings name, made at the first run."""

import json
import os

from caf_pipeline.encryption.identities import Identities
from caf_pipeline.formats import age
from caf_pipeline.settings import Settings
from caf_pipeline.system.secret_files import make_private, write_secret


def use(settings: Settings) -> None:
    """Encrypt to the demo's key, unless the settings have recipients or a real network.

    Sets the variable of the recipients.
    """
    encryption = settings.encryption
    path = encryption.identity_file
    if encryption.recipients or path is None or not settings.jackal.chain_id.startswith("loopback"):
        return
    if not path.exists():
        make_private(path.parent)
        write_secret(path, f"{age.new_identity().reveal()}\n".encode())
    recipients = [str(identity.recipient) for identity in Identities(encryption).get()]
    os.environ["CAF_ENCRYPTION__RECIPIENTS"] = json.dumps(recipients)
