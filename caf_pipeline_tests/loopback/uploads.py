"""Parses a multipart form and writes its file to disk in constant memory.

Parts may come in any order. Error texts are those of Go's mime/multipart, as a real provider passes
them on.
"""

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from caf_pipeline_tests.loopback.http_server import Request

FILE_PART: Final = "file"
FIELD_BYTES: Final = 1 << 20  # the longest field


class FormError(ValueError):
    """The body is not a form, or lacks its file."""


@dataclass(slots=True)
class Form:
    """A parsed form. The caller moves or removes `file`."""

    file: Path
    fields: dict[str, str] = field(default_factory=dict)


def read_form(request: Request, folder: Path) -> Form:
    """Read a request's form. Its file becomes a new file in the folder.

    Raises:
        FormError: the body is not a form, lacks its file, or ends early; the folder stays empty.
        Cut: the connection ended, or must end.
    """
    kind, options = parse_options_header(request.headers.get("Content-Type", ""))
    if kind != b"multipart/form-data":
        raise FormError(
            "cannot create multipart reader: request Content-Type isn't multipart/form-data"
        )
    if not options.get(b"boundary"):
        raise FormError(
            "cannot create multipart reader: no multipart boundary param in Content-Type"
        )
    number, name = tempfile.mkstemp(prefix="upload-", dir=folder)
    file = Path(name)
    try:
        with os.fdopen(number, "wb", buffering=0) as out:
            reader = _Reader(out)
            reader.read(request, options[b"boundary"])
        if not reader.has_file:
            raise FormError("no file found in multipart form")
        return Form(
            file,
            {name: bytes(value).decode(errors="replace") for name, value in reader.fields.items()},
        )
    except BaseException:
        file.unlink()
        raise


class _Reader:
    """Handles the parser's events."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._header_name = self._header_value = b""
        self._part = ""
        self._ended = False
        self.has_file = False
        self.fields: dict[str, bytearray] = {}

    def read(self, request: Request, boundary: bytes) -> None:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._name,
                "on_header_value": self._value,
                "on_header_end": self._header,
                "on_part_data": self._data,
                "on_end": self._end,
            },
        )
        try:
            for piece in request.body:
                parser.write(piece)
        except MultipartParseError as error:
            raise FormError(f"error reading multipart part: multipart: {error}") from error
        if not self._ended:
            raise FormError("error reading multipart part: multipart: NextPart: EOF")

    def _begin(self) -> None:
        self._part = ""

    def _name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            _, options = parse_options_header(self._header_value)
            self._part = options.get(b"name", b"").decode(errors="replace")
            self.has_file |= self._part == FILE_PART
        self._header_name = self._header_value = b""

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._part == FILE_PART:
            view = memoryview(data)[start:end]
            while view:
                view = view[self._out.write(view) :]
            return
        value = self.fields.setdefault(self._part, bytearray())
        if len(value) + end - start > FIELD_BYTES:
            raise FormError(f"error reading {self._part} field: it is too long")
        value += data[start:end]

    def _end(self) -> None:
        self._ended = True
