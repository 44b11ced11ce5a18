"""The keys of the assets, which a project may translate. `naming` has the default ones."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from dagster import AssetCheckKey, AssetKey

from caf_pipeline.naming import asset_key


@dataclass(frozen=True)
class AssetKeys:
    """Asset keys by source and name. `translated` has those that differ from the default."""

    translated: Mapping[tuple[str, str], AssetKey] = field(default_factory=dict)

    def key(self, source: str, asset: str) -> AssetKey:
        return self.translated.get((source, asset)) or AssetKey(asset_key(source, asset))

    def check_key(self, source: str, asset: str, check: str) -> AssetCheckKey:
        return AssetCheckKey(self.key(source, asset), check)


DEFAULT_KEYS: Final = AssetKeys()
