"""One provider's HTTP: what it says of itself, an upload and its job, and ranged downloads.

An upload is a form of known length whose file part comes last, streamed from the staged file with
constant memory. Source: "Provider HTTP API" in the notes on Jackal's protocol.
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
from caf_pipeline.store.protocol import PostRecord
from caf_pipeline.system.http import ERRORS, READ_BYTES, Limit, no_check

PIECE_BYTES: Final = 1 << 20

PROBE_SECONDS: Final = 10.0
"""For a provider to say anything at all, before anything is sent to it."""

GATHERED_BYTES: Final = PIECE_BYTES - 2 * READ_BYTES
"""Of a download before a piece of it is handed on: one read more, and what was left of the one
before, still fit into it.
"""

LARGE_PIECE_BYTES: Final = READ_BYTES // 2
"""What came at once and is no smaller is handed on as it is: gathering copies each byte twice."""

DIRECT_FROM_BYTES: Final = 8 << 20
"""Of a longer answer all but the beginning is read past httpcore, which copies each byte five
times. Its connection is not used again: another one is some milliseconds, of a download that takes
tenths of a second at 10 Gbit/s with TLS.
"""

DIRECT_READ_BYTES: Final = PIECE_BYTES // 2

STALL_SECONDS: Final = 60.0
"""For a piece of a transfer. A MiB a minute is far below any rate at which a chunk could be
moved.
"""

STATUS_SECONDS: Final = 2.0
"""Between two looks at a job while the answer to an upload is waited for."""

MAX_RESUMED: Final = 3
LEAST_RESUMED_BYTES: Final = PIECE_BYTES // 4
"""Attempts in a row at a download that come no further than this, before it is left to another
provider: one that breaks off after each byte would else never end.
"""

RESUME_SECONDS: Final = (0.0, 0.25, 1.0)

_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_PAGES: Final = ("text/html", "application/json")
"""What a proxy or an API answers with, also as if all were well.

Servers in Go call a chunk text/plain: it begins with JSON.
"""
_UNKNOWN_ROOT: Final = re.compile(r"key not found|cid mapping|could not find", re.IGNORECASE)
_NO_ROUTE: Final = "404 page not found"
"""What servers in Go, a proxy whose provider is away among them, say of an unknown path; a provider
knows that of a download.
"""
_MISMATCH: Final = re.compile(r"merkle does not match|doesn't match the chain", re.IGNORECASE)
_NO_SLOT: Final = re.compile(r"can't claim|cannot claim", re.IGNORECASE)
_NO_ROOM: Final = re.compile(
    r"no space left", re.IGNORECASE
)  # what the operating system says to it
_NOT_ON_CHAIN: Final = re.compile(
    r"no such file on chain|failed to find file on chain", re.IGNORECASE
)
_ERROR_PREFIX: Final = "Error"


# --- what a provider says ---


@dataclass(frozen=True, slots=True)
class Job:
    """What a provider says of an upload.

    Nothing but `done` and `error` ends it: an error never raises `progress`.

    Attributes:
        progress: percent.
        status: its words.
    """

    progress: float
    status: str

    @property
    def done(self) -> bool:
        """Whether it says that it has stored the file and asked the chain for its proof."""
        return self.progress >= 100 and not self.error

    @property
    def error(self) -> str:
        """What it says went wrong; "" where nothing did."""
        return self.status if self.status.startswith(_ERROR_PREFIX) else ""

    @property
    def refuses_bytes(self) -> bool:
        """Whether it says that the bytes are not those of the root."""
        return bool(self.error and _MISMATCH.search(self.error))

    @property
    def finds_no_slot(self) -> bool:
        """Whether it says that other providers have all copies."""
        return bool(self.error and _NO_SLOT.search(self.error))

    @property
    def has_no_room(self) -> bool:
        """Whether it says that its disk is full."""
        return bool(self.error and _NO_ROOM.search(self.error))

    @property
    def sees_no_post(self) -> bool:
        """Whether it says that its chain node does not know the post."""
        return bool(self.error and _NOT_ON_CHAIN.search(self.error))


DONE: Final = Job(100, "done!")
ACCEPTED: Final = Job(0, "accepted")


class UploadControl(Protocol):
    """Controls an upload: slows it down, or ends it by raising."""

    def check(self) -> None:
        """Raise what ends the upload."""
        ...

    def piece_bytes(self) -> int:
        """Return how many bytes to send next."""
        ...

    def sent(self, size_bytes: int) -> None:
        """Count bytes that were sent; returns when more may be."""
        ...


@dataclass(frozen=True, slots=True)
class Sending:
    """A file that is sent to a provider.

    Attributes: posting: the file on the chain. staged: the file; `posting.stored_size_bytes` of it
        are sent. control: told each piece. proof_type: of the root. answer_seconds: how long a
        provider reads, and how long to wait for the answer once everything is sent. known_before:
        the provider was sent this file before, so that a job's end may be that of the last time.
    """

    posting: PostRecord
    staged: Path
    control: UploadControl
    proof_type: int
    answer_seconds: float
    known_before: bool = False


@dataclass(frozen=True, slots=True)
class UploadForm:
    """The bytes before and after the file in an upload's body."""

    head: bytes
    tail: bytes
    content_type: str


def upload_form(posting: PostRecord, *, proof_type: int | None = None) -> UploadForm:
    """Return the form of an upload of this file; the field `type` is left out where None."""
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


def _gathered(pieces: Iterator[bytes], size_bytes: int) -> bytes:
    """Return the next bytes, so many or some more; fewer where the answer ends or breaks off, and
    none after that.
    """
    first = next(pieces, b"")
    if len(first) >= LARGE_PIECE_BYTES:
        return first
    gathered = bytearray(first)
    with contextlib.suppress(*ERRORS):  # what came is handed on; behind it there is nothing
        while gathered and len(gathered) < size_bytes and (piece := next(pieces, b"")):
            gathered += piece
    return bytes(gathered)


def _body_of(response: httpcore.Response, size_bytes: int, limit: Limit) -> Iterator[bytes]:
    """Yield an answer's body as it comes, of which `size_bytes` are wanted."""
    pieces = response.iter_stream()
    framed = header(response, "content-length") == str(size_bytes) and not header(
        response, "transfer-encoding"
    )
    if size_bytes < DIRECT_FROM_BYTES or not framed:
        yield from pieces
        return
    # httpcore reads no more for the first piece than it gives, so that all that follows is still at
    # the socket.
    piece: bytes = next(pieces, b"")
    stream: httpcore.NetworkStream = response.extensions["network_stream"]
    while piece:
        yield piece
        size_bytes -= len(piece)
        piece = stream.read(DIRECT_READ_BYTES, timeout=limit) if size_bytes > 0 else b""


def _download_path(posting: PostRecord) -> str:
    return f"/download/{posting.merkle_root.hex()}"


class _Learned(Exception):
    """The job's status told the end of an upload before its answer came."""


_MOST_PROGRESS: Final = 1e6  # percent; what is far beyond is no progress, and may be no float


def _json(answer: ProviderAnswer) -> dict[str, Any]:
    try:
        value = json.loads(answer.body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


# --- a provider ---


@dataclass
class ProviderClient:
    """A provider at an address. Safe for several threads.

    Every method raises StoreUnreachable where the provider does not answer, or not as a provider
    would.

    Attributes:
        url: as the provider gave it to the chain.
        may_be_private: whether its host may have an address that is not public.
    """

    url: str
    may_be_private: bool = False

    def __post_init__(self) -> None:
        self.address = parse_address(self.url, may_be_private=self.may_be_private)
        self._pool = self.address.pool()

    def close(self) -> None:
        """Close what is idle."""
        self._pool.close()

    def version(self, check: Callable[[], None] = no_check) -> str:
        """Ask whether it is there, and for its version; "" where it answers and does not tell.

        Raises:
            StoreUnreachable: it does not answer, or something before it says that it is down.
        """
        answer = ask(self.address, "/version", seconds=PROBE_SECONDS, check=check)
        if answer.status >= 500:
            raise StoreUnreachable(f"provider {self.address} answers with {answer.status}")
        told = _json(answer).get("version")
        return quoted(told) if isinstance(told, str) else ""

    def free_bytes(self, check: Callable[[], None] = no_check) -> int | None:
        """Return its free space; None where it gives none in time: to answer, a provider reads all
        its proofs.
        """
        try:
            told = _json(
                ask(self.address, "/api/client/space", seconds=PROBE_SECONDS, check=check)
            ).get("free_space")
        except StoreUnreachable:
            return None
        return told if isinstance(told, int) and not isinstance(told, bool) else None

    def job(self, posting: PostRecord, check: Callable[[], None] = no_check) -> Job | None:
        """Return what it says of the upload of this file; None where it knows of none, or of a body
        that is not through.
        """
        name = job_id(posting.merkle_root, posting.owner, posting.start)
        answer = ask(self.address, f"/v2/status/{name}", check=check)
        if answer.status in (404, 405):
            return None
        told = _json(answer)
        progress = told.get("progress")
        if (
            answer.status != 200
            or not isinstance(progress, int | float)
            or not abs(progress) <= _MOST_PROGRESS
        ):  # NaN
            raise StoreUnreachable(
                f"provider {self.address} answered {answer.status} when asked for an upload's "
                "status"
            )
        status = told.get("status")
        return Job(float(progress), quoted(status, 300) if isinstance(status, str) else "")

    def upload(self, sending: Sending) -> Job:
        """Send the file and return what it says of it: done, an error, or accepted, and then `job`
        tells more.

        Raises: StoreUnreachable: also where the connection broke; whether the file is stored has to
            be asked then.
        """
        answer = self._send("/v2/upload", upload_form(sending.posting), sending)
        if isinstance(answer, ProviderAnswer) and answer.status in (404, 405):
            form = upload_form(sending.posting, proof_type=sending.proof_type)
            answer = self._send("/upload", form, sending)
        return self._outcome(answer)

    def _outcome(self, answer: "ProviderAnswer | Job") -> Job:
        if isinstance(answer, Job):
            return answer
        if answer.status == 202:
            return ACCEPTED
        if answer.status == 200:
            return DONE
        error = _json(answer).get("error")
        told = quoted(error, 300) if isinstance(error, str) else ""
        job = Job(0, f"{_ERROR_PREFIX}: {told}")
        if answer.status == 500 and (
            job.refuses_bytes or job.finds_no_slot or job.sees_no_post or job.has_no_room
        ):
            return job
        raise StoreUnreachable(
            f"provider {self.address} answers an upload with {answer.status} {told}".rstrip()
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
        except _Learned:
            return DONE

    def _body(
        self, form: UploadForm, sending: Sending, file: BinaryIO, limit: Limit
    ) -> Iterator[bytes]:
        """Yield the body; a piece was sent when the next is asked for."""
        control, left = sending.control, sending.posting.stored_size_bytes
        reads_until = time.monotonic() + sending.answer_seconds + STALL_SECONDS
        yield form.head
        while left:
            if time.monotonic() > reads_until:
                raise httpcore.WriteTimeout("it reads longer than any provider does")
            limit.renew(STALL_SECONDS)
            piece = file.read(min(control.piece_bytes(), left))
            if not piece:
                raise StoreError(
                    f"the staged file {file.name} ends before its size",
                    hint="run the partition again: it is packed again",
                )
            yield piece
            control.sent(len(piece))
            left -= len(piece)
        limit.renew(STALL_SECONDS)
        yield form.tail
        limit.renew(sending.answer_seconds)
        if not sending.known_before:
            limit.check = self._looking_for_end(sending.posting, control.check)

    def _looking_for_end(
        self, posting: PostRecord, check: Callable[[], None]
    ) -> Callable[[], None]:
        """Return a check that also asks for the job now and then: an answer may get lost while the
        file is stored.
        """
        due = time.monotonic() + STATUS_SECONDS

        def look() -> None:
            nonlocal due
            check()
            if time.monotonic() < due:
                return
            with contextlib.suppress(StoreUnreachable):
                job = self.job(posting, check)
                if job and job.done:
                    raise _Learned
            due = time.monotonic() + STATUS_SECONDS

        return look

    # --- downloads ---

    def download_url(self, posting: PostRecord) -> str:
        """Return where anybody reads the file, by ranges."""
        return f"{self.address}{_download_path(posting)}"

    def download(
        self,
        posting: PostRecord,
        start_byte: int,
        end_byte: int,
        check: Callable[[], None] = no_check,
    ) -> Iterator[bytes]:
        """Yield `[start_byte, end_byte)` of the file in pieces of at most 1 MiB.

        What breaks off, also without an error, goes on where it broke. A provider that let a time
        limit pass without bytes is not asked again: another one is sooner.

        Raises: StoredChunkMissing: it does not have the root. IntegrityError: its file has another
            size.
        """
        position, in_vain = start_byte, 0
        while position < end_byte:
            before = position
            try:
                for piece in self._range(posting, position, end_byte, check):
                    position += len(piece)
                    yield piece
            except StoreUnreachable as error:
                in_vain = in_vain + 1 if position - before < LEAST_RESUMED_BYTES else 0
                if in_vain >= MAX_RESUMED or (
                    in_vain and isinstance(error.__cause__, httpcore.TimeoutException)
                ):
                    raise
                time.sleep(RESUME_SECONDS[in_vain])
                check()

    def has_lost(
        self,
        posting: PostRecord,
        start_byte: int,
        end_byte: int,
        check: Callable[[], None] = no_check,
    ) -> bool:
        """Return whether the provider answers other requests, but again sends nothing of a range
        that it did not send before.

        The range is asked for once more, between two questions for the version. A provider that
        sends `LEAST_RESUMED_BYTES` of it has not lost its beginning. An answer with a status other
        than 500, such as 503, says nothing of the bytes. Takes `ANSWER_SECONDS` for a provider that
        sends nothing, `STALL_SECONDS` for one that stops, and twice `PROBE_SECONDS`.
        """
        try:
            self.version(check)
            if self._sends(posting, start_byte, end_byte, check):
                return False
            self.version(check)
        except (StoreError, IntegrityError):
            return False
        return True

    def _sends(
        self, posting: PostRecord, start_byte: int, end_byte: int, check: Callable[[], None]
    ) -> bool:
        """Return whether one request gives the range, or `LEAST_RESUMED_BYTES` of it."""
        received = 0
        try:
            for piece in self._range(posting, start_byte, end_byte, check):
                received += len(piece)
                if received >= LEAST_RESUMED_BYTES:
                    return True
        except NoBytes:
            return False
        return True

    def _range(
        self, posting: PostRecord, start_byte: int, end_byte: int, check: Callable[[], None]
    ) -> Iterator[bytes]:
        """Yield what one request gives of the range, and raise where that is not all of it."""
        limit = Limit(ANSWER_SECONDS, check=check)
        headers = {"Range": f"bytes={start_byte}-{end_byte - 1}", "Accept-Encoding": "identity"}
        with exchange(
            self._pool, self.address, _download_path(posting), limit, headers=headers
        ) as response:
            left, skipped = self._promised(response, posting, start_byte, end_byte)
            missing = end_byte - start_byte - left
            pieces = _body_of(response, skipped + left, limit)
            was_late = False
            while left:
                limit.renew(STALL_SECONDS)
                piece = _gathered(pieces, min(GATHERED_BYTES, skipped + left))
                if not piece and was_late:
                    raise httpcore.ReadTimeout("it took too long")  # which ended the piece before
                if not piece:
                    raise NoBytes(
                        f"provider {self.address} broke off {left} bytes before the end of a "
                        "download"
                    )
                was_late = limit.is_over
                wanted = piece[skipped : skipped + left]
                skipped = max(0, skipped - len(piece))
                left -= len(wanted)
                if wanted:
                    yield wanted
            limit.renew(
                0
                # an answer that ends here is known to without another byte, and its connection is
                # kept
            )
            with contextlib.suppress(httpcore.ReadTimeout):
                next(pieces, b"")
        if missing:
            raise NoBytes(
                f"provider {self.address} ended a download {missing} bytes before the end of the "
                "range"
            )

    def _promised(
        self, response: httpcore.Response, posting: PostRecord, start_byte: int, end_byte: int
    ) -> tuple[int, int]:
        """Return how many bytes of the range the answer promises, and how many others come before
        them.
        """
        total: int | None = None
        if (
            coding := header(response, "content-encoding") or "identity"
        ) != "identity" and response.status in (200, 206):
            # By what is before it: what it stores itself is not known by that.
            raise StoreUnreachable(
                f"provider {self.address} answers a download compressed ({quoted(coding)}), not "
                "with the file"
            )
        if response.status == 206:
            match = _CONTENT_RANGE.fullmatch(header(response, "content-range"))
            if not match or int(match[1]) != start_byte or int(match[2]) < start_byte:
                raise StoreUnreachable(
                    f"provider {self.address} answers with another range than was asked for"
                )
            total, promised, skipped = (
                int(match[3]),
                min(int(match[2]) + 1, end_byte) - start_byte,
                0,
            )
        elif response.status == 200:
            length = header(response, "content-length")
            total, promised, skipped = (
                int(length) if length else None,
                end_byte - start_byte,
                start_byte,
            )
        else:
            self._refused(response)
        if total is not None and total != posting.stored_size_bytes:
            if response.status == 200 and header(response, "content-type").startswith(_PAGES):
                raise StoreUnreachable(
                    f"provider {self.address} answers a download with a page of {total} bytes, not "
                    "the file"
                )
            raise IntegrityError(
                f"the file {posting.merkle_root.hex()} has {total} bytes at provider {self.address}"
                f" instead of {posting.stored_size_bytes}"
            )
        return promised, skipped

    def _refused(self, response: httpcore.Response) -> NoReturn:
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
                f"the file at provider {self.address} ends before what the chain says"
            )
        failed = NoBytes if answer.status == 500 else StoreUnreachable
        raise failed(
            f"provider {self.address} answers a download with {answer.status} {text}".rstrip()
        )
