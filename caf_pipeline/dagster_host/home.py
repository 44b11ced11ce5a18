"""Prepares DAGSTER_HOME, Dagster's folder on this machine, without a slow import of Dagster."""

import errno
import os
import secrets
import sys
from pathlib import Path
from typing import Final

from caf_pipeline.dagster_host.team_project import HOME_VARIABLE, team_project
from caf_pipeline.errors import CafError, SettingsError, with_hint
from caf_pipeline.settings import Settings, load_settings
from caf_pipeline.system.package_files import PACKAGE, package_file
from caf_pipeline.system.secret_files import make_private, owner_of

INSTANCE_FILE: Final = "dagster.yaml"
WORKSPACE_FILE: Final = "workspace.yaml"


def dagster_home(settings: Settings) -> Path:
    """Return the path of DAGSTER_HOME, which need not exist.

    Raises a SettingsError in a team's project that does not set it.
    """
    if project := team_project(settings.folder):
        return project.dagster_home
    return (settings.home / "dagster").absolute()


def prepare_dagster_home(settings: Settings) -> Path:
    """Create the folder, link our configuration, and set the variables of Dagster's processes.

    Leaves an operator's own file alone, and that of a team's project. Raises a SettingsError if the
    folder cannot be written.
    """
    folder = dagster_home(settings)
    # gRPC's fork handlers crash a process that has threads of gRPC now and then.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    # A daemon fails asset backfills while the code server is away, unless this is set.
    os.environ.setdefault("DAGSTER_BACKFILL_RETRY_DEFINITION_CHANGED_ERROR", "1")
    if team_project(settings.folder):
        os.environ[HOME_VARIABLE] = str(folder)
        return folder
    try:
        make_private(folder)
        for name in (INSTANCE_FILE, WORKSPACE_FILE):
            link = folder / name
            target = package_file(name)
            if is_own(link) or (link.is_symlink() and link.readlink() == target):
                continue
            # Replace the link in one step: another process may read the file at any moment.
            new_link = folder / f".caf-{secrets.token_hex(8)}.partial"
            new_link.symlink_to(target)
            new_link.replace(link)
        for database in folder.glob("*/*.db"):
            if not os.access(database, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(database))
    except OSError as error:
        path = Path(error.filename or folder)
        if not isinstance(error, PermissionError):
            raise SettingsError(
                f"Dagster's folder {folder} cannot be written: {error.strerror}",
                hint="set 'home' to a writable folder",
            ) from error
        raise SettingsError(
            f"Dagster's folder {folder} cannot be written: {path} belongs to the user "
            f"{owner_of(path)}",
            hint="run caf as this user, or set 'home' to a folder of your own",
        ) from error
    os.environ[HOME_VARIABLE] = str(folder)
    return folder


def is_own(file: Path) -> bool:
    """Return whether a file is the operator's own.

    That is a regular file, or a link to a file outside every copy of this software.
    """
    folder = file.resolve().parent
    in_a_copy = folder.name == PACKAGE.name or (folder / PACKAGE.name).is_dir()
    return file.exists() and not (file.is_symlink() and in_a_copy)


def main() -> int:
    """Prepare DAGSTER_HOME and print its path, for `export DAGSTER_HOME=$(…)`."""
    try:
        print(prepare_dagster_home(load_settings()))
    except CafError as error:
        print(with_hint(error), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
