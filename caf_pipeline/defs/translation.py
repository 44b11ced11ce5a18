"""Translates the assets of a source: keys, groups, owners, tags and descriptions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dagster import AssetKey, AssetsDefinition, AssetSpec, map_asset_specs

from caf_pipeline.naming import ASSETS


@dataclass(frozen=True)
class ArchiveAsset:
    """An asset of a source; `name` is one of `naming.ASSETS`."""

    source: str
    name: str


Translate = Callable[[AssetSpec, ArchiveAsset], AssetSpec]
"""Takes the default spec."""


def translate_assets(
    source: str, assets: Sequence[AssetsDefinition], translate: Translate
) -> tuple[Sequence[AssetsDefinition], Mapping[tuple[str, str], AssetKey]]:
    """Return assets, which are in the order of `ASSETS`, translated, and their keys."""
    specs = [spec for asset in assets for spec in asset.specs]
    translated = [
        translate(spec, ArchiveAsset(source, name))
        for spec, name in zip(specs, ASSETS, strict=True)
    ]
    changes = list(zip(specs, translated, strict=True))
    new_keys = {old.key: new.key for old, new in changes if new.key != old.key}
    new_specs = {new.key: (old, new) for old, new in changes}

    def replace(spec: AssetSpec) -> AssetSpec:
        # `spec` has the new keys, also those of its upstream assets.
        old, new = new_specs[spec.key]
        added = [dep for dep in new.deps if dep not in old.deps]
        return new.replace_attributes(deps=[*spec.deps, *added])

    renamed = [asset.with_attributes(asset_key_replacements=new_keys) for asset in assets]
    keys = {(source, name): spec.key for name, spec in zip(ASSETS, translated, strict=True)}
    return map_asset_specs(replace, renamed), keys
