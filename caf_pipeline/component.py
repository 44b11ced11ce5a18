"""The component for Dagster projects. `dg` lists each component that is a name of this module."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import click
import dagster as dg
import yaml
from dagster.components.utils.translation import TranslationFn, TranslationFnResolver
from pydantic import BaseModel, Field, PrivateAttr

from caf_pipeline.defs.build import ArchivePart, build_parts
from caf_pipeline.defs.failures import Context
from caf_pipeline.defs.schedules import ScheduledJob
from caf_pipeline.defs.translation import ArchiveAsset
from caf_pipeline.errors import SettingsError, with_hint
from caf_pipeline.setting_values import BucketName, SourceName
from caf_pipeline.settings import DEFAULT_CONFIG, load_settings
from caf_pipeline.settings_file import add_source, source_name

_DEFS_FOLDER: Final = "defs"
_DEFS_FILE: Final = "defs.yaml"
_SUFFIX: Final = ".S3ArchiveComponent"


class ArchiveParams(BaseModel):
    """Options of `dg scaffold defs`."""

    bucket: BucketName = Field(description="The bucket to archive.")
    source: SourceName | None = Field(
        default=None, description="Name of the source. Default: from the bucket's name."
    )
    store_folder: str | None = Field(
        default=None, description="Keep chunks as files in this folder. Default: on Jackal."
    )


class ArchiveScaffolder(dg.Scaffolder[ArchiveParams]):
    """Adds a source to caf.toml, and writes defs.yaml unless another one has all its sources."""

    @classmethod
    def get_scaffold_params(cls) -> type[ArchiveParams]:
        return ArchiveParams

    def scaffold(self, request: dg.ScaffoldRequest[ArchiveParams]) -> None:
        root = request.project_root or Path.cwd()
        params = request.params
        name = params.source or source_name(params.bucket)
        existing, attributes = _existing_instance(request)
        config = attributes.get("config", DEFAULT_CONFIG)
        file = root / config
        try:
            is_new = add_source(file, name, params.bucket, store_folder=params.store_folder or "")
        except SettingsError as error:
            _remove_if_empty(request.target_path)
            raise click.ClickException(with_hint(error)) from None
        click.echo(f"Source '{name}' {'added to' if is_new else 'is in'} {file}.")
        if existing:
            # Two components must not define the same source.
            _remove_if_empty(request.target_path)
            must_be_named = name not in attributes.get("sources", [name])
            then = f"add '{name}' to its sources" if must_be_named else "nothing else is needed"
            click.echo(f"{existing} serves the sources of {file}; {then}.")
            raise SystemExit(0)
        dg.scaffold_component(request, {"config": config})


def _existing_instance(
    request: dg.ScaffoldRequest[ArchiveParams],
) -> tuple[Path | None, Mapping[str, Any]]:
    # Returns the defs.yaml with this component, and its attributes.
    parents = request.target_path.parents
    folder = next((path for path in parents if path.name == _DEFS_FOLDER), parents[0])
    for file in sorted(folder.rglob(_DEFS_FILE)):
        for document in yaml.safe_load_all(file.read_text(encoding="utf-8")):
            if isinstance(document, dict) and str(document.get("type")).endswith(_SUFFIX):
                return file, document.get("attributes") or {}
    return None, {}


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


@dg.scaffold_with(ArchiveScaffolder)
class S3ArchiveComponent(dg.Component, dg.Model, dg.Resolvable):
    """Archives S3 buckets as CAF chunks, on the Jackal network or in a folder."""

    config: str = Field(
        default=DEFAULT_CONFIG,
        description="Path of the settings' file, relative to the project's root. It has the "
        "sources, the store and the keys.",
    )
    sources: Sequence[str] | None = Field(
        default=None,
        description="Names of the sources to define. Default: those of the file that no other "
        "component names.",
    )
    schedules: Mapping[ScheduledJob, str] = Field(
        default={}, description="Cron expressions in UTC by job, instead of the default ones."
    )
    translation: (
        Annotated[
            TranslationFn[ArchiveAsset],
            TranslationFnResolver[ArchiveAsset](
                lambda asset: {"source": asset.source, "asset": asset.name}
            ),
        ]
        | None
    ) = Field(
        default=None,
        description="Key, group, owners, tags and description of each asset. Templates may use "
        "`source`, `asset` (such as `caf_chunk`) and `spec`, the default.",
    )
    _built: Sequence[dg.Definitions] | None = PrivateAttr(default=None)

    def get_asset_spec(self, spec: dg.AssetSpec, asset: ArchiveAsset) -> dg.AssetSpec:
        """Return the spec of an asset, given its default."""
        return self.translation(spec, asset) if self.translation else spec

    def execute(self, context: Context, step: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Call a step: the work of an op or a check. A retry calls it again."""
        return step()

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Return the definitions of the component's sources.

        The project's components share resources. The first has all jobs, sensors and schedules.
        """
        tree = context.component_tree
        components = tree.get_all_components(S3ArchiveComponent) if tree else []
        position = next((i for i, component in enumerate(components) if component is self), None)
        if position is None:  # the component is not in a `defs` folder
            components, position = [self], 0
        first = components[0]
        try:
            if first._built is None:
                first._built = _build_together(components, context.project_root)
        except SettingsError as error:
            # `dg` shows this error: message and hint, without a chain of tracebacks.
            raise SettingsError(with_hint(error)) from None
        return first._built[position]


def _build_together(
    components: Sequence[S3ArchiveComponent], root: Path
) -> Sequence[dg.Definitions]:
    files = dict.fromkeys((root / component.config).resolve() for component in components)
    if len(files) > 1:
        raise SettingsError(
            "components of one project name different settings' files: "
            + ", ".join(map(str, files)),
            hint="a code location has one ledger and one store: move all sources into one file, "
            "or load the other file in a Dagster project of its own",
        )
    file = root / components[0].config
    settings = load_settings(file)
    named = [list(dict.fromkeys(component.sources or ())) for component in components]
    others = [name for name in settings.sources if not any(name in part for part in named)]
    parts = [
        others if component.sources is None else part
        for component, part in zip(components, named, strict=True)
    ]
    names = [name for part in parts for name in part]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise SettingsError(
            f"several components define source '{repeated[0]}' of {file}",
            hint="name each source in the `sources` of one component; at most one component may "
            "leave `sources` out",
        )
    return build_parts(
        settings.model_copy(update={"sources": {name: settings.source(name) for name in names}}),
        [
            ArchivePart(
                sources,
                translate=component.get_asset_spec,
                crons=component.schedules,
                execute=component.execute,
            )
            for component, sources in zip(components, parts, strict=True)
        ],
    )
