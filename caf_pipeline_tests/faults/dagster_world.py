"""A world for Dagster's processes: caf.toml, environment, and a backfill of its chunks."""

from collections.abc import Sequence
from pathlib import Path

from dagster import DagsterInstance

from caf_pipeline.dagster_host.backfill import submit
from caf_pipeline.dagster_host.code_location import code_location
from caf_pipeline.settings import Settings
from caf_pipeline_tests.faults.world import SOURCE, World


def settings_of_world(world: World, folder: Path) -> dict[str, str]:
    """Write the world's caf.toml; return the environment for processes that use it."""
    values = world.values
    source, jackal = values["sources"][SOURCE], values["jackal"]
    lcd = ", ".join(f'"{address}"' for address in jackal["lcd"])
    (folder / "caf.toml").write_text(
        f'home = "{values["home"]}"\n[store]\nkind = "jackal"\n[jackal]\nlcd = [{lcd}]\nchain_id = '
        f'"{jackal["chain_id"]}"\n'
        f"copies = {jackal['copies']}\nproof_seconds = 20\nallow_private_addresses = "
        "true\nkeep_staged_windows = 0\n"
        f"[sources.{SOURCE}]\n"
        f'bucket = "{source["bucket"]}"\nendpoint_url = "{source["endpoint_url"]}"\ntarget_size = '
        f"{source['target_size']}\n"
        "public = true\nautomatic = true\nwatch_interval_seconds = 0\n"
    )
    return {
        "CAF_CONFIG": str(folder / "caf.toml"),
        "CAF_DATABASE_URL": world.database_url,
        "JACKAL_MNEMONIC": jackal["mnemonic"],
        f"CAF_SOURCES__{SOURCE.upper()}__ACCESS_KEY_ID": source["access_key_id"],
        f"CAF_SOURCES__{SOURCE.upper()}__SECRET_ACCESS_KEY": source["secret_access_key"],
    }


def submit_backfill(
    world: World, instance: DagsterInstance, chunks: Sequence[str], backfill_id: str
) -> None:
    """Request a backfill of these chunks, as `caf backfill` does."""
    with world.run_context() as context:
        settings = Settings.model_validate(world.values)
        submit(
            settings,
            instance,
            context.ledger,
            SOURCE,
            chunks,
            backfill_id,
            code_location(settings, [SOURCE]),
        )
