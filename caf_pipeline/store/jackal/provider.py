"""The HTTP API of one provider: status, uploads and their jobs, ranged downloads.

Source: "Provider HTTP API" in the notes on Jackal's protocol.
"""

import contextlib
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn, Protocol

import httpcore

from caf_pipeline.errors import IntegrityError, StoredChunkMissing, StoreError, StoreUnreachable
from caf_pipeline.records import PostRecord
from caf_pipeline.store.jackal.answers import quoted
from caf_pipeline.store.jackal.names import job_id
from caf_pipeline.store.jackal.provider_http import (
    ANSWER_SECONDS,
    NoBytes,
    ProviderAnswer,
    ask,
    exchange,
    header,
    parse_address,
    read_answer,
)
from caf_pipeline.system.http import ERRORS, READ_BYTES, Limit, no_check

PIECE_BYTES: Final = 1 << 20

PROBE_SECONDS: Final = 10.0
"""Timeout of the first request to a provider, before anything is sent to it."""

GATHERED_BYTES: Final = PIECE_BYTES - 2 * READ_BYTES
"""Bytes joined into a piece: one more read still fits into `PIECE_BYTES`."""

LARGE_PIECE_BYTES: Final = READ_BYTES // 2
"""Such reads are passed on unjoined: joining copies each byte twice."""

DIRECT_FROM_BYTES: Final = 8 << 20
"""Longer answers are read past httpcore, which copies each byte five times.

This gives up the connection, which costs milliseconds.
"""

DIRECT_READ_BYTES: Final = PIECE_BYTES // 2

STALL_SECONDS: Final = 60.0
"""Timeout for one piece. A MiB a minute is far too slow for any chunk."""

STATUS_SECONDS: Final = 2.0
"""Interval of polling a job while an upload's answer is awaited."""

MAX_RESUMED: Final = 3
LEAST_RESUMED_BYTES: Final = PIECE_BYTES // 4
"""Attempts in a row that bring less end a download, which might never end otherwise."""

RESUME_SECONDS: Final = (0.0, 0.25, 1.0)

_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_PAGES: Final = ("text/html", "application/json")
"""Content types of proxies' pages. Go sends a chunk, which begins with JSON, as text/plain."""
_UNKNOWN_ROOT: Final = re.compile(r"key not found|cid mapping|could not find", re.IGNORECASE)
_NO_ROUTE: Final = "404 page not found"
"""The answer of Go proxies to an unknown path. Providers know the download path."""
_MISMATCH: Final = re.compile(r"merkle does not match|doesn't match the chain", re.IGNORECASE)
_NO_SLOT: Final = re.compile(r"can't claim|cannot claim", re.IGNORECASE)
_NO_ROOM: Final = re.compile(r"no space left", re.IGNORECASE)  # from its operating system
_NOT_ON_CHAIN: Final = re.compile(
    r"no such file on chain|failed to find file on chain", re.IGNORECASE
)
_ERROR_PREFIX: Final = "Error"


@dataclass(frozen=True, slots=True)
class Job:
    """A provider's report on an upload. `progress` is in percent; an error never raises it."""

    progress: float
    status: str

    @property
    def done(self) -> bool:
        """The file is stored and its proof queued. Only `done` and `error` are final."""
        return self.progress >= 100 and not self.error

    @property
    def error(self) -> str:
        return self.status if self.status.startswith(_ERROR_PREFIX) else ""

    @property
    def refuses_bytes(self) -> bool:
        return bool(self.error and _MISMATCH.search(self.error))

    @property
    def finds_no_slot(self) -> bool:
        """Other providers have all copies."""
        return bool(self.error and _NO_SLOT.search(self.error))

    @property
    def has_no_room(self) -> bool:
        return bool(self.error and _NO_ROOM.search(self.error))

    @property
    def sees_no_post(self) -> bool:
        return bool(self.error and _NOT_ON_CHAIN.search(self.error))


DONE: Final = Job(100, "done!")
ACCEPTED: Final = Job(0, "accepted")


class UploadControl(Protocol):
    """Throttles an upload, or ends it by raising."""

    def check(self) -> None:
        """Raise to end the upload."""

    def piece_bytes(self) -> int: ...

    def sent(self, size_bytes: int) -> None:
        """Count sent bytes. Returns when more may be sent."""


@dataclass(frozen=True, slots=True)
class Sending:
    """A file to send to a provider.

    Attributes:
        staged: its first `posting.stored_size_bytes` bytes are sent.
        answer_seconds: how long a provider may read, and then how long it may take to answer.
        sent_before: a finished job may be an old one.
    """

    posting: PostRecord
    staged: Path
    control: UploadControl
    proof_type: int
    answer_seconds: float
    sent_before: bool = False


@dataclass(frozen=True, slots=True)
class UploadForm:
    """The bytes around the file in an upload's body."""

    head: bytes
    tail: bytes
    content_type: str


def upload_form(posting: PostRecord, *, proof_type: int | None = None) -> UploadForm:
    """Return the form of an upload, whose file part is the last. None leaves out `type`."""
    boundary = secrets.token_hex(24)
    fields = {
        "sender": posting.owner,
        "merkle": posting.merkle_root.hex(),
        "start": str(posting.start),
    }
    if proof_type is not None:
        fields["type"] = str(proof_type)
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    ]
    parts.append(
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; '
        f'filename="{posting.merkle_root.hex()}"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n"
    )
    return UploadForm(
        "".join(parts).encode(),
        f"\r\n--{boundary}--\r\n".encode(),
        f"multipart/form-data; boundary={boundary}",
    )


def _join_pieces(pieces: Iterator[bytes], size_bytes: int) -> bytes:
    first = next(pieces, b"")
    if len(first) >= LARGE_PIECE_BYTES:
        return first
    joined = bytearray(first)
    with contextlib.suppress(*ERRORS):  # pass on what arrived; the next call returns b""
        while joined and len(joined) < size_bytes and (piece := next(pieces, b"")):
            joined += piece
    return bytes(joined)


def _iter_body(response: httpcore.Response, size_bytes: int, limit: Limit) -> Iterator[bytes]:
    pieces = response.iter_stream()
    framed = header(response, "content-length") == str(size_bytes) and not header(
        response, "transfer-encoding"
    )
    if size_bytes < DIRECT_FROM_BYTES or not framed:
        yield from pieces
        return
    # httpcore reads no further than its first piece, so the rest is still in the socket.
    piece: bytes = next(pieces, b"")
    stream = response.extensions["network_stream"]
    while piece:
        yield piece
        size_bytes -= len(piece)
        piece = stream.read(DIRECT_READ_BYTES, timeout=limit) if size_bytes > 0 else b""


def _download_path(posting: PostRecord) -> str:
    return f"/download/{posting.merkle_root.hex()}"


class _JobDone(Exception):
    pass


_MOST_PROGRESS: Final = 1e6  # percent


def _json(answer: ProviderAnswer) -> dict[str, Any]:
    try:
        value = json.loads(answer.body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


@dataclass
class ProviderClient:
    """A provider. Safe for several threads. Faults of the protocol raise StoreUnreachable."""

    url: str
    may_be_private: bool = False

    def __post_init__(self) -> None:
        self.address = parse_address(self.url, may_be_private=self.may_be_private)
        self._pool = self.address.pool()

    def close(self) -> None:
        self._pool.close()

    def version(self, check: Callable[[], None] = no_check) -> str:
        """May be "", if the provider answers without a version."""
        answer = ask(self.address, "/version", seconds=PROBE_SECONDS, check=check)
        if answer.status >= 500:
            raise StoreUnreachable(f"provider {self.address} answers with {answer.status}")
        version = _json(answer).get("version")
        return quoted(version) if isinstance(version, str) else ""

    def free_bytes(self, check: Callable[[], None] = no_check) -> int | None:
        """None if it does not answer in time: a provider reads all its proofs to answer."""
        try:
            answer = ask(self.address, "/api/client/space", seconds=PROBE_SECONDS, check=check)
        except StoreUnreachable:
            return None
        free_bytes = _json(answer).get("free_space")
        return (
            free_bytes if isinstance(free_bytes, int) and not isinstance(free_bytes, bool) else None
        )

    def job(self, posting: PostRecord, check: Callable[[], None] = no_check) -> Job | None:
        """None if unknown, or if the answer's body is incomplete."""
        name = job_id(posting.merkle_root, posting.owner, posting.start)
        answer = ask(self.address, f"/v2/status/{name}", check=check)
        if answer.status in (404, 405):
            return None
        fields = _json(answer)
        progress = fields.get("progress")
        if (
            answer.status != 200
            or not isinstance(progress, int | float)
            or not abs(progress) <= _MOST_PROGRESS  # true for NaN, too
        ):
            raise StoreUnreachable(
                f"provider {self.address} answers a status request with {answer.status} and no "
                "progress"
            )
        status = fields.get("status")
        return Job(float(progress), quoted(status, 300) if isinstance(status, str) else "")

    def upload(self, sending: Sending) -> Job:
        """Send the file. `job` follows an accepted job. On StoreUnreachable it may be stored."""
        answer = self._send("/v2/upload", upload_form(sending.posting), sending)
        if isinstance(answer, ProviderAnswer) and answer.status in (404, 405):
            form = upload_form(sending.posting, proof_type=sending.proof_type)
            answer = self._send("/upload", form, sending)
        if isinstance(answer, Job):
            return answer
        if answer.status == 202:
            return ACCEPTED
        if answer.status == 200:
            return DONE
        error = _json(answer).get("error")
        reason = quoted(error, 300) if isinstance(error, str) else ""
        job = Job(0, f"{_ERROR_PREFIX}: {reason}")
        if answer.status == 500 and (
            job.refuses_bytes or job.finds_no_slot or job.sees_no_post or job.has_no_room
        ):
            return job
        raise StoreUnreachable(
            f"provider {self.address} answers an upload with {answer.status} {reason}".rstrip()
        )

    def _send(self, path: str, form: UploadForm, sending: Sending) -> "ProviderAnswer | Job":
        size_bytes = len(form.head) + sending.posting.stored_size_bytes + len(form.tail)
        headers = {
            "Content-Type": form.content_type,
            "Content-Length": str(size_bytes),
            "Connection": "close",
        }
        limit = Limit(STALL_SECONDS, check=sending.control.check)
        try:
            with (
                sending.staged.open("rb", buffering=0) as file,
                self.address.pool() as pool,
                exchange(
                    pool,
                    self.address,
                    path,
                    limit,
                    method="POST",
                    headers=headers,
                    body=self._body(form, sending, file, limit),
                ) as response,
            ):
                return read_answer(response, self.address)
        except _JobDone:
            return DONE

    def _body(
        self, form: UploadForm, sending: Sending, file: BinaryIO, limit: Limit
    ) -> Iterator[bytes]:
        control, remaining = sending.control, sending.posting.stored_size_bytes
        reads_until = time.monotonic() + sending.answer_seconds + STALL_SECONDS
        yield form.head
        while remaining:
            if time.monotonic() > reads_until:
                raise httpcore.WriteTimeout("it reads longer than any provider does")
            limit.renew(STALL_SECONDS)
            piece = file.read(min(control.piece_bytes(), remaining))
            if not piece:
                raise StoreError(
                    f"the staged file {file.name} ends before its size",
                    hint="run the partition again: it packs the chunk again",
                )
            yield piece
            control.sent(len(piece))
            remaining -= len(piece)
        limit.renew(STALL_SECONDS)
        yield form.tail
        limit.renew(sending.answer_seconds)
        if sending.sent_before:
            return
        next_poll = time.monotonic() + STATUS_SECONDS

        def check_with_job() -> None:
            # The answer may get lost although the file is stored, so poll the job, too.
            nonlocal next_poll
            control.check()
            if time.monotonic() < next_poll:
                return
            with contextlib.suppress(StoreUnreachable):
                job = self.job(sending.posting, control.check)
                if job and job.done:
                    raise _JobDone
            next_poll = time.monotonic() + STATUS_SECONDS

        limit.check = check_with_job

    def download_url(self, posting: PostRecord) -> str:
        return f"{self.address}{_download_path(posting)}"

    def download(
        self,
        posting: PostRecord,
        start_byte: int,
        end_byte: int,
        check: Callable[[], None] = no_check,
    ) -> Iterator[bytes]:
        """Yield `[start_byte, end_byte)` of the file in pieces of at most 1 MiB.

        A broken or short download is resumed, but not after a timeout without progress: another
        provider is faster.

        Raises:
            StoredChunkMissing: the provider does not have the root.
            IntegrityError: its file has another size.
        """
        position, failures = start_byte, 0
        while position < end_byte:
            before = position
            try:
                for piece in self._range(posting, position, end_byte, check):
                    position += len(piece)
                    yield piece
            except StoreUnreachable as error:
                failures = failures + 1 if position - before < LEAST_RESUMED_BYTES else 0
                if failures >= MAX_RESUMED or (
                    failures and isinstance(error.__cause__, httpcore.TimeoutException)
                ):
                    raise
                time.sleep(RESUME_SECONDS[failures])
                check()

    def has_lost(
        self,
        posting: PostRecord,
        start_byte: int,
        end_byte: int,
        check: Callable[[], None] = no_check,
    ) -> bool:
        """Return whether the provider is online but again returns nothing of a range.

        Requests the range once, between two requests of the version. `LEAST_RESUMED_BYTES` prove
        that the beginning is not lost. An error status other than 500 says nothing about the bytes.
        Takes up to `ANSWER_SECONDS` if nothing comes, `STALL_SECONDS` if it stops, and twice
        `PROBE_SECONDS`.
        """
        try:
            self.version(check)
            received = 0
            try:
                for piece in self._range(posting, start_byte, end_byte, check):
                    received += len(piece)
                    if received >= LEAST_RESUMED_BYTES:
                        return False
            except NoBytes:
                self.version(check)
                return True
        except (StoreError, IntegrityError):
            pass
        return False

    def _range(
        self, posting: PostRecord, start_byte: int, end_byte: int, check: Callable[[], None]
    ) -> Iterator[bytes]:
        limit = Limit(ANSWER_SECONDS, check=check)
        headers = {"Range": f"bytes={start_byte}-{end_byte - 1}", "Accept-Encoding": "identity"}
        with exchange(
            self._pool, self.address, _download_path(posting), limit, headers=headers
        ) as response:
            remaining, skipped = self._promised(response, posting, start_byte, end_byte)
            missing = end_byte - start_byte - remaining
            pieces = _iter_body(response, skipped + remaining, limit)
            was_late = False
            while remaining:
                limit.renew(STALL_SECONDS)
                piece = _join_pieces(pieces, min(GATHERED_BYTES, skipped + remaining))
                if not piece and was_late:
                    raise httpcore.ReadTimeout(
                        "it took too long"
                    )  # this cut the piece before short
                if not piece:
                    raise NoBytes(
                        f"provider {self.address} broke off {remaining} bytes before the end of a "
                        "download"
                    )
                was_late = limit.is_over
                requested = piece[skipped : skipped + remaining]
                skipped = max(0, skipped - len(piece))
                remaining -= len(requested)
                if requested:
                    yield requested
            # Reaching the end of the answer keeps the connection. Do not wait for further bytes.
            limit.renew(0)
            with contextlib.suppress(httpcore.ReadTimeout):
                next(pieces, b"")
        if missing:
            raise NoBytes(
                f"provider {self.address} ended a download {missing} bytes before the range's end"
            )

    def _promised(
        self, response: httpcore.Response, posting: PostRecord, start_byte: int, end_byte: int
    ) -> tuple[int, int]:
        size_bytes: int | None = None
        coding = header(response, "content-encoding") or "identity"
        if coding != "identity" and response.status in (200, 206):
            # A proxy compresses; the provider may still have the right bytes.
            raise StoreUnreachable(
                f"provider {self.address} compresses a download ({quoted(coding)})"
            )
        if response.status == 206:
            match = _CONTENT_RANGE.fullmatch(header(response, "content-range"))
            if not match or int(match[1]) != start_byte or int(match[2]) < start_byte:
                raise StoreUnreachable(f"provider {self.address} answers with another range")
            size_bytes = int(match[3])
            promised, skipped = min(int(match[2]) + 1, end_byte) - start_byte, 0
        elif response.status == 200:
            length = header(response, "content-length")
            size_bytes = int(length) if length else None
            promised, skipped = end_byte - start_byte, start_byte
        else:
            self._raise_refusal(response)
        if size_bytes is not None and size_bytes != posting.stored_size_bytes:
            if response.status == 200 and header(response, "content-type").startswith(_PAGES):
                raise StoreUnreachable(
                    f"provider {self.address} answers a download with a page of {size_bytes} bytes"
                )
            raise IntegrityError(
                f"the file {posting.merkle_root.hex()} has {size_bytes} bytes at provider"
                f" {self.address} instead of {posting.stored_size_bytes}"
            )
        return promised, skipped

    def _raise_refusal(self, response: httpcore.Response) -> NoReturn:
        answer = read_answer(response, self.address)
        text = quoted(answer.body[:1000].decode("utf-8", "replace"), 300)
        is_page = header(response, "content-type").startswith("text/html") or text.startswith(
            _NO_ROUTE
        )
        if (answer.status == 404 and not is_page) or (
            answer.status == 500 and _UNKNOWN_ROOT.search(text)
        ):
            raise StoredChunkMissing(f"provider {self.address} does not have the file")
        if answer.status == 416:
            raise IntegrityError(
                f"the file at provider {self.address} is shorter than on the chain"
            )
        error_class = NoBytes if answer.status == 500 else StoreUnreachable
        raise error_class(
            f"provider {self.address} answers a download with {answer.status} {text}".rstrip()
        )
