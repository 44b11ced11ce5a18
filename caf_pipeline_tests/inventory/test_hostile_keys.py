"""S3 keys of every kind, from the bucket to the network and back, and into a folder.

Keys stay byte-exact, and never leave the folder. A real S3 server has all keys that it can store.
Keys that moto changes (a line feed, a NUL) come from a source in memory.
"""

import json
import os
import sys
import unicodedata

import pytest

from caf_pipeline.cli import main
from caf_pipeline.errors import NotLocated
from caf_pipeline.inventory.headers import ObjectHeaders
from caf_pipeline.inventory.objects import S3Object
from caf_pipeline.reading.chunk_reader import ChunkFile, RemoteSource
from caf_pipeline.records import posting_of
from caf_pipeline.retrieval.reader import fetch
from caf_pipeline_tests.contracts import object_source
from caf_pipeline_tests.support.jackal_network import ADDRESS, SPACE, WORDS, jackal_settings
from caf_pipeline_tests.support.jackal_stores import open_jackal_store
from caf_pipeline_tests.support.memory_source import MemorySource
from caf_pipeline_tests.support.run_contexts import a_run_context, archive_everything

PATHS = [
    "../x",
    "../../etc/passwd",
    "/abs",
    "//",
    "a//b",
    ".",
    "..",
    "...",
    "dir/",
    "a",
    "a/b",
    "a/b/c",
    "./c",
    "x/../../y",
    "~",
    "~root/x",
]
OURS = [
    *(
        ".caf/chunk",
        ".caf/chunk~",
        ".caf/manifest.parquet",
        ".caf/manifest.parquet~",
        ".caf/manifest.parquet~~",
        ".caf",
        ".caf/",
    ),
    *("x~caf-v-1", "x~caf-v-null", "x~caf-p-1-2", "x", "x~"),
]
NUMBERS = ["0", "1", "01", "-1", "1e5", "9007199254740993", "null", "true", "NaN"]
NAMES = [
    "__proto__",
    "constructor",
    "toString",
    "files",
    "start_byte",
    "format_version",
    "--help",
    "-o",
    "*",
    "$(id)",
    "`id`",
    ";id",
]
SPELLED = [
    "%",
    "%2F",
    "%00",
    "%zz",
    "a%2Fb",
    "+",
    "a+b",
    " ",
    " a",
    "a ",
    "\\",
    "a\\b",
    '"',
    "'",
    "<a>&b",
    "&amp;",
    "=cmd()",
    "\\u0041",
]
LETTERS = [
    "é",
    "e\u0301",
    "ﬁ",
    "fi",
    "Ⅸ",
    "日本",
    "😀",
    "\U0010ffff",
    "\ufffd",
    "\ufeff",
    "\u202e\u202dtxt.exe",
    "\u200f",
    "\u2028",
    "\u0085",
]
CONTROLS = [f"c{chr(code)}c" for code in (*range(1, 10), *range(11, 32), *range(0x7F, 0xA0))]
ESCAPES = ["\x1b[2J", "\x1b]0;title\x07", "\x9b31m", "a\rb", "a\bb"]
LOCALLY_BAD = [
    "CON",
    "NUL",
    "aux.txt",
    "trailing.",
    "trailing ",
    "a:b",
    "a|b",
    "k" * 255,
    "k" * 256,
    "k" * 1024,
    "é" * 512,
    "/".join("d" * 512),
]
MADE_UP = [*PATHS, *OURS, *NUMBERS, *NAMES, *SPELLED, *LETTERS, *CONTROLS, *ESCAPES, *LOCALLY_BAD]
KEYS = list(dict.fromkeys([*MADE_UP, *object_source.KEYS]))
MEMORY_KEYS = ["\n", "a\nb", "a\r\nb", "\t\n", *KEYS]
NO_TEXT = [b"\xff", b"a/\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80"]
NO_ROW = "n\0l"


def body_of(key: str) -> bytes:
    return b"" if key.endswith("/") else b"the object of " + key.encode()


class AnySource(MemorySource):
    """Also lists keys that are not text, as S3 does where somebody managed to store them."""

    def objects(self):
        return sorted(
            [*super().objects(), *(S3Object(key, None, "e", 1, self.moment) for key in NO_TEXT)],
            key=lambda obj: obj.key,
        )

    @property
    def moment(self):
        return self.object(next(iter(self.bodies))).last_modified


@pytest.fixture
def make_context(tmp_path, ledger, network):
    opened = []

    def make(source):
        network.grant(ADDRESS, SPACE)
        context = a_run_context(
            tmp_path,
            source,
            ledger,
            store=open_jackal_store,
            jackal=jackal_settings(network, copies=1),
        )
        opened.append(context.store)
        return context

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def caf(network, database_url, monkeypatch, capfdbinary):
    """Run the command line in this process, on the same ledger and network.

    Returns status, output and errors.
    """
    environment = {
        "CAF_DATABASE_URL": database_url,
        "CAF_JACKAL__LCD": json.dumps(network.lcds),
        "CAF_JACKAL__CHAIN_ID": network.chain_id,
        "CAF_JACKAL__ALLOW_PRIVATE_ADDRESSES": "true",
        "CAF_SOURCES__SRC__BUCKET": "b",
        "JACKAL_MNEMONIC": WORDS,
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def run(*arguments):
        capfdbinary.readouterr()
        status = main(arguments)
        sys.stdout.flush()
        captured = capfdbinary.readouterr()
        return status, captured.out, captured.err.decode()

    return run


def chunk_of(context, name, folder):
    """Download a chunk as a file."""
    posting = posting_of(context.ledger.chunks.get(name))
    path = folder / "chunk.caf"
    path.write_bytes(b"".join(context.store.read(posting, 0, posting.stored_size_bytes)))
    return path, ChunkFile(RemoteSource(context.store, posting), name)


def is_harmless(text: str) -> bool:
    """Return whether text neither moves the cursor nor reverses the line."""
    return all(line.isprintable() for line in text.split("\n"))


def all_read_back(context, keys):
    for key in keys:
        assert b"".join(fetch(context.ledger.lookup, context.store, "src", key).pieces) == body_of(
            key
        ), key


def test_hostile_keys_go_from_bucket_to_network_and_back(
    make_context, new_bucket, caf, fault, tmp_path
):
    with fault("Hostile input", "keys of every kind, archived and restored") as case:
        case.tried = len(KEYS)
        for key in KEYS:
            new_bucket.put(key, body_of(key))
        context = make_context(new_bucket.source())
        (name,) = archive_everything(context)
        assert context.ledger.chunks.account("src").skipped == {}
        all_read_back(context, KEYS)
        case.objects = len(KEYS)
        _, chunk = chunk_of(context, name, tmp_path)
        rows = {row["key"]: row for row in chunk.manifest().rows()}
        assert set(rows) == set(KEYS)
        assert {key: chunk.reader.read(rows[key]["member"]) for key in KEYS if body_of(key)} == {
            key: body_of(key) for key in KEYS if body_of(key)
        }
        for number, key in enumerate(KEYS):
            if number % 4 == 0 or key in (*PATHS, *ESCAPES, *NAMES):
                status, out, err = caf(
                    "get", "src", "--force", "-o", str(tmp_path / "got"), "--", key
                )
                assert (status, out, err) == (0, b"", ""), key
                assert (tmp_path / "got").read_bytes() == body_of(key)


@pytest.mark.thorough
def test_keys_beyond_moto_are_archived_or_skipped_with_reason(
    make_context,
):
    source = AnySource(
        {key: body_of(key) for key in [*MEMORY_KEYS, NO_ROW]},
        headers={"a": ObjectHeaders(content_type="x/\x1b")},
    )
    context = make_context(source)
    archive_everything(context)
    all_read_back(context, MEMORY_KEYS)
    assert {
        str(reason): count for reason, count in context.ledger.chunks.account("src").skipped.items()
    } == {"unsupported_key": len(NO_TEXT) + 1}


@pytest.fixture
def extracted(make_context, tmp_path, caf):
    """Return a chunk of all keys as a file, and a target folder with planted links."""
    context = make_context(MemorySource({key: body_of(key) for key in MEMORY_KEYS}))
    (name,) = archive_everything(context)
    path, _ = chunk_of(context, name, tmp_path)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "victim").write_bytes(b"untouched")
    out = tmp_path / "below" / "out"
    out.mkdir(parents=True)
    (out / "x").symlink_to(outside / "victim")
    (out / "a").symlink_to(outside)
    (out / ".caf").symlink_to("../..")
    return path, out, outside


@pytest.mark.thorough
@pytest.mark.parametrize("options", [[], ["--force"]], ids=["", "forced"])
def test_hostile_keys_are_extracted_only_into_the_folder(extracted, caf, tmp_path, options):
    path, out, outside = extracted
    before = {str(path) for path in tmp_path.rglob("*")}
    status, _, err = caf("extract", *options, str(path), "-C", str(out))
    assert status == 1
    assert is_harmless(err)
    assert sorted(os.listdir(outside)) == ["victim"]
    assert (outside / "victim").read_bytes() == b"untouched"
    new = {str(path) for path in tmp_path.rglob("*")} - before
    assert new
    assert all(name.startswith(f"{out}/") for name in new)
    # Every file is a member at its own path, byte for byte. Every other key has an error line.
    files = {
        os.fsencode(path.relative_to(out)): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file() and not path.is_symlink()
    }
    expected = {key.encode(): body_of(key) for key in MEMORY_KEYS}
    written = {name: body for name, body in files.items() if name in expected}
    assert written == {name: expected[name] for name in written}
    assert set(files) == set(written)
    reported = [line for line in err.splitlines() if "was not written" in line]
    missing = [key for key in MEMORY_KEYS if key.encode() not in written]
    assert all(any(repr(key) in line for line in reported) for key in missing)
    assert len(written) > len(MEMORY_KEYS) // 2
    for key in ("CON", "trailing.", "é", "e\u0301", "\x1b[2J", "k" * 255, "a\nb"):
        assert key.encode() in written, key
    for key in ("../x", "/abs", "a//b", ".", "..", "dir/", "k" * 256, "a/b"):
        assert key.encode() not in written, key


@pytest.mark.thorough
def test_listed_keys_are_harmless_on_terminals_and_exact_in_json(extracted, caf):
    path, _, _ = extracted
    status, out, err = caf("list", str(path))
    assert (status, err) == (0, "")
    assert is_harmless(out.decode())
    status, out, _ = caf("list", "--json", str(path))
    assert status == 0
    assert out.isascii()
    listed = {json.loads(line)["key"] for line in out.splitlines()}
    assert listed >= {key for key in MEMORY_KEYS if not key.startswith(".caf")}


def test_an_error_about_a_key_is_one_harmless_line(extracted, caf):
    path, _, _ = extracted
    for key in (*ESCAPES, "\u202eexe.txt", "a\nb: all is well"):
        for arguments in (
            ("get", "src", "--", "no" + key),
            ("cat", str(path), "no" + key),
            ("extract", str(path), "no" + key),
        ):
            status, _, err = caf(*arguments)
            assert status in (1, 4, 11)
            assert is_harmless(err)
            assert len([line for line in err.splitlines() if line.startswith("caf: error")]) == 1


def test_keys_that_look_alike_stay_apart(make_context):
    pairs = [
        ("é", "e\u0301"),
        ("a", "а"),
        ("Å", "\u212b"),
        ("K", "\u212a"),
        ("x", "x\u200b"),
        ("1", "１"),
        ("A", "a"),
    ]
    keys = list(dict.fromkeys(key for pair in pairs for key in pair))
    assert any(
        unicodedata.normalize("NFC", first) == unicodedata.normalize("NFC", second)
        for first, second in pairs
    )
    context = make_context(MemorySource({key: body_of(key) for key in keys}))
    archive_everything(context)
    all_read_back(context, keys)
    with pytest.raises(NotLocated):
        fetch(context.ledger.lookup, context.store, "src", "x\u200c")
