"""Typed settings from `caf.toml` and the environment.

Order of precedence: environment (`CAF_…`, nested by `__`, e.g. `CAF_SOURCES__DEMO__BUCKET`), then the file that
`CAF_CONFIG` names or `caf.toml` in the working directory. Secrets come from the environment only; the file may not hold
any. Relative paths in the file are relative to the file.

Not here: what a setting is used for.
"""

import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ByteSize, ConfigDict, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from caf_pipeline.errors import SettingsError

CONFIG_VARIABLE: Final = "CAF_CONFIG"
DEFAULT_CONFIG: Final = "caf.toml"

MIB: Final = 1 << 20
GIB: Final = 1 << 30

MAX_SOURCE_NAME: Final = 30  # so that a chunk's id is at most 50 characters: <name>-<12 hex>-<5 digits>
_SOURCE_NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")


def _source_name(name: str) -> str:
    if len(name) > MAX_SOURCE_NAME or not _SOURCE_NAME.fullmatch(name):
        raise ValueError(f"a source's name has at most {MAX_SOURCE_NAME} of a-z, 0-9 and '-', no '-' at either end")
    return name


SourceName = Annotated[str, AfterValidator(_source_name)]


def _proof_type(number: int) -> int:
    if number not in (0, 3):
        raise ValueError("a proof type is 0 or 3")
    return number


ProofTypeSetting = Annotated[int, AfterValidator(_proof_type)]  # a Literal would refuse the environment's text "3"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SourceSettings(_Section):
    """One source: a bucket and prefix to archive, and how.

    Attributes:
        endpoint_url: of an S3-compatible server; AWS where empty.
        path_style: bucket in the path instead of the host name; by default wherever an endpoint is given.
        public: the operator's word that every byte of this source may be read by anybody.
        target_size: of a chunk, in bytes, index and footer included.
        watch_interval_seconds: between two looks of the sensor for new objects; 0 switches it off.
        watch_pages: of 1,000 keys, listed at each look.
    """

    bucket: str = Field(min_length=1)
    prefix: str = ""
    endpoint_url: str = ""
    region: str = ""
    profile: str = ""
    path_style: bool | None = None
    anonymous: bool = False
    requester_pays: bool = False
    access_key_id: SecretStr | None = None
    secret_access_key: SecretStr | None = None
    public: bool = False
    target_size: ByteSize = Field(default=ByteSize(30 * GIB), ge=4096, le=32 * GIB)
    owner: str = "team:archive"
    watch_interval_seconds: int = Field(default=300, ge=0)
    watch_pages: int = Field(default=20, ge=1, le=1000)

    @property
    def uses_path_style(self) -> bool:
        """Whether requests name the bucket in the path."""
        return bool(self.endpoint_url) if self.path_style is None else self.path_style


class PackingSettings(_Section):
    """How objects are fetched and staged.

    Attributes:
        window_size: bytes fetched ahead of the writer, at most. 64 MiB was faster than 256 MiB and takes a third of it.
        fetch_threads: GETs side by side.
        part_size: of one ranged GET of a large object, in bytes.
        compare_checksums: ask S3 for its own checksum of each object whose listing names one over the full object.
        unreadable_after: runs that may fail on one object before it is skipped as unreadable.
        staging_limit: bytes that all chunks together may take in staging; 0 for as much as the disk has.
    """

    window_size: ByteSize = Field(default=ByteSize(64 * MIB), ge=MIB)
    fetch_threads: int = Field(default=16, ge=1, le=256)
    part_size: ByteSize = Field(default=ByteSize(8 * MIB), ge=64 * 1024)
    request_attempts: int = Field(default=6, ge=1)
    compare_checksums: bool = True
    unreadable_after: int = Field(default=3, ge=1)
    staging_limit: ByteSize = Field(default=ByteSize(0), ge=0)

    @model_validator(mode="after")
    def _part_within_window(self) -> "PackingSettings":
        if self.part_size > self.window_size:
            raise ValueError("part_size is larger than window_size")
        return self


class StoreSettings(_Section):
    """Where chunks are kept. `jackal`: on the network that `[jackal]` describes; `directory`: files in `folder`."""

    kind: Literal["jackal", "directory"] = "jackal"
    folder: Path = Path(".caf/store")


class JackalSettings(_Section):
    """The network, the wallet and how chunks go there.

    Attributes:
        lcd: addresses of REST servers of chain nodes ("LCD"), best first; the next is asked where one fails or lags.
        chain_id: of the network; a node of another chain is refused.
        mnemonic: the wallet's words, from the environment only: `JACKAL_MNEMONIC`.
        mnemonic_file: a file of mode 600 that holds them instead.
        copies: asked for in a post and paid for; the chain calls it max_proofs.
        required_copies: listed and read back before a chunk counts as stored; all that were asked for where not given.
        proof_type: of the Merkle tree. Chains before 5.1 prove type 0 only.
        gas_price: in ujkl.
        timeout_blocks: after so many blocks a transaction that was not included never will be.
        upload_seconds: how long a provider reads one upload (600 by `jackal-protocol.md`); what is not through then is lost.
        proof_seconds: how long after an upload the chain may take to list the provider.
        bandwidth: bytes a second of all uploads together; 0 for no limit. `caf jackal limit` changes it while runs go on.
        spend_cap: ujkl that all transactions of this ledger may come to; none where not given. Changed in the same way.
        warn_days: before the bought space ends, or will be full, the check `storage_plan_lasts` warns.
        keep_staged_windows: proof windows for which a located chunk stays in staging, where space allows.
        prove_per_run: located chunks that one run of the proof watch looks at.
        allow_private_addresses: whether providers at loopback, link-local, private or other addresses that are not public are
            connected to. Providers name their own hosts on the chain, so that this is for networks of one's own.
    """

    lcd: tuple[str, ...] = ()
    chain_id: str = "jackal-1"
    mnemonic: SecretStr | None = None
    mnemonic_file: Path | None = None
    copies: int = Field(default=3, ge=1, le=100)
    required_copies: int | None = Field(default=None, ge=1)
    proof_type: ProofTypeSetting = 3
    gas_price: float = Field(default=0.02, ge=0)
    timeout_blocks: int = Field(default=50, ge=5)
    upload_seconds: float = Field(default=600, gt=0)
    proof_seconds: float = Field(default=900, gt=0)
    bandwidth: ByteSize = Field(default=ByteSize(0), ge=0)
    spend_cap: int | None = Field(default=None, ge=0)
    warn_days: int = Field(default=7, ge=0)
    keep_staged_windows: int = Field(default=2, ge=0)
    prove_per_run: int = Field(default=100, ge=1)
    allow_private_addresses: bool = False

    @model_validator(mode="after")
    def _required_within_copies(self) -> "JackalSettings":
        if self.required_copies is not None and self.required_copies > self.copies:
            raise ValueError("required_copies is larger than copies")
        return self

    @property
    def copies_required(self) -> int:
        """How many copies a chunk must have before it counts as stored."""
        return self.copies if self.required_copies is None else self.required_copies


class ChunkRunSettings(_Section):
    """How runs of chunks are launched and given up.

    Attributes:
        max_in_flight: chunk runs of one source that the sensor keeps going at once.
        attempts: runs of one chunk that may fail before it is parked.
    """

    max_in_flight: int = Field(default=4, ge=1)
    attempts: int = Field(default=5, ge=1)


class Settings(BaseSettings):
    """Everything that can be set.

    Attributes:
        home: the folder that holds all that the pipeline keeps on this machine.
        database_url: `postgresql://…`; an embedded server under `home` where empty. It may hold a password, so it comes
            from the environment (`CAF_DATABASE_URL`) only.
    """

    model_config = SettingsConfigDict(
        env_prefix="CAF_", env_nested_delimiter="__", extra="forbid", frozen=True, nested_model_default_partial_update=True
    )

    home: Path = Path(".caf")
    staging: Path | None = None
    database_url: SecretStr | None = None
    store: StoreSettings = StoreSettings()
    jackal: JackalSettings = JackalSettings()
    packing: PackingSettings = PackingSettings()
    runs: ChunkRunSettings = ChunkRunSettings()
    sources: dict[SourceName, SourceSettings] = {}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Let the environment win over the file, which comes in as keyword arguments."""
        return env_settings, init_settings

    @property
    def staging_folder(self) -> Path:
        """Where a chunk stands between packing and upload."""
        return self.staging or self.home / "staging"

    def source(self, name: str) -> SourceSettings:
        """Return the settings of one source, or raise SettingsError naming those that there are."""
        try:
            return self.sources[name]
        except KeyError:
            known = ", ".join(sorted(self.sources)) or "none"
            raise SettingsError(
                f"there is no source '{name}' (known: {known})", hint=f"add [sources.{name}] to caf.toml"
            ) from None


_SECRETS: Final = ("database_url", "access_key_id", "secret_access_key", "mnemonic")


def _refuse_secrets(values: dict[str, Any], where: str, path: Path) -> None:
    for name, value in values.items():
        full = f"{where}{name}"
        if name in _SECRETS:
            variable = "CAF_" + full.replace(".", "__").upper()
            raise SettingsError(f"{path}: {full} is a secret", hint=f"remove it there and set {variable} instead")
        if isinstance(value, dict):
            _refuse_secrets(value, f"{full}.", path)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from error
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    _refuse_secrets(values, "", path)
    return values


def _absolute(settings: Settings, folder: Path) -> Settings:
    """Anchor relative paths, so that a change of working directory changes nothing."""
    store = settings.store.model_copy(update={"folder": folder / settings.store.folder})
    staging = folder / settings.staging if settings.staging else None
    words = settings.jackal.mnemonic_file
    jackal = settings.jackal.model_copy(update={"mnemonic_file": folder / words}) if words else settings.jackal
    return settings.model_copy(update={"home": folder / settings.home, "staging": staging, "store": store, "jackal": jackal})


def load_settings(path: Path | None = None) -> Settings:
    """Read the settings.

    Args:
        path: the file; by default what `CAF_CONFIG` names, else `caf.toml` in the working directory, which may be absent.

    Raises:
        SettingsError: naming each setting that is wrong.
    """
    named = path or (Path(os.environ[CONFIG_VARIABLE]) if os.environ.get(CONFIG_VARIABLE) else None)
    file = (named or Path(DEFAULT_CONFIG)).absolute()
    values = _read_file(file) if named or file.exists() else {}
    try:
        settings = Settings(**values)
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(str(part) for part in each['loc']) or 'settings'}: {each['msg']}" for each in error.errors()
        )
        raise SettingsError(f"{file}: {wrong}", hint="docs/settings.md lists every setting") from None
    return _absolute(settings, file.parent)
