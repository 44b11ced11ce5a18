"""Typed settings from `caf.toml` and the environment.

Order of precedence: environment (`CAF_…`, nested by `__`, e.g. `CAF_SOURCES__DEMO__BUCKET`), then
the file that `CAF_CONFIG` names or `caf.toml` in the working directory. Secrets come from the
environment only; the file may not hold any. Relative paths in the file are relative to the file.
Every value is checked when it is read.
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
    DatabaseUrl,
    Duration,
    Endpoint,
    FilePath,
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
    RegionName,
    ReportFolder,
    Size,
    SourceName,
    StorageClass,
    WebhookUrl,
    Whole,
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

MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40

DAY: Final = 24 * 3600

SECRETS: Final = frozenset(
    {"database_url", "access_key_id", "secret_access_key", "mnemonic", "webhook", "smtp_password"}
)


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class SourceSettings(_Section):
    """One source: a bucket and prefix to archive, and how.

    Attributes: include: patterns of keys, of which an archived object matches one: `*` is any text,
        `/` too, and `?` any character. exclude: patterns of keys, of which it matches none.
        storage_classes: of archived objects; all where none is named. max_size: of an archived
        object, in bytes; 0: no limit. min_age: seconds since an archived object was last modified,
        at least, when the inventory is taken. versions: `all`: each version of a key is an object
        to archive; `current`: only what a key has now. inventory: the folder of S3 Inventory's
        reports of the bucket, `s3://…/`; the bucket is listed where empty. queue: the URL of an SQS
        queue with S3's event notifications of the bucket, of this source alone; the bucket is
        looked
            through where empty.
        endpoint_url: of an S3-compatible server; AWS where empty.
        path_style: bucket in the path instead of the host name; by default wherever an endpoint is
        given.
        public: the operator's word that every byte of this source may be read by anybody.
        target_size: of a chunk, in bytes, index and footer included; its manifest comes on top.
        min_chunk_size: the last chunk of a plan waits for the next plan while it is smaller; 0: it
        never waits.
        max_wait: seconds since it was last modified for which an object waits at most.
        get_price: US dollars for 1,000 GETs, of estimates; AWS's list price where no endpoint is
        given.
        egress_price: US dollars for 1 GiB that leaves the bucket's network, likewise.
        automatic: whether sensors and schedules plan and archive the source by themselves. By
        default they do not.
        watch_interval_seconds: between two plans of what the sensor for new objects sees; 0
        switches it off.
        watch_pages: of 1,000 keys, listed at each look.
        listing_threads: parts of a bucket that are listed side by side.
        listing_requests_per_second: of all those together. S3 takes 5,500 reads a second for each
            of its partitions ("Best practices design patterns" in its user guide), which are for
            the bucket's other users.
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
    path_style: bool | None = None
    anonymous: bool = False
    requester_pays: bool = False
    access_key_id: Key = None
    secret_access_key: Key = None
    public: bool = False
    target_size: Size = Field(default=ByteSize(30 * GIB), ge=4096, le=32 * GIB)
    min_chunk_size: Size = Field(default=ByteSize(0), ge=0, le=32 * GIB)
    max_wait: Duration = 7 * DAY
    get_price: Number | None = Field(default=None, ge=0, le=1_000_000)
    egress_price: Number | None = Field(default=None, ge=0, le=1_000_000)
    owner: OwnerName = "team:archive"
    automatic: bool = False
    watch_interval_seconds: Whole = Field(default=300, ge=0, le=366 * DAY)
    watch_pages: Whole = Field(default=1, ge=1, le=1000)
    listing_threads: Whole = Field(default=8, ge=1, le=64)
    listing_requests_per_second: Number = Field(default=100, gt=0, le=5500)

    @model_validator(mode="after")
    def _both_keys(self) -> "SourceSettings":
        if (self.access_key_id is None) != (self.secret_access_key is None):
            missing = "access_key_id" if self.access_key_id is None else "secret_access_key"
            raise ValueError(
                f"access_key_id and secret_access_key are set together or not at all; {missing} is "
                "missing"
            )
        return self

    @model_validator(mode="after")
    def _reports_of_this_bucket(self) -> "SourceSettings":
        if self.inventory and names_access_point(self.bucket):
            raise ValueError(
                "inventory needs the bucket's own name as bucket, and not an access point: its "
                "reports name the bucket"
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
            raise ValueError(
                "queue and anonymous exclude each other: a queue is never read without credentials"
            )
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
        """Whether requests name the bucket in the path."""
        return bool(self.endpoint_url) if self.path_style is None else self.path_style


class PackingSettings(_Section):
    """How objects are fetched and staged.

    Attributes: window_size: bytes fetched ahead of the writer, at most. 64 MiB was faster than 256
        MiB and takes a third of it. fetch_threads: GETs side by side. part_size: of one ranged GET
        of a large object, in bytes. compare_checksums: with S3's own of each object whose listing
        names one over the full object. unreadable_after: runs that may fail on one object before it
        is skipped as unreadable. staging_limit: bytes that all chunks together may take in staging;
        0 for as much as the disk has.
    """

    window_size: Size = Field(default=ByteSize(64 * MIB), ge=MIB, le=TIB)
    fetch_threads: Whole = Field(default=16, ge=1, le=256)
    part_size: Size = Field(default=ByteSize(8 * MIB), ge=64 * 1024, le=TIB)
    request_attempts: Whole = Field(default=6, ge=1, le=1000)
    compare_checksums: bool = True
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
    """Where chunks are kept.

    `jackal`: on the network that `[jackal]` describes; `directory`: files in `folder`.
    """

    kind: Literal["jackal", "directory"] = "jackal"
    folder: FilePath = Path(".caf/store")


class JackalSettings(_Section):
    """The network, the wallet and how chunks go there.

    Attributes: lcd: addresses of REST servers of chain nodes ("LCD"), best first; the next is asked
        where one fails or lags. chain_id: of the network; a node of another chain is refused.
        mnemonic: the wallet's words, from the environment only: `JACKAL_MNEMONIC`. mnemonic_file: a
        file of mode 600 that holds them instead. copies: asked for in a post and paid for; the
        chain calls it max_proofs. required_copies: listed and read back before a chunk counts as
        stored; all that were asked for where not given. proof_type: of the Merkle tree. Chains
        before 5.1 prove type 0 only. gas_price: in ujkl. timeout_blocks: after so many blocks a
        transaction that was not included never will be. upload_seconds: how long a provider reads
        one upload (600, docs/how-to/connect-jackal.md); what is not through then is lost.
        proof_seconds: how long after an upload the chain may take to list the provider. bandwidth:
        bytes a second of all uploads together; 0 for no limit. `caf limit` changes it while runs go
        on. spend_cap: ujkl that all transactions of this ledger may come to; none where not given.
        Changed in the same way. warn_days: before the bought space ends, or will be full, the check
        `storage_plan_lasts` fails. keep_staged_windows: proof windows for which a located chunk
        stays in staging, where space allows. prove_per_run: located chunks that one run of the
        proof watch looks at. allow_private_addresses: whether providers at loopback, link-local,
        private or other addresses that are not public are
            connected to. Providers name their own hosts on the chain, so that this is for networks
            of one's own.
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
    allow_private_addresses: bool = False

    @model_validator(mode="after")
    def _required_within_copies(self) -> "JackalSettings":
        if self.required_copies is not None and self.required_copies > self.copies:
            raise ValueError(
                f"required_copies, {self.required_copies}, is larger than copies, {self.copies}"
            )
        return self

    @property
    def copies_required(self) -> int:
        """How many copies a chunk must have before it counts as stored."""
        return self.copies if self.required_copies is None else self.required_copies


class ChunkRunSettings(_Section):
    """How runs of chunks are launched and given up.

    Attributes: max_in_flight: chunk runs of one source that the sensor keeps going at once.
        attempts: runs of one chunk that may fail before it is parked. Those do not count that ended
        since S3, the chain with its
            providers, or the database gave no answer.
        keep_events_days: after which events and output of the sources' runs are removed from
        Dagster's storage; 0: never.
    """

    max_in_flight: Whole = Field(default=4, ge=1, le=10_000)
    attempts: Whole = Field(default=5, ge=1, le=10_000)
    keep_events_days: Whole = Field(default=0, ge=0, le=36_600)


class AlertSettings(_Section):
    """What an operator is told of, and where.

    Attributes: webhook: the URL to which each alert is posted as JSON. It may hold a token, so it
        comes from the environment only:
            `CAF_ALERTS__WEBHOOK`.
        mail_to: e-mail addresses that each alert is sent to.
        mail_from: the sender's.
        smtp_host, smtp_port: of the server that takes the e-mail.
        smtp_security: `starttls`, `tls` from the first byte on, or `none` for a server on this
        machine.
        smtp_user: with `smtp_password`, from the environment only (`CAF_ALERTS__SMTP_PASSWORD`); no
        login where empty.
        stalled_after: seconds without any change of a chunk, while chunks are under way.
        late_after: seconds beyond `max_wait` since a chunk was planned, and since the last whole
            inventory and the last look at a stored chunk.
        skipped_share: of a source's objects that may be skipped.
        repeat_after: seconds after which an alert that goes on is sent again; 0: never.
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
            raise ValueError("smtp_user and smtp_password are set together or not at all")
        if self.smtp_user and self.smtp_security == "none":
            raise ValueError(
                "smtp_password is sent in the clear unless smtp_security is 'starttls' or 'tls'"
            )
        return self


class Settings(BaseSettings):
    """Everything that can be set.

    Attributes: home: the folder that holds all that the pipeline keeps on this machine.
        database_url: `postgresql://…`; an embedded server under `home` where empty. It may hold a
        password, so it comes
            from the environment (`CAF_DATABASE_URL`) only.
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
    store: StoreSettings = StoreSettings()
    jackal: JackalSettings = JackalSettings()
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
                    f"sources.{other} and sources.{name} have one queue: each would delete the "
                    "events of the other's keys"
                )
        return self

    @model_validator(mode="after")
    def _each_job_has_one_source(self) -> "Settings":
        for name in self.sources:
            if (other := name.removeprefix("chunk-")) != name and other in self.sources:
                raise ValueError(
                    f"sources.{name} and sources.{other} would both have a job named "
                    f"repair_{name.replace('-', '_')}"
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
        """Let the environment win over the file, which comes in as keyword arguments."""
        return env_settings, init_settings

    @property
    def staging_folder(self) -> Path:
        """The folder in which a chunk is between packing and upload."""
        return self.staging or self.home / "staging"

    def source(self, name: str) -> SourceSettings:
        """Return the settings of one source, or raise SettingsError naming those that there are."""
        try:
            return self.sources[name]
        except KeyError:
            raise self.unknown_source(name) from None

    def unknown_source(self, name: str, others: Iterable[str] = ()) -> SettingsError:
        """Return the error for a source that is not there; `others` are sources that the ledger
        has, in the file or not.
        """
        known = sorted({*self.sources, *others})
        where = f"in {self._file}" if self._file else "in the environment, and there is no caf.toml"
        there = f"the sources are: {', '.join(known)}" if known else "there is none at all"
        near = nearest(name, known)
        return SettingsError(
            f"there is no source '{name}' {where}; {there}",
            hint=f"did you mean '{near}'?"
            if near
            else "docs/reference/settings.md says how a source is described",
        )


# --- the file
# ------------------------------------------------------------------------------------------


def _refuse_secrets(values: dict[str, Any], where: str, path: Path) -> None:
    for name, value in values.items():
        full = f"{where}{name}"
        if name in SECRETS:
            variable = "CAF_" + full.replace(".", "__").upper()
            raise SettingsError(
                f"{path}: {full} is a secret", hint=f"remove it there and set {variable} instead"
            )
        if isinstance(value, dict):
            _refuse_secrets(value, f"{full}.", path)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        # A byte order mark, which editors write on Windows, is not part of the text.
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise SettingsError(
            f"{path} is not UTF-8 text: line {line} has other bytes", hint="save it as UTF-8"
        ) from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(
            f"{path} is not valid TOML{_place(str(error))}",
            hint="toml.io shows how TOML is written",
        ) from error
    except RecursionError as error:
        raise SettingsError(f"{path} is not valid TOML: it is nested too deep") from error
    except IsADirectoryError as error:
        raise SettingsError(
            f"{path} cannot be read: it is a folder", hint="it must be a TOML file"
        ) from error
    except OSError as error:
        named = os.environ.get(CONFIG_VARIABLE) == str(path)
        raise SettingsError(
            f"{path} cannot be read: {error.strerror}",
            hint=f"{CONFIG_VARIABLE} names it" if named else "",
        ) from error
    _refuse_secrets(values, "", path)
    return values


_TOML_PLACE: Final = re.compile(
    r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", re.DOTALL
)


def _place(said: str) -> str:
    match = _TOML_PLACE.fullmatch(said)
    if not match:
        return f": {said}"
    where = f"line {match[2]}, column {match[3]}" if match[2] else "its end"
    return f" at {where}: {match[1][:1].lower()}{match[1][1:]}"


def _find_file(path: Path | None) -> tuple[Path, bool]:
    """Return where the file is or should be, and whether it is to be read.

    Raises:
        SettingsError: there is none, and the environment names no source either.
    """
    if path is not None:  # "", too, as of a variable that is not set: it is no file
        return Path(path).absolute(), True
    if variable := os.environ.get(CONFIG_VARIABLE):
        return Path(variable).absolute(), True
    try:
        file = Path(DEFAULT_CONFIG).absolute()
        file.lstat()
    except (FileNotFoundError, NotADirectoryError):
        if any(name.upper().startswith(SOURCES_VARIABLE) for name in os.environ):
            return file, False
        raise SettingsError(
            f"no {DEFAULT_CONFIG} was found: it was looked for in the working directory, "
            f"{_working_directory()}, and"
            f" {CONFIG_VARIABLE} names none",
            hint=f"go to the folder that has it, or set {CONFIG_VARIABLE} to its path; "
            "docs/reference/settings.md says what is in it",
        ) from None
    except OSError as error:
        raise SettingsError(
            f"{DEFAULT_CONFIG} cannot be looked for in the working directory: {error.strerror}"
        ) from error
    return file, True


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "which was removed"


def _absolute(settings: Settings, folder: Path) -> Settings:
    """Anchor relative paths, so that a change of working directory changes nothing."""
    store = settings.store.model_copy(update={"folder": folder / settings.store.folder})
    staging = folder / settings.staging if settings.staging else None
    words = settings.jackal.mnemonic_file
    jackal = (
        settings.jackal.model_copy(update={"mnemonic_file": folder / words})
        if words
        else settings.jackal
    )
    return settings.model_copy(
        update={
            "home": folder / settings.home,
            "staging": staging,
            "store": store,
            "jackal": jackal,
        }
    )


def load_settings(path: Path | None = None) -> Settings:
    """Read the settings. Nothing is made or changed.

    Args: path: the file; by default what `CAF_CONFIG` names, else `caf.toml` in the working
        directory, which may be absent where
            the environment names a source.

    Raises:
        SettingsError: naming each setting that is wrong, or where no file was found.
    """
    file, there = _find_file(path)
    values = _read_file(file) if there else {}
    origin = Origin(file, values, {name.upper(): value for name, value in os.environ.items()})
    if mistyped := mistyped_variable(Settings, origin, (CONFIG_VARIABLE,)):
        raise mistyped
    for name in values:
        if name.startswith("_"):  # an argument of pydantic's own, which no file may give
            raise SettingsError(f"{file}: {name} is not a setting", hint=DOCUMENTATION)
    try:
        settings = Settings(**values)
    except ValidationError as error:
        raise wrong_settings(error, Settings, origin, SECRETS) from None
    except NotJson:
        raise not_json(Settings, origin) from None
    settings = _absolute(settings, file.parent)
    settings._file = file if there else None
    return settings
