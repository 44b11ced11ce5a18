"""`caf cotar` and `caf convert`, with real files, a real server and the original packages."""

import gzip
import json
import os
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest

from caf_pipeline.caf.archive import CafReader
from caf_pipeline.cli import main
from caf_pipeline.cli.cotar import opened_cotar
from caf_pipeline.errors import MalformedArchive
from caf_pipeline.formats.cotar import hash_of
from caf_pipeline.formats.cotar_builder import index_of
from caf_pipeline.formats.tar import BLOCK_BYTES, FileRange, files_of, walk
from caf_pipeline.retrieval.object_ranges import ObjectRanges
from caf_pipeline.system.ranges import LocalFile
from caf_pipeline_tests.support.command_line import (
    KEYS,
    CommandLine,
    archive_source,
    expect_error,
    source_text,
)
from caf_pipeline_tests.support.memory_ranges import MemoryRanges
from caf_pipeline_tests.support.memory_ranges import index_of as index_of_caf
from caf_pipeline_tests.support.range_server import Site, serving
from caf_pipeline_tests.support.s3_server import make_bucket
from caf_pipeline_tests.support.tar_archives import LONG, SAME, info, made, vector

BODIES = {
    "a": b"1" * 700,
    "b/ü": b"2",
    LONG: b"3" * 512,
    "empty": b"",
    "tiles/1/2.pbf": bytes(range(256)) * 9,
}
LARGE = BODIES | {"large": bytes(range(256)) * 1200, "larger": b"x" * (17 << 20), "small": b"1"}

MANY = {f"tiles/{number // 100}/{number}.pbf": b"%d" % number for number in range(6000)}
"""Enough files to fill more than the first read of an index."""

FAR = next(name for name in MANY if hash_of(name.encode()) % (len(MANY) * 5 // 4) < 1000)
"""A file whose slot is not in the first read."""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory, with `t.tar`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.tar").write_bytes(made(BODIES.items()))
    return tmp_path


def indexed(bodies) -> tuple[bytes, bytes]:
    """Write a tar of the bodies and its index here; return both."""
    with open("x.tar", "wb") as file:
        file.write(made(bodies.items()))
    assert main(["cotar", "index", "x.tar"]) == 0
    with open("x.tar", "rb") as tar, open("x.tar.index", "rb") as index:
        return tar.read(), index.read()


# --- index, cat, list, verify


@pytest.mark.parametrize("embed", [False, True])
def test_files_are_read_by_their_names(here, capfdbinary, embed):
    assert main(["cotar", "index", "t.tar", *(["--embed"] if embed else [])]) == 0
    where = ["t.tar.co"] if embed else ["t.tar", "--index", "t.tar.index"]
    for name, body in BODIES.items():
        capfdbinary.readouterr()
        assert main(["cotar", "cat", *where, name]) == 0
        assert capfdbinary.readouterr().out == body
    assert main(["cotar", "verify", *where]) == 0
    capfdbinary.readouterr()
    assert main(["cotar", "list", *where, "--json"]) == 0
    lines = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    tar = (here / "t.tar").read_bytes()
    assert {line["key"]: tar[line["start_byte"] : line["end_byte"]] for line in lines} == BODIES


def test_an_embedded_index_stands_behind_the_tar_as_it_is(here):
    assert (
        main(["cotar", "index", "t.tar"])
        == main(["cotar", "index", "t.tar", "--embed", "-o", "o.tar.co"])
        == 0
    )
    assert (here / "o.tar.co").read_bytes() == (here / "t.tar").read_bytes() + (
        here / "t.tar.index"
    ).read_bytes()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("bodies", "embed", "command", "requests"),
    [
        (BODIES, True, ["cat", "a"], 1),
        (BODIES | {"large": bytes(100_000)}, True, ["cat", "a"], 2),
        (MANY, True, ["cat", FAR], 3),
        (MANY, True, ["list"], 3),
        (MANY, True, ["verify"], 3),
        (MANY, False, ["cat", FAR], 1),
        (MANY, False, ["list"], 2),
        (MANY, False, ["verify"], 2),
    ],
)
def test_one_to_three_requests_are_sent_to_a_file(capfdbinary, bodies, embed, command, requests):
    tar, index = indexed(bodies)
    with serving(Site(tar + index if embed else tar)) as file, serving(Site(index)) as separate:
        where = [] if embed else ["--index", separate.url]
        assert main(["cotar", command[0], file.url, *command[1:], *where]) == 0
        assert len(file.requests) == requests
        assert len(separate.requests) <= 2
    if command[0] == "cat":
        assert capfdbinary.readouterr().out.endswith(bodies[command[1]])


@pytest.mark.parametrize(
    ("tar", "said"),
    [
        (
            made([("a", b"1"), info("d", tarfile.DIRTYPE), info("s", tarfile.SYMTYPE, "a")]),
            "1 folder, 1 symbolic link",
        ),
        (made([("a", b"1"), info("p", tarfile.FIFOTYPE)]), "1 pipe"),
    ],
)
def test_entries_that_are_not_files_are_reported(here, capsys, tar, said):
    (here / "t.tar").write_bytes(tar)
    assert main(["cotar", "index", "t.tar"]) == 0
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tar", "said"),
    [
        (vector("truncated_data.tar"), "cut off"),
        (vector("truncated_header.tar"), "cut off"),
        (made([("a", b"1")])[:512][:-1], "cut off"),
        (b"\x1f\x8b" + bytes(1000), "header"),
        (gzip.compress(b"1", mtime=0), "compressed"),
        (made([info("l", tarfile.LNKTYPE, "nobody")]), "hard link"),
    ],
)
@pytest.mark.parametrize("embed", [[], ["--embed"]])
def test_a_damaged_tar_is_reported_and_leaves_nothing(here, capsys, tar, said, embed):
    (here / "t.tar").write_bytes(tar)
    assert main(["cotar", "index", "t.tar", *embed]) == 4
    assert said in capsys.readouterr().err
    assert os.listdir(here) == ["t.tar"]


def test_a_file_of_4_gib_is_refused(here, capsys):
    with open("t.tar", "r+b") as file:
        large = info("large", tarfile.REGTYPE)
        large.size = 4 << 30
        file.write(large.tobuf(tarfile.GNU_FORMAT))
        file.truncate(512 + (4 << 30) + 1024)
    assert main(["cotar", "index", "t.tar"]) == 4
    assert "'large'" in capsys.readouterr().err
    assert os.listdir(here) == ["t.tar"]


def test_an_index_beyond_a_remote_tar_returns_no_bytes(here, capfdbinary):
    tar, _ = indexed(MANY | {"last": bytes(5000)})
    for cut in (tar[: -(20 << 10)], tar[:1000]):
        with serving(Site(cut)) as site:
            assert main(["cotar", "cat", site.url, "last", "--index", "x.tar.index"]) == 4
            assert len(site.requests) == 1
        out, err = capfdbinary.readouterr()
        assert not out.partition(b"KiB\n")[2]
        assert b"has no byte" in err


def test_an_index_of_another_tar_returns_no_complete_file(here, capfdbinary):
    indexed(BODIES)
    other = made([(name, body[1:] + b"x" * 600) for name, body in BODIES.items()])
    (here / "other.tar").write_bytes(other)
    for name in BODIES:
        capfdbinary.readouterr()
        assert main(["cotar", "cat", "other.tar", "--index", "x.tar.index", name]) == 4
        assert not capfdbinary.readouterr().out
    assert main(["cotar", "verify", "other.tar", "--index", "x.tar.index"]) == 1


# --- the tar's header and the index

SIZED = [f"{folder}{number}.é" for number in range(334) for folder in ("t/", "t/" * 49, "t/" * 80)]
"""Names in one header, in records, and cut off by a header's name field."""


def original_index(tar: bytes) -> bytes:
    """Return the original builder's index: of the name fields, which it decodes as Latin-1."""
    members = walk(lambda start, end: tar[start:end], len(tar))
    return index_of(
        [
            FileRange(member.name_field.decode("latin-1").encode(), *member[2:4])
            for member in members
        ]
    )


def contents(path: str, names, index: str | None = None) -> dict[str, bytes | None]:
    """Return each file's bytes; None if it is refused."""
    bodies: dict[str, bytes | None] = dict.fromkeys(names)
    with LocalFile(Path(path)) as source, opened_cotar(source, index) as opened:
        for name in names:
            with suppress(MalformedArchive):
                bodies[name] = b"".join(opened.pieces(name.encode()))
    return bodies


@pytest.mark.thorough
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("tar_format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_flipped_bit_of_a_place_returns_no_other_file(tar_format):
    bodies = {name: b"%04d" % number for number, name in enumerate(SIZED)}
    tar = made(bodies.items(), tar_format)
    index = index_of(files_of(walk(lambda start, end: tar[start:end], len(tar))).files)
    refused = 0
    for number, name in enumerate(SIZED[::7]):
        flipped = bytearray(index)
        place = index.index(hash_of(name.encode()).to_bytes(8, "little"))
        flipped[place + 8] ^= 1 << number % 8
        Path("x.tar.co").write_bytes(tar + flipped)
        body = contents("x.tar.co", [name])[name]
        assert body in (None, bodies[name])
        refused += body is None
    assert refused == len(SIZED[::7])


@pytest.mark.parametrize("remote", [False, True])
def test_an_index_of_reordered_members_returns_no_bytes(here, capfdbinary, remote):
    indexed({"a.pbf": b"AAAA", "b.pbf": b"BBBB"})
    other = made([("b.pbf", b"BBBB"), ("a.pbf", b"AAAA")])
    (here / "other.tar").write_bytes(other)
    capfdbinary.readouterr()
    with serving(Site(other)) as site:
        where = site.url if remote else "other.tar"
        assert main(["cotar", "cat", where, "--index", "x.tar.index", "a.pbf"]) == 4
    out, err = capfdbinary.readouterr()
    assert not out
    assert b"'b.pbf'" in err


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "tar_format", "more"),
    [
        ("p" * 150 + "/n", tarfile.USTAR_FORMAT, {}),
        ("p" * 150 + "/n", tarfile.GNU_FORMAT, {}),
        (LONG, tarfile.PAX_FORMAT, {}),
        ("ü", tarfile.PAX_FORMAT, {}),
        ("ü", tarfile.GNU_FORMAT, {}),
        ("x" * 9000, tarfile.PAX_FORMAT, {}),
        ("a", tarfile.PAX_FORMAT, {"comment": "x" * 9000, "size": "3"}),
    ],
)
def test_every_form_of_a_name_is_compared(name, tar_format, more):
    file = info(name, tarfile.REGTYPE)
    file.size, file.pax_headers = 3, more
    head = file.tobuf(tar_format)
    tar = head + b"abc" + bytes(509 + 1024)
    Path("x.tar").write_bytes(tar)
    Path("own").write_bytes(index_of([FileRange(name.encode(), len(head), 3)]))
    Path("original").write_bytes(original_index(tar))
    assert contents("x.tar", [name], "own") == {name: b"abc"}
    field = head[-512:][:100].partition(b"\0")[0]
    taken = {field.decode("latin-1"), field.decode()}
    assert contents("x.tar", taken, "original") == dict.fromkeys(taken, b"abc")


@pytest.mark.usefixtures("here")
def test_index_of_whole_names_leads_to_no_part():
    part, whole = "g" * 100, "g" * 120
    tar = made([(whole, b"1"), (part, b"2")], tarfile.GNU_FORMAT)
    Path("x.tar").write_bytes(tar)
    files = files_of(walk(lambda start, end: tar[start:end], len(tar))).files
    place = files[0][1:]
    Path("x.tar.index").write_bytes(index_of([FileRange(file.name, *place) for file in files]))
    assert contents("x.tar", [whole, part], "x.tar.index") == {whole: b"1", part: None}


@pytest.mark.parametrize("older_index", [b"", vector("basic.tar.index")])
def test_a_hard_link_is_read_from_a_local_tar_alone(here, capfdbinary, older_index):
    tar = vector("hardlink.tar") + older_index + vector("hardlink.tar.index")
    (here / "x.tar.co").write_bytes(tar)
    assert main(["cotar", "cat", "x.tar.co", "link2"]) == 0
    assert capfdbinary.readouterr().out.endswith(b"data!")
    with serving(Site(tar)) as site:
        assert main(["cotar", "cat", site.url, "orig"]) == 0
        assert capfdbinary.readouterr().out == b"data!"
        assert main(["cotar", "cat", site.url, "link2"]) == 4
    out, err = capfdbinary.readouterr()
    assert not out
    assert b"'orig'" in err


@pytest.mark.usefixtures("here")
def test_a_hard_link_is_found_by_its_name_field_alone():
    link = "p" * 150 + "/l"
    tar = made([("a", b"1"), info(link, tarfile.LNKTYPE, "a")], tarfile.USTAR_FORMAT)
    Path("x.tar").write_bytes(tar)
    for names in (("a", link), ("a", "l")):
        Path("x.tar.index").write_bytes(
            index_of([FileRange(name.encode(), BLOCK_BYTES, 1) for name in names])
        )
        assert contents("x.tar", names, "x.tar.index") == dict.fromkeys(names, b"1")


@pytest.mark.parametrize("cut", [1, 700, 1536, 4000])
def test_a_truncated_tar_returns_no_complete_file(here, capfdbinary, cut):
    tar, index = indexed(BODIES)
    (here / "x.tar.co").write_bytes(tar[:cut] + index)
    for name, body in BODIES.items():
        capfdbinary.readouterr()
        status = main(["cotar", "cat", "x.tar.co", name])
        assert (status, capfdbinary.readouterr().out) in [(0, body), (4, b"")]
    assert main(["cotar", "verify", "x.tar.co"]) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda index: index[:-8], "no cotar index"),
        (lambda index: index[:8] + bytes(len(index) - 16) + index[-8:], "'a' is missing"),
        (
            lambda index: index.replace(
                (1).to_bytes(4, "little") + (700).to_bytes(4, "little"),
                bytes([1, 0, 0, 0, 1, 0, 0, 0]),
            ),
            "says 1 from",
        ),
    ],
)
def test_verify_exits_with_1_if_something_is_wrong(here, capsys, change, said):
    tar, index = indexed({"a": b"1" * 700})
    (here / "x.tar.co").write_bytes(tar + change(index))
    assert main(["cotar", "verify", "x.tar.co"]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [lambda index: index[:-8], lambda index: index[:-1] + b"x"],
    ids=["no last header", "another one"],
)
def test_an_index_without_its_last_header_fails_verification(here, capfdbinary, change):
    _, index = indexed({"a": b"1"})
    (here / "x.tar.index").write_bytes(change(index))
    assert main(["cotar", "cat", "x.tar", "--index", "x.tar.index", "a"]) == 0
    assert capfdbinary.readouterr().out.endswith(b"1")
    assert main(["cotar", "verify", "x.tar", "--index", "x.tar.index"]) == 1


@pytest.mark.parametrize("hashed", [b"x" * 8, bytes(8)])
def test_verify_reports_a_surplus_slot(here, capsys, hashed):
    tar, index = indexed({"a": b"1", "b": b"2", "c": b"3"})
    slots = [index[at : at + 16] for at in range(8, len(index) - 8, 16)]
    free = 8 + 16 * slots.index(bytes(16))
    taken = next(filter(any, slots))
    (here / "x.tar.co").write_bytes(tar + index[:free] + hashed + taken[8:] + index[free + 16 :])
    assert main(["cotar", "verify", "x.tar.co"]) == 1
    assert "slot of bytes" in capsys.readouterr().err


@pytest.mark.parametrize(("out", "status"), [("t.tar", 2), (".", 2), ("no/folder", 8)])
def test_a_failed_write_of_an_index_changes_nothing(here, capsys, out, status):
    before = (here / "t.tar").read_bytes()
    assert main(["cotar", "index", "t.tar", "-o", out]) == status
    assert repr(out) in capsys.readouterr().err
    assert os.listdir(here) == ["t.tar"]
    assert (here / "t.tar").read_bytes() == before


def test_verify_reports_a_slot_without_a_file(here, capsys):
    indexed({"a": b"1", "b": b"2"})
    (here / "one.tar").write_bytes(made([("a", b"1")]))
    assert main(["cotar", "verify", "one.tar", "--index", "x.tar.index", "--json"]) == 1
    output = capsys.readouterr()
    assert json.loads(output.out.splitlines()[-1]) == {"files": 1, "slots": 2, "problems": 1}
    assert "slot of bytes" in output.err


def test_verify_counts_all_forged_slots_and_prints_the_first(here, capsys):
    head = b"COT\x02" + (1000).to_bytes(4, "little")
    slots = b"".join(number.to_bytes(8, "little") + b"\1" * 8 for number in range(1, 1001))
    (here / "x.tar.co").write_bytes((here / "t.tar").read_bytes() + head + slots + head)
    assert main(["cotar", "verify", "x.tar.co", "--json"]) == 1
    output = capsys.readouterr()
    assert json.loads(output.out) == {
        "files": len(BODIES),
        "slots": 1000,
        "problems": 1000 + len(BODIES),
    }
    assert len(output.err.splitlines()) == 23
    assert f"and {980 + len(BODIES)} more" in output.err


@pytest.mark.parametrize("name", SAME)
def test_the_real_builders_archives_are_verified(here, name):
    (here / "x.tar.co").write_bytes(vector(f"{name}.tar") + vector(f"{name}.tar.index"))
    assert main(["cotar", "verify", "x.tar.co"]) == 0


@pytest.mark.parametrize("command", ["list", "cat", "verify", "index"])
def test_a_file_that_is_missing_ends_with_4(here, capsys, command):
    assert main(["cotar", command, "nope.tar", *(["a"] if command == "cat" else [])]) == 4
    assert "no file 'nope.tar'" in capsys.readouterr().err


def test_a_name_that_is_missing_ends_with_4(here, capsys):
    indexed(BODIES)
    assert main(["cotar", "cat", "x.tar", "nope", "--index", "x.tar.index"]) == 4
    assert "'nope'" in capsys.readouterr().err


def test_an_index_of_a_url_needs_a_name(here, capsys):
    assert main(["cotar", "index", "http://127.0.0.1:1/x.tar"]) == 2
    assert "-o" in capsys.readouterr().err


# --- convert


@pytest.fixture
def large(here):
    """The same directory, with files that the kernel copies."""
    (here / "t.tar").write_bytes(made(LARGE.items()))


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("ending", ["tar", "tar.co"])
def test_a_caf_becomes_a_tar_and_again_the_same_caf(here, capsys, ending):
    assert main(["convert", "t.tar", "one.caf"]) == 0
    assert main(["convert", "one.caf", f"o.{ending}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["members"] == len(LARGE)
    with tarfile.open(here / f"o.{ending}") as tar:
        assert {member.name: tar.extractfile(member).read() for member in tar} == LARGE
    assert main(["convert", f"o.{ending}", "two.caf"]) == 0
    assert (here / "one.caf").read_bytes() == (here / "two.caf").read_bytes()
    if ending == "tar.co":
        assert main(["cotar", "verify", "o.tar.co"]) == 0


def test_a_tar_gets_and_loses_its_index(here):
    assert main(["convert", "t.tar", "t.tar.co"]) == main(["convert", "t.tar.co", "o.tar"]) == 0
    assert (here / "o.tar").read_bytes() == (here / "t.tar").read_bytes()


def test_hard_links_become_copies_and_the_last_name_counts(here, capsys):
    members = [
        ("a", b"1"),
        info("l", tarfile.LNKTYPE, "a"),
        ("b", b"2"),
        ("b", b"3"),
        info("d", tarfile.DIRTYPE),
    ]
    (here / "t.tar").write_bytes(made(members))
    assert main(["convert", "t.tar", "o.caf"]) == 0
    assert "1 folder" in capsys.readouterr().err
    reader = CafReader.open(MemoryRanges((here / "o.caf").read_bytes()))
    assert {member.key: reader.read(member.key) for member in reader.members} == {
        "a": b"1",
        "l": b"1",
        "b": b"3",
    }


def test_files_too_large_for_a_caf_are_refused_before_copying(here, capsys):
    with open("t.tar", "wb") as file:
        large = info("large", tarfile.REGTYPE)
        large.size = 1 << 30
        file.write(large.tobuf(tarfile.GNU_FORMAT))
        file.seek(1 << 30, os.SEEK_CUR)
        for number in range(32):
            file.write(info(f"link-{number}", tarfile.LNKTYPE, "large").tobuf(tarfile.GNU_FORMAT))
        file.write(bytes(1024))
    assert main(["convert", "t.tar", "o.caf"]) == 4
    assert "35433480192 bytes" in capsys.readouterr().err
    assert os.listdir(here) == ["t.tar"]


def test_members_that_share_bytes_become_no_huge_tar(here, capsys):
    index = json.dumps(
        index_of_caf(*((f"m{number}", 0, 100 << 20) for number in range(400)))
    ).encode()
    with open("t.caf", "wb") as file:
        file.seek(100 << 20)
        file.write(index + len(index).to_bytes(4, "little"))
    assert main(["convert", "t.caf", "o.tar"]) == 4
    assert "41943040000 bytes" in capsys.readouterr().err
    assert not (here / "o.tar").exists()


def test_a_caf_behind_a_url_is_converted(here):
    assert main(["convert", "t.tar", "o.caf"]) == 0
    with serving(Site((here / "o.caf").read_bytes())) as site:
        assert main(["convert", f"{site.url}?a.tar", "o.tar.co"]) == 0
        assert len(site.requests) <= 3
    assert main(["cotar", "verify", "o.tar.co"]) == 0


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["t.tar", "o.tar"], 2, "t.tar"),
        (["nope.caf", "o.tar"], 4, "no file"),
        (["t.tar", "nowhere/o.caf"], 8, "'nowhere/o.caf' cannot be written"),
        (["t.tar", "folder.caf"], 2, "not a file"),
        (["t.tar", "o.zip"], 2, "OUT ends with"),
        (["t.tar", "same.caf"], 2, "replace what is read"),
        (["broken.tar", "o.caf"], 4, "cut off"),
        (["latin.tar", "o.caf"], 4, "UTF-8"),
        (["t.tar.co", "o.caf"], 4, "no file"),
        (["fake.tar.co", "o.caf"], 4, "no cotar index"),
    ],
)
def test_invalid_conversions_are_refused_and_leave_nothing(here, capsys, arguments, status, said):
    (here / "broken.tar").write_bytes((here / "t.tar").read_bytes()[:700])
    (here / "fake.tar.co").write_bytes((here / "t.tar").read_bytes())
    (here / "latin.tar").write_bytes(made([("ü", b"1")], tarfile.GNU_FORMAT, encoding="latin-1"))
    (here / "folder.caf").mkdir()
    (here / "same.caf").hardlink_to(here / "t.tar")
    before = set(os.listdir(here))
    assert main(["convert", *arguments]) == status
    assert said in capsys.readouterr().err
    assert set(os.listdir(here)) == before


# --- archived objects

BEHIND = bytes(9 << 20)
"""Large enough that an object with it is read in ranges."""


@pytest.fixture(scope="module")
def archive(tmp_path_factory, s3_server, databases):
    caf = CommandLine(
        tmp_path_factory.mktemp("archive"), KEYS | {"CAF_DATABASE_URL": databases.take().url}
    )
    bucket = make_bucket(s3_server)
    for name, bodies in {"small.tar.co": BODIES, "large.tar.co": MANY | {"large": BEHIND}}.items():
        tar = made(bodies.items())
        files = files_of(walk(lambda start, end, tar=tar: tar[start:end], len(tar))).files
        bucket.put(name, tar + index_of(files))
    bucket.put("plain.tar", made(BODIES.items()))
    caf.settings(source_text(s3_server, bucket.name))
    archive_source(caf)
    return caf


@pytest.mark.parametrize(
    ("key", "name", "reads"),
    [("small.tar.co", "b/ü", 2), ("large.tar.co", FAR, 3), ("large.tar.co", "large", 3)],
)
def test_a_file_of_an_archived_tar_takes_few_reads(archive, monkeypatch, key, name, reads):
    ranges = []
    stream = ObjectRanges.stream
    monkeypatch.setattr(
        ObjectRanges, "stream", lambda self, *range_: ranges.append(range_) or stream(self, *range_)
    )
    body = (BODIES | MANY | {"large": BEHIND})[name]
    done = archive("get", "src", key, "--member", name)
    assert (done.status, done.err, done.out) == (0, "", body)
    assert len(ranges) <= reads
    assert sum(end - start for start, end, _ in ranges) <= len(body) + 80_000
    assert archive("get", "src", key, "--member", name, "--force", "-o", "file").status == 0
    assert (archive.folder / "file").read_bytes() == body


@pytest.mark.parametrize(("key", "name"), [("small.tar.co", "nope"), ("plain.tar", "a")])
def test_a_missing_file_of_an_archived_tar_is_reported(archive, key, name):
    done = archive("get", "src", key, "--member", name, "-o", "nothing")
    expect_error(done, 4)
    assert not (archive.folder / "nothing").exists()
