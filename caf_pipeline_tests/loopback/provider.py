"""A provider's HTTP: both versions of uploads, jobs, downloads.

Every answer is `text/plain`, except downloads. A JSON text ends with a line feed.
Routes accept any method. Texts and the order of checks are a real provider's (sequoia 017bbee). The
answer of a full provider is a guess: it was not measured.
"""

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from caf_pipeline.caf.merkle import merkle_root
from caf_pipeline_tests.loopback.blobs import BlobStore
from caf_pipeline_tests.loopback.blocks import Chain
from caf_pipeline_tests.loopback.chain_state import PostedFile
from caf_pipeline_tests.loopback.http_server import Cut, Request
from caf_pipeline_tests.loopback.misbehaviour import ProviderConduct
from caf_pipeline_tests.loopback.serving import TEXT, Delivery, serve_file
from caf_pipeline_tests.loopback.uploads import Form, FormError, read_form

HASHED_TYPES: Final = (0, 3)
LATE_PROOF_BLOCKS: Final = 3
"""A file of the wrong size is proven late, in the round over all files of the provider."""

NO_SPACE: Final = "no space left on device"


class _Failed(Exception):
    """An upload fails."""

    def __init__(
        self, message: str, *, status: int = 500, progress: int = 0, job_status: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        self.progress = progress
        self.job_status = job_status


@dataclass(slots=True)
class _Job:
    merkle: bytes
    owner: str
    start: int
    progress: int = 10
    status: str = "Started upload"
    cid: str = ""
    done_at: float | None = None

    def answer(self) -> dict[str, Any]:
        return {
            "merkle": base64.b64encode(self.merkle).decode(),
            "owner": self.owner,
            "start": self.start,
            "cid": self.cid,
            "progress": self.progress,
            "status": self.status,
        }


class Provider:
    """A provider. `address` is its name on the chain."""

    def __init__(self, index: int, address: str, chain: Chain, blobs: BlobStore) -> None:
        self.index = index
        self.address = address
        self.blobs = blobs
        self._chain = chain
        self._lock = threading.Lock()
        self._jobs: dict[str, _Job] = {}  # in memory only: a restart forgets them
        self._routes: list[tuple[re.Pattern[str], Callable[..., None]]] = [
            (re.compile(r"/"), self._index),
            (re.compile(r"/version"), self._version),
            (re.compile(r"/upload"), self._upload),
            (re.compile(r"/v2/upload"), self._upload_v2),
            (re.compile(r"/v2/status/([^/]+)"), self._status),
            (re.compile(r"/download/([^/]+)"), self._download),
            (re.compile(r"/api/client/space"), self._space),
        ]

    @property
    def conduct(self) -> ProviderConduct:
        """Its ordered behaviour."""
        return self._chain.orders.provider(self.index)

    def serve(self, request: Request) -> None:
        """Answer a request. Raises Cut."""
        conduct = self.conduct
        if conduct.refuse:
            raise Cut
        if conduct.hang_seconds:
            time.sleep(conduct.hang_seconds)
        if conduct.fail:
            _answer(request, conduct.fail, {"error": "this provider fails by order"})
            return
        if conduct.nonsense:
            request.nonsense(conduct.nonsense)
            return
        for pattern, route in self._routes:
            if match := pattern.fullmatch(request.route):
                route(request, *match.groups())
                return
        request.answer(404, b"404 page not found\n", TEXT, X_Content_Type_Options="nosniff")

    # --- small answers ---

    def _index(self, request: Request) -> None:
        _answer(request, 200, {"status": "online", "address": self.address})

    def _version(self, request: Request) -> None:
        _answer(
            request,
            200,
            {"version": "loopback", "build": "", "chain-id": self._chain.options.chain_id},
        )

    def _space(self, request: Request) -> None:
        total, used = self._chain.options.provider_space, self.blobs.used_bytes
        free = max(0, total - used) if self.conduct.room is None else self.conduct.room
        _answer(request, 200, {"total_space": total, "used_space": used, "free_space": free})

    def _status(self, request: Request, job_id: str) -> None:
        with self._lock:
            self._forget_jobs()
            job = None if self.conduct.lose_jobs else self._jobs.get(job_id)
            answer = job.answer() if job else {"error": "could not job from id"}
        _answer(request, 200 if job else 404, answer)

    def forget(self) -> None:
        """Forget all jobs, like a killed process."""
        with self._lock:
            self._jobs.clear()

    def _forget_jobs(self) -> None:
        """Forget old successful jobs. Failed ones stay."""
        before = time.monotonic() - self._chain.options.job_seconds
        for id_, job in list(self._jobs.items()):
            if job.done_at is not None and job.done_at < before:
                del self._jobs[id_]

    # --- downloads ---

    def _download(self, request: Request, name: str) -> None:
        try:
            root = bytes.fromhex(name).hex() if name.isascii() else ""
        except ValueError:
            root = ""
        if not root:
            _answer(request, 500, {"error": f"encoding/hex: invalid byte in {name!r}"})
            return
        if not self.blobs.path(root).exists():
            _answer(request, 500, {"error": "cannot get cid mapping from disk: Key not found"})
            return
        self._chain.database.count([f"download {self.address}"])
        conduct = self.conduct
        delivery = Delivery(
            deadline=request.began + self._chain.options.reply_seconds,
            rate=conduct.download_rate,
            flip_byte=conduct.flip_byte,
            cut_after=conduct.cut_download_after,
            lost=self.blobs.lost_range(root),
            closes=conduct.closes_lost,
        )
        serve_file(request, self.blobs.path(root), delivery)

    # --- uploads ---

    def _upload(self, request: Request) -> None:
        form = self._read(request)
        if form is None:
            return
        try:
            merkle, sender, start = _names(form)
            proof_type = _number(form.fields.get("type") or "0", "proof type")
            file = self._posted(merkle, sender, start)
            cid = self._store(form, file, proof_type)
            answer = {
                "merkle": base64.b64encode(merkle).decode(),
                "owner": sender,
                "start": start,
                "cid": cid,
            }
            self._reply(request, 200, answer)
        except _Failed as failed:
            self._reply(request, failed.status, {"error": str(failed)})
        finally:
            form.file.unlink(missing_ok=True)

    def _upload_v2(self, request: Request) -> None:
        form = self._read(request)
        if form is None:
            return
        try:
            merkle, sender, start = _names(form)
        except _Failed as failed:
            form.file.unlink()
            self._reply(request, failed.status, {"error": str(failed)})
            return
        job = _Job(merkle, sender, start)
        job_id = hashlib.sha256(merkle + sender.encode() + str(start).encode()).hexdigest()
        with self._lock:
            self._jobs[job_id] = job
        try:
            file = self._posted(merkle, sender, start)
            job.progress, job.status = 40, "Got proofs"
            job.cid = self._store(form, file, file.proof_type, wrong_size_is_well=True)
            job.progress, job.status, job.done_at = 100, "done!", time.monotonic()
        except _Failed as failed:
            job.progress, job.status = (
                failed.progress or job.progress,
                f"Error: {failed.job_status}",
            )
        finally:
            form.file.unlink(missing_ok=True)
        self._reply(request, 202, {"job_id": job_id})

    def _read(self, request: Request) -> Form | None:
        """Read the form, or answer with its fault."""
        conduct, options = self.conduct, self._chain.options
        self._chain.database.count([f"upload begun {self.address}"])
        request.body.deadline = request.began + options.upload_seconds
        request.body.rate = conduct.upload_rate
        request.body.limit = conduct.drop_upload_after
        try:
            form = read_form(request, self.blobs.uploads)
        except FormError as error:
            self._reply(request, 400, {"error": f"cannot parse form {error}"})
            return None
        except Cut:
            if request.body.limit is not None:
                self._chain.orders.spoiled(self.index)
            raise
        return form

    def _posted(self, merkle: bytes, sender: str, start: int) -> PostedFile:
        """Return the file from the chain if this provider may take it."""
        conduct = self.conduct
        if conduct.error_status:
            self._chain.orders.spoiled(self.index)
            raise _Failed(conduct.error_status, progress=30, job_status=conduct.error_status)
        file = self._chain.world.files.get(f"{merkle.hex()}/{sender}/{start}/")
        if file is None:
            raise _Failed(
                f"failed to find file on chain with merkle: {merkle.hex()}, owner: {sender}, "
                f"start: {start} | "
                "rpc error: code = NotFound desc = not found: key not found",
                progress=10,
                job_status="No such file on chain",
            )
        return file

    def _store(
        self, form: Form, file: PostedFile, proof_type: int, *, wrong_size_is_well: bool = False
    ) -> str:
        """Store the bytes if they are the posted ones. Returns the file's content id."""
        root = file.merkle.hex()
        if form.fields.get("merkle") != root:
            raise _Failed(
                f"cannot accept file that doesn't match the chain data {root} != {root}",
                progress=30,
                job_status="Merkle does not match",
            )
        if len(file.provers) >= file.max_proofs and self.address not in file.provers:
            raise _Failed(
                "cannot accept file that I cannot claim", progress=30, job_status="Can't claim"
            )
        size_bytes = form.file.stat().st_size
        self._check_space(size_bytes)
        actual_root = (
            merkle_root(form.file, proof_type).hex()
            if size_bytes and proof_type in HASHED_TYPES
            else ""
        )
        if actual_root != root:
            raise _unwritten(f"merkle does not match {actual_root} != {root}")
        self.blobs.put(form.file, root)
        wrong_size = size_bytes != file.size_bytes
        self._chain.hold(self.address, file, delay=LATE_PROOF_BLOCKS if wrong_size else 0)
        self._chain.database.count([f"upload {self.address}", f"root {root}"])
        if wrong_size and not wrong_size_is_well:
            raise _Failed(
                f"cannot accept file that doesn't match the chain data {size_bytes} != "
                f"{file.size_bytes}"
            )
        return "bafy" + hashlib.sha256(file.merkle).hexdigest()[:55]

    def _check_space(self, size_bytes: int) -> None:
        if self.conduct.full:
            self._chain.orders.spoiled(self.index)
            raise _unwritten(NO_SPACE)
        if self.blobs.used_bytes + size_bytes > self._chain.options.provider_space:
            raise _unwritten(NO_SPACE)

    def _reply(self, request: Request, status: int, answer: dict[str, Any]) -> None:
        """Answer, or cut the connection if it is too late."""
        if self.conduct.drop_reply:
            self._chain.orders.spoiled(self.index)
            raise Cut
        if time.monotonic() > request.began + self._chain.options.reply_seconds:
            raise Cut
        _answer(request, status, answer)


def _names(form: Form) -> tuple[bytes, str, int]:
    text = form.fields.get("merkle", "")
    try:
        merkle = bytes.fromhex(text) if re.fullmatch(r"([0-9a-fA-F]{2})*", text) else None
    except ValueError:
        merkle = None
    if merkle is None:
        raise _Failed("cannot parse merkle: encoding/hex: invalid byte", status=400)
    return (
        merkle,
        form.fields.get("sender", ""),
        _number(form.fields.get("start", ""), "start block"),
    )


def _number(text: str, what: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,19}", text):
        raise _Failed(
            f'cannot parse {what}: strconv.ParseInt: parsing "{text}": invalid syntax', status=400
        )
    return int(text)


def _unwritten(reason: str) -> _Failed:
    return _Failed(
        f"failed to write file to disk: {reason}",
        progress=40,
        job_status=f"Could not write file to disk {reason}",
    )


def _answer(request: Request, status: int, answer: dict[str, Any]) -> None:
    request.answer(status, (json.dumps(answer, separators=(",", ":")) + "\n").encode(), TEXT)
