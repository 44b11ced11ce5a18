"""Typed settings from `caf.toml` and the environment.

Environment variables win over the file: `CAF_…`, nested by `__`, e.g. `CAF_SOURCES__DEMO__BUCKET`.
`CAF_CONFIG` names the file; the default is `caf.toml` in the working directory or the nearest
folder above it. Secrets come from the environment only. Relative paths in the file are relative to
the file. All values are validated when they are read.
"""

import os
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError as NotJson

from caf_pipeline.errors import SettingsError
from caf_pipeline.setting_values import (
    BucketName,
    ChainId,
    Command,
    DatabaseUrl,
    Duration,
    Endpoint,
    FilePath,
    IdentityFile,
    IdentityText,
    Key,
    KeyPrefix,
    Lcd,
    MailAddress,
    MnemonicFile,
    Number,
    OwnerName,
    Patterns,
    ProofType,
    QueueUrl,
    Recipients,
    RegionName,
    ReportFolder,
    Size,
    SourceName,
    StorageClass,
    Switch,
    WebhookUrl,
    Whole,
    WorkerKey,
    names_access_point,
)
from caf_pipeline.settings_errors import (
    DOCUMENTATION,
    Origin,
    mistyped_variable,
    nearest,
    not_json,
    wrong_settings,
)

CONFIG_VARIABLE: Final = "CAF_CONFIG"
DEFAULT_CONFIG: Final = "caf.toml"
SOURCES_VARIABLE: Final = "CAF_SOURCES"
PASSPHRASE_VARIABLE: Final = "CAF_PASSPHRASE"
"""The passphrase of an identity file. It is not a setting: a command asks for it otherwise."""

MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40

DAY: Final = 24 * 3600

SECRETS: Final = frozenset(
    {
        "database_url",
        "access_key_id",
        "secret_access_key",
        "mnemonic",
        "identity",
        "worker_key",
        "webhook",
        "smtp_password",
    }
)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class SourceSettings(_Section):
    """A bucket and prefix to archive, and how.

    Attributes:
        include: Patterns of keys. An archived object matches at least one pattern. `*` matches any
            text, including `/`; `?` matches any character.
        exclude: Patterns of keys that are not archived.
        storage_classes: Storage classes that are archived. Empty: all.
        max_size: Largest archived object, in bytes. 0: no limit.
        min_age: Seconds since an object was last modified before it is archived.
        versions: `all` archives every version of a key, `current` the current version only.
        inventory: Folder of the bucket's S3 Inventory reports, `s3://…/`. Empty: list the bucket.
        queue: URL of an SQS queue with the bucket's event notifications, used by this source alone.
            Empty: list the bucket to find new objects.
        endpoint_url: S3-compatible server. Empty: AWS.
        path_style: Whether the URL has the bucket in its path. Default: if there is an endpoint.
        public: The operator confirms that anybody may read every byte of this source. Its chunks
            are not encrypted.
        recipients: Recipients of this source's new chunks. Default: those of `[encryption]`.
        target_size: Size of a chunk in bytes with index and footer, without its manifest.
        min_chunk_size: A smaller last chunk of a plan waits for the next plan. 0: never waits.
        max_wait: Longest time that an object waits, in seconds since it was last modified.
        get_price: US dollars for 1,000 GETs, for estimates. Default on AWS: the list price.
        egress_price: US dollars for 1 GiB of traffic out of the bucket's network, likewise.
        automatic: Whether sensors and schedules plan and archive the source.
        watch_interval_seconds: Seconds between two plans of the sensor for new objects. 0: never.
        watch_pages: Pages of 1,000 keys that each tick of this sensor lists.
        listing_threads: Parts of a bucket that are listed concurrently.
        listing_requests_per_second: Limit for all listing threads. S3 allows 5,500 reads a second
            for each partition of a bucket ("Best practices design patterns" in its user guide),
            which other clients need, too.
    """

    bucket: BucketName
    prefix: KeyPrefix = ""
    include: Patterns = ()
    exclude: Patterns = ()
    storage_classes: tuple[StorageClass, ...] = ()
    max_size: Size = Field(default=ByteSize(0), ge=0)
    min_age: Duration = 0
    versions: Literal["current", "all"] = "current"
    inventory: ReportFolder = ""
    queue: QueueUrl = ""
    endpoint_url: Endpoint = ""
    region: RegionName = ""
    profile: str = ""
    path_style: Switch | None = None
    anonymous: Switch = False
    requester_pays: Switch = False
    access_key_id: Key = None
    secret_access_key: Key = None
    public: Switch = False
    recipients: Recipients = ()
    target_size: Size = Field(default=ByteSize(30 * GIB), ge=4096, le=32 * GIB)
    min_chunk_size: Size = Field(default=ByteSize(0), ge=0, le=32 * GIB)
    max_wait: Duration = 7 * DAY
    get_price: Number | None = Field(default=None, ge=0, le=1_000_000)
    egress_price: Number | None = Field(default=None, ge=0, le=1_000_000)
    owner: OwnerName = "team:archive"
    automatic: Switch = False
    watch_interval_seconds: Whole = Field(default=300, ge=0, le=366 * DAY)
    watch_pages: Whole = Field(default=1, ge=1, le=1000)
    listing_threads: Whole = Field(default=8, ge=1, le=64)
    listing_requests_per_second: Number = Field(default=100, gt=0, le=5500)

    @model_validator(mode="after")
    def _both_keys(self) -> "SourceSettings":
        if (self.access_key_id is None) != (self.secret_access_key is None):
            missing = "access_key_id" if self.access_key_id is None else "secret_access_key"
            raise ValueError(
                f"access_key_id and secret_access_key must be set together; {missing} is missing"
            )
        return self

    @model_validator(mode="after")
    def _reports_of_this_bucket(self) -> "SourceSettings":
        if self.inventory and names_access_point(self.bucket):
            raise ValueError(
                "inventory reports name the bucket, so bucket must not be an access point"
            )
        if self.inventory and self.inventory.split("/")[-3] != self.bucket:
            raise ValueError(
                f"inventory, {self.inventory}, must end in SOURCE-BUCKET/CONFIG-ID/, and this "
                f"source's bucket is '{self.bucket}'"
            )
        return self

    @model_validator(mode="after")
    def _queue_needs_credentials(self) -> "SourceSettings":
        if self.queue and self.anonymous:
            raise ValueError("queue and anonymous exclude each other: a queue needs credentials")
        return self

    @model_validator(mode="after")
    def _public_or_encrypted(self) -> "SourceSettings":
        if self.public and self.recipients:
            raise ValueError("public and recipients exclude each other: public chunks are plain")
        return self

    @model_validator(mode="after")
    def _least_within_target(self) -> "SourceSettings":
        if self.min_chunk_size > self.target_size:
            raise ValueError(
                f"min_chunk_size, {self.min_chunk_size:,} bytes, is larger than target_size, "
                f"{self.target_size:,} bytes"
            )
        return self

    @property
    def uses_path_style(self) -> bool:
        return bool(self.endpoint_url) if self.path_style is None else self.path_style


class EncryptionSettings(_Section):
    """Keys of the sources that are not public.

    Attributes:
        recipients: Public keys, `age1pq1…` or `age1…`, to which new chunks are encrypted.
        identity: The secret key of a recipient, from `CAF_ENCRYPTION__IDENTITY` only, as an
            identity file has it.
        identity_file: A file of mode 600 with identities, perhaps encrypted to a passphrase.
        identity_command: A command that prints an identity file. It runs without a shell.
    """

    recipients: Recipients = ()
    identity: IdentityText = None
    identity_file: IdentityFile | None = None
    identity_command: Command = ""

    @property
    def has_identity(self) -> bool:
        return bool(self.identity or self.identity_file or self.identity_command)

    @model_validator(mode="after")
    def _one_identity(self) -> "EncryptionSettings":
        names = ("identity_file", "identity_command")  # `identity` overrides both
        if len(named := [name for name in names if getattr(self, name)]) > 1:
            raise ValueError(f"{' and '.join(named)} exclude each other: keep one of them")
        return self


class PackingSettings(_Section):
    """How objects are fetched and staged.

    Attributes:
        window_size: Bytes that are fetched ahead of the writer. 64 MiB was faster than 256 MiB.
        max_requests: Limit on concurrent GETs. Fewer are sent if more gain nothing.
        part_size: Bytes of each ranged GET of a large object.
        request_attempts: Attempts of one request.
        compare_checksums: Whether to compare with S3's checksum of the full object, if it has one.
        unreadable_after: Runs that fail on an object before it is skipped as unreadable.
        staging_limit: Bytes of all chunks in staging. 0: as much as the disk has.
    """

    window_size: Size = Field(default=ByteSize(64 * MIB), ge=MIB, le=TIB)
    max_requests: Whole = Field(default=256, ge=1, le=256)
    part_size: Size = Field(default=ByteSize(8 * MIB), ge=64 * 1024, le=TIB)
    request_attempts: Whole = Field(default=6, ge=1, le=1000)
    compare_checksums: Switch = True
    unreadable_after: Whole = Field(default=3, ge=1, le=1000)
    staging_limit: Size = Field(default=ByteSize(0), ge=0, le=1024 * TIB)

    @model_validator(mode="after")
    def _part_within_window(self) -> "PackingSettings":
        if self.part_size > self.window_size:
            raise ValueError(
                f"part_size, {self.part_size:,} bytes, is larger than window_size, "
                f"{self.window_size:,} bytes"
            )
        return self


class StoreSettings(_Section):
    """Where chunks are stored.

    Attributes:
        kind: `jackal`: the network in `[jackal]`; `directory`: files in `folder`.
        folder: The folder of kind `directory`.
    """

    kind: Literal["jackal", "directory"] = "jackal"
    folder: FilePath = Path(".caf/store")


class JackalSettings(_Section):
    """The network, the wallet, and how chunks are uploaded.

    Attributes:
        lcd: REST addresses of chain nodes ("LCD"), best first. The others are the fallback.
        chain_id: Id of the chain. Nodes of another chain are refused.
        mnemonic: The wallet's words, from `JACKAL_MNEMONIC` only.
        mnemonic_file: A file with these words and mode 600.
        copies: Copies that a post requests and pays for. The chain calls it max_proofs.
        required_copies: Copies that must be listed and read back before a chunk counts as stored.
            Default: `copies`.
        proof_type: Type of the Merkle tree. Chains before 5.1 prove type 0 only.
        gas_price: Price of gas, in ujkl.
        timeout_blocks: Blocks after which a pending transaction can no longer be included.
        upload_seconds: Time in which a provider reads one upload: 600 for today's providers.
        proof_seconds: Time after an upload in which the chain must list the provider.
        bandwidth: Bytes a second of all uploads. 0: no limit. `caf limit` changes it during runs.
        spend_cap: Limit on what all transactions of this ledger spend, in ujkl. Default: none.
            `caf limit` changes it during runs.
        warn_days: Warnings begin this many days before the bought space ends or is full, at most
            a third of the plan's length.
        keep_staged_windows: Proof windows for which a located chunk stays in staging if there is
            room.
        prove_per_run: Located chunks that each run of the proof watch checks.
        allow_private_addresses: Whether to connect to providers at loopback, link-local, private
            and other addresses that are not public. Providers choose their own addresses, so this
            is for private networks.
    """

    lcd: tuple[Lcd, ...] = ()
    chain_id: ChainId = "jackal-1"
    mnemonic: SecretStr | None = None
    mnemonic_file: MnemonicFile | None = None
    copies: Whole = Field(default=3, ge=1, le=100)
    required_copies: Whole | None = Field(default=None, ge=1, le=100)
    proof_type: ProofType = 3
    gas_price: Number = Field(default=0.02, ge=0, le=1_000_000)
    timeout_blocks: Whole = Field(default=50, ge=5, le=1_000_000)
    upload_seconds: Number = Field(default=600, gt=0, le=30 * DAY)
    proof_seconds: Number = Field(default=900, gt=0, le=30 * DAY)
    bandwidth: Size = Field(default=ByteSize(0), ge=0, le=TIB)
    spend_cap: Whole | None = Field(default=None, ge=0, le=10**18)
    warn_days: Whole = Field(default=30, ge=0, le=3660)
    keep_staged_windows: Whole = Field(default=2, ge=0, le=1_000_000)
    prove_per_run: Whole = Field(default=100, ge=1, le=1_000_000)
    allow_private_addresses: Switch = False

    @model_validator(mode="after")
    def _required_within_copies(self) -> "JackalSettings":
        if self.required_copies is not None and self.required_copies > self.copies:
            raise ValueError(
                f"required_copies, {self.required_copies}, is larger than copies, {self.copies}"
            )
        return self

    @property
    def has_wallet(self) -> bool:
        """True if the settings name nodes and a wallet."""
        return bool(self.lcd) and (self.mnemonic is not None or self.mnemonic_file is not None)

    @property
    def copies_required(self) -> int:
        """Copies that a chunk needs before it counts as stored."""
        return self.copies if self.required_copies is None else self.required_copies


class ChunkRunSettings(_Section):
    """How the runs of chunks are launched, and when the pipeline gives up.

    Attributes:
        max_in_flight: Concurrent chunk runs of one source that the sensor launches.
        attempts: Failed runs of a chunk before it is parked. A run does not count if S3, the chain
            or its providers did not answer.
        keep_events_days: Days after which the events and output of the sources' runs are removed
            from Dagster's storage. 0: never.
    """

    max_in_flight: Whole = Field(default=4, ge=1, le=10_000)
    attempts: Whole = Field(default=5, ge=1, le=10_000)
    keep_events_days: Whole = Field(default=0, ge=0, le=36_600)


class AlertSettings(_Section):
    """When alerts are sent, and where.

    Attributes:
        webhook: URL that receives each alert as JSON. It may contain a token, so it comes from
            `CAF_ALERTS__WEBHOOK` only.
        mail_to: E-mail addresses that receive each alert.
        mail_from: E-mail address of the sender.
        smtp_host: Host of the mail server.
        smtp_port: Port of the mail server.
        smtp_security: `starttls`, `tls` from the first byte on, or `none` for a local server.
        smtp_user: User of the mail server. Empty: no login.
        smtp_password: From `CAF_ALERTS__SMTP_PASSWORD` only.
        stalled_after: Seconds without any progress while chunks are under way.
        late_after: Seconds past `max_wait` since a chunk was planned, and seconds since the last
            complete inventory and since the last check of a stored chunk.
        skipped_share: Share of a source's objects that may be skipped.
        repeat_after: Seconds after which an alert is sent again. 0: never.
    """

    webhook: WebhookUrl = None
    mail_to: tuple[MailAddress, ...] = ()
    mail_from: MailAddress = "caf-pipeline@localhost"
    smtp_host: str = "localhost"
    smtp_port: Whole = Field(default=25, ge=1, le=65_535)
    smtp_security: Literal["starttls", "tls", "none"] = "none"
    smtp_user: str = ""
    smtp_password: SecretStr | None = None
    stalled_after: Duration = 6 * 3600
    late_after: Duration = 2 * DAY
    skipped_share: Number = Field(default=0.01, ge=0, le=1)
    repeat_after: Duration = DAY

    @model_validator(mode="after")
    def _login_is_whole(self) -> "AlertSettings":
        if bool(self.smtp_user) != (self.smtp_password is not None):
            raise ValueError("smtp_user and smtp_password must be set together")
        if self.smtp_user and self.smtp_security == "none":
            raise ValueError(
                "smtp_password is sent in the clear unless smtp_security is 'starttls' or 'tls'"
            )
        return self


class Settings(BaseSettings):
    """All settings.

    Attributes:
        home: Folder with everything that the pipeline stores on this machine.
        staging: Folder of chunks between packing and upload. Default: `staging` in `home`.
        database_url: `postgresql://…`. Empty: an embedded server in `home`. It may contain a
            password, so it comes from `CAF_DATABASE_URL` only.
        worker_key: 32 bytes in hex, from `CAF_WORKER_KEY` only. It encrypts the journals of private
            chunks, so that a killed run can resume.
    """

    model_config = SettingsConfigDict(
        env_prefix="CAF_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        nested_model_default_partial_update=True,
    )

    home: FilePath = Path(".caf")
    staging: FilePath | None = None
    database_url: DatabaseUrl = None
    worker_key: WorkerKey = None
    store: StoreSettings = StoreSettings()
    jackal: JackalSettings = JackalSettings()
    encryption: EncryptionSettings = EncryptionSettings()
    packing: PackingSettings = PackingSettings()
    runs: ChunkRunSettings = ChunkRunSettings()
    alerts: AlertSettings = AlertSettings()
    sources: dict[SourceName, SourceSettings] = {}
    _file: Path | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _each_queue_has_one_source(self) -> "Settings":
        sources: dict[str, str] = {}
        for name, source in self.sources.items():
            if source.queue and (other := sources.setdefault(source.queue, name)) != name:
                raise ValueError(
                    f"sources.{other} and sources.{name} share a queue: each would delete the "
                    "other's events"
                )
        return self

    @model_validator(mode="after")
    def _each_job_has_one_source(self) -> "Settings":
        for name in self.sources:
            if (other := name.removeprefix("chunk-")) != name and other in self.sources:
                raise ValueError(
                    f"sources.{name} and sources.{other} would both have the job "
                    f"caf_repair_{name.replace('-', '_')}: rename one"
                )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Let environment variables win over the file, whose values are arguments."""
        return env_settings, init_settings

    @property
    def folder(self) -> Path:
        """The folder of the file, or the working directory if there is no file."""
        return self._file.parent if self._file else Path.cwd()

    @property
    def staging_folder(self) -> Path:
        return self.staging or self.home / "staging"

    def source(self, name: str) -> SourceSettings:
        """Return the settings of a source. Raises SettingsError if it does not exist."""
        try:
            return self.sources[name]
        except KeyError:
            raise self.unknown_source(name) from None

    def recipients_of(self, name: str) -> tuple[str, ...]:
        """Return the recipients of a source's new chunks.

        Empty if the source is public, or if neither the source nor `[encryption]` has recipients.
        Raises SettingsError if the source does not exist.
        """
        source = self.source(name)
        return () if source.public else source.recipients or self.encryption.recipients

    def unknown_source(self, name: str, others: Iterable[str] = ()) -> SettingsError:
        """Return the error for a source that does not exist.

        `others` are sources in the ledger, which the file may not have.
        """
        names = sorted({*self.sources, *others})
        place = f"in {self._file}" if self._file else "in the environment, and there is no caf.toml"
        existing = f"the sources are: {', '.join(names)}" if names else "there are no sources"
        near = nearest(name, names)
        hint = "'caf help docs/reference/settings.md' describes sources"
        if near:
            hint = f"did you mean '{near}'?"
        return SettingsError(f"there is no source '{name}' {place}; {existing}", hint=hint)


# --- the file


def _refuse_secrets(values: dict[str, Any], section: str, path: Path) -> None:
    for name, value in values.items():
        full = f"{section}{name}"
        if name in SECRETS and not isinstance(value, dict):  # a source may be called `identity`
            variable = "CAF_" + full.replace(".", "__").upper()
            raise SettingsError(
                f"{path}: {full} is a secret",
                hint=f"remove it from the file and set {variable} instead",
            )
        if isinstance(value, dict):
            _refuse_secrets(value, f"{full}.", path)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        # Editors on Windows write a byte order mark.
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise SettingsError(
            f"{path} is not UTF-8 text, see line {line}", hint="save it as UTF-8"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(
            f"{path} is not valid TOML{_toml_problem(str(error))}",
            hint="toml.io describes TOML",
        ) from error
    except RecursionError as error:
        raise SettingsError(f"{path} is not valid TOML: too many nested levels") from error
    except IsADirectoryError as error:
        raise SettingsError(f"{path} is a folder", hint="it must be a TOML file") from error
    except OSError as error:
        is_configured = os.environ.get(CONFIG_VARIABLE) == str(path)
        raise SettingsError(
            f"{path} cannot be read: {error.strerror}",
            hint=f"{CONFIG_VARIABLE} names this file" if is_configured else "",
        ) from error
    _refuse_secrets(values, "", path)
    return values


_TOML_PLACE: Final = re.compile(
    r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", re.DOTALL
)


def _toml_problem(message: str) -> str:
    match = _TOML_PLACE.fullmatch(message)
    if not match:
        return f": {message}"
    place = f"line {match[2]}, column {match[3]}" if match[2] else "its end"
    return f" at {place}: {match[1][:1].lower()}{match[1][1:]}"


def _find_file(path: Path | None) -> tuple[Path, bool]:
    """Return the file's path, and whether to read it.

    Raises:
        SettingsError: There is no file, and no variable names a source.
    """
    if path is not None:
        return Path(path).absolute(), True
    if variable := os.environ.get(CONFIG_VARIABLE):
        return Path(variable).absolute(), True
    try:
        folder = Path.cwd()
    except FileNotFoundError:
        folder = None
    if folder and (file := _nearest_file(folder)):
        return file, True
    if folder and any(name.upper().startswith(SOURCES_VARIABLE) for name in os.environ):
        return folder / DEFAULT_CONFIG, False
    raise SettingsError(
        f"there is no {DEFAULT_CONFIG} in the working directory, {folder or 'which was removed'}, "
        f"or a folder above it, and {CONFIG_VARIABLE} is not set",
        hint=f"go to the folder that has it, or set {CONFIG_VARIABLE} to its path; "
        "'caf help docs/reference/settings.md' describes the file",
    )


def _nearest_file(folder: Path) -> Path | None:
    for parent in (folder, *folder.parents):
        file = parent / DEFAULT_CONFIG
        try:
            owner = file.lstat().st_uid
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            if parent != folder:
                continue
            raise SettingsError(
                f"the working directory cannot be searched for {DEFAULT_CONFIG}: {error.strerror}"
            ) from error
        # A file in /tmp could name a command of its owner's.
        if parent != folder and owner not in (0, os.geteuid()):
            raise SettingsError(
                f"{file} belongs to another user",
                hint=f"set {CONFIG_VARIABLE} to its path to use it anyway",
            )
        return file
    return None


def _absolute(settings: Settings, folder: Path) -> Settings:
    store = settings.store.model_copy(update={"folder": folder / settings.store.folder})
    staging = folder / settings.staging if settings.staging else None
    jackal = settings.jackal
    if jackal.mnemonic_file:
        jackal = jackal.model_copy(update={"mnemonic_file": folder / jackal.mnemonic_file})
    encryption = settings.encryption
    if encryption.identity_file:
        file = folder / encryption.identity_file
        encryption = encryption.model_copy(update={"identity_file": file})
    return settings.model_copy(
        update={
            "home": folder / settings.home,
            "staging": staging,
            "store": store,
            "jackal": jackal,
            "encryption": encryption,
        }
    )


def load_settings(path: Path | None = None) -> Settings:
    """Read and validate the settings. Nothing is created or changed.

    Args:
        path: The file. Default: the file that `CAF_CONFIG` names, or `caf.toml` in the working
            directory or above it, which is optional if variables name a source.

    Raises:
        SettingsError: There is no file, or settings are wrong. The message names each of them.
    """
    file, exists = _find_file(path)
    values = _read_file(file) if exists else {}
    origin = Origin(file, values, {name.upper(): value for name, value in os.environ.items()})
    if mistyped := mistyped_variable(Settings, origin, (CONFIG_VARIABLE, PASSPHRASE_VARIABLE)):
        raise mistyped
    for name in values:
        if name.startswith("_"):  # an argument of pydantic's
            raise SettingsError(f"{file}: {name} is not a setting", hint=DOCUMENTATION)
    try:
        settings = Settings(**values)
    except ValidationError as error:
        raise wrong_settings(error, Settings, origin, SECRETS) from None
    except NotJson:
        raise not_json(Settings, origin) from None
    settings = _absolute(settings, file.parent)
    settings._file = file if exists else None
    return settings
