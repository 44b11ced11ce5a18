"""The commands on CAF files, with real files and a real server."""

import errno
import json
import os
import re
import signal
import subprocess
import sys

import pytest

from caf_pipeline.caf.archive import CafReader, CafWriter, Limits
from caf_pipeline.cli import creating, main
from caf_pipeline.cli.terminal import parse_size, printable
from caf_pipeline.errors import UsageError
from caf_pipeline_tests.support.memory_ranges import MemoryRanges, caf_bytes, index_of
from caf_pipeline_tests.support.range_server import Site, serving

CAF = [sys.executable, "-c", "import sys; from caf_pipeline.cli import main; sys.exit(main())"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working directory, with a small tree in `d`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d" / "a").mkdir(parents=True)
    for name, body in {"d/a/x": b"hello", "d/a.b": b"", "d/Z": b"z" * 1000, "d/ü": b"u"}.items():
        (tmp_path / name).write_bytes(body)
    return tmp_path


def keys_of(path) -> list[str]:
    return [member.key for member in CafReader.open(MemoryRanges(path.read_bytes())).members]


def write_archive(path, bodies: dict[str, bytes]) -> str:
    with CafWriter(path) as writer:
        for key, body in bodies.items():
            writer.add(key, len(body), [body])
        writer.seal()
        writer.publish()
    return str(path)


def tree(folder) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


# --- create


def test_a_packed_and_extracted_tree_is_the_same(here):
    assert main(["create", "o.caf", "d"]) == 0
    assert main(["extract", "o.caf", "-C", "out"]) == 0
    assert tree(here / "out") == {
        name: body for name, body in tree(here).items() if name.startswith("d/")
    }


def test_keys_are_relative_to_the_folder_and_in_byte_order(here):
    assert main(["create", "o.caf", "-C", "d", "."]) == 0
    assert keys_of(here / "o.caf") == ["Z", "a.b", "a/x", "ü"]
    bodies_in_order = b"z" * 1000 + b"hello" + b"u"
    assert (here / "o.caf").read_bytes().startswith(bodies_in_order)


@pytest.mark.parametrize("path", ["a/x", "a/../a/x", "../d/a/x", "ABSOLUTE"])
def test_any_path_that_leads_below_the_folder_is_accepted(here, path):
    assert (
        main(["create", "o.caf", "-C", "d", path.replace("ABSOLUTE", str(here / "d" / "a" / "x"))])
        == 0
    )
    assert keys_of(here / "o.caf") == ["a/x"]


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        (["-C", "d", ".."], 2, "not below"),
        (["-C", "d/a", "../Z"], 2, "not below"),
        (["d", "d/Z"], 4, "'d/Z'"),
        (["missing"], 1, "missing"),
        (["-C", "missing", "d"], 2, "missing"),
        (["--target-size", "30GB", "d"], 2, "30GB"),
        (["--target-size", "0", "d"], 2, "--target-size"),
        (["--target-size", "33GiB", "d"], 2, "--target-size"),
        ([], 2, "PATH"),
    ],
)
def test_invalid_input_is_reported_and_leaves_nothing(here, capsys, arguments, status, named):
    assert main(["create", "o.caf", *arguments]) == status
    assert named in capsys.readouterr().err
    assert sorted(os.listdir(here)) == ["d"]


def make_dangling(path):
    path.symlink_to("nowhere")


def make_loop(path):
    path.symlink_to(path.name)


def make_unnamed(path):
    open(os.fsencode(path) + b"\xff", "wb").close()


@pytest.mark.parametrize("make", [make_dangling, make_loop, os.mkfifo, make_unnamed])
def test_an_unreadable_file_is_reported_and_leaves_nothing(here, capsys, make):
    make(here / "d" / "odd")
    assert main(["create", "o.caf", "d"]) != 0
    error = capsys.readouterr().err
    assert error.startswith("caf: error: ")
    assert "odd" in error
    assert sorted(os.listdir(here)) == ["d"]


def test_links_are_followed_but_never_in_circles(here, capsys):
    (here / "d" / "link").symlink_to("a/x")
    (here / "d" / "a" / "up").symlink_to("..")
    assert main(["create", "o.caf", "d/a", "d/link"]) == 0
    assert keys_of(here / "o.caf") == [
        "d/a/up/Z",
        "d/a/up/a.b",
        "d/a/up/link",
        "d/a/up/ü",
        "d/a/x",
        "d/link",
    ]
    assert "d/a/up/a" in capsys.readouterr().err


def test_an_archive_in_the_tree_does_not_hold_itself(here):
    for _ in range(2):
        assert main(["create", "d/o.caf", "d"]) == 0
    assert keys_of(here / "d" / "o.caf") == ["d/Z", "d/a.b", "d/a/x", "d/ü"]


def test_a_link_to_the_archive_is_left_out(here):
    (here / "d" / "a" / "o.caf").write_bytes(b"another")
    (here / "d" / "link").symlink_to("o.caf")
    (here / "d" / "o.caf").write_bytes(b"older")
    assert main(["create", "d/o.caf", "d"]) == 0
    assert keys_of(here / "d" / "o.caf") == ["d/Z", "d/a.b", "d/a/o.caf", "d/a/x", "d/ü"]


@pytest.mark.parametrize("change", ["a byte more", "a byte less", "a later time", "gone", "a pipe"])
@pytest.mark.parametrize("size_bytes", [1000, (1 << 20) + 1])
def test_a_changed_file_is_an_error_and_leaves_nothing(here, change, size_bytes):
    path = here / "d" / "Z"
    path.write_bytes(bytes(size_bytes))
    files = creating.find_files([here / "d"], here, here / "o.caf", here / "sums")
    if change == "a later time":
        os.utime(path, ns=(0, files[0].modified_ns + 1))
    elif change.startswith("a byte"):
        status = path.stat()
        os.truncate(path, size_bytes + (1 if change == "a byte more" else -1))
        os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
    else:
        path.unlink()
        if change == "a pipe":
            os.mkfifo(path)
    with pytest.raises(creating.CafError, match="d/Z"):
        creating.write_archives([files], [here / "o.caf"], lambda size_bytes: None, here / "sums")
    assert os.listdir(here) == ["d"]


def test_sha256sum_accepts_the_sums_of_extracted_files(here):
    odd = {"line\nbreak", "back\\slash", "return\r", "\\n", " two  spaces ", "*star"}
    for number, name in enumerate(sorted(odd)):
        (here / "d" / name).write_bytes(b"%d" % number)
    (here / "d" / "large").write_bytes(os.urandom((12 << 20) + 5))
    assert (
        main(["create", "--sums", "sums", "o.caf", "-C", "d", ".", "--target-size", "5000000"]) == 0
    )
    for archive in here.glob("o-*.caf"):
        assert main(["extract", str(archive), "-C", "out"]) == 0
    check = ["sha256sum", "--check", "--strict", "--quiet", str(here / "sums")]
    assert (
        subprocess.run(check, cwd=here / "out", capture_output=True, text=True, check=False).stderr
        == ""
    )
    assert (here / "sums").read_bytes().count(b"\n") == len(tree(here / "out")) == 5 + len(odd)
    (here / "out" / "large").write_bytes(b"other")
    assert subprocess.run(check, cwd=here / "out", capture_output=True, check=False).returncode == 1


def test_the_file_of_sums_is_not_packed(here, capsys):
    for _ in range(2):
        assert main(["create", "--sums", "d/sums", "o.caf", "d"]) == 0
    assert keys_of(here / "o.caf") == ["d/Z", "d/a.b", "d/a/x", "d/ü"]
    assert main(["create", "--sums", "o-00002.caf", "o.caf", "d", "--target-size", "200"]) == 2
    assert "o-00002.caf" in capsys.readouterr().err
    assert not (here / "o-00001.caf").exists()


@pytest.mark.parametrize("sums", ["missing/sums", "d"])
def test_no_archive_appears_if_the_sums_cannot_be_written(here, capsys, sums):
    assert main(["create", "--sums", sums, "o.caf", "d"]) in (2, 8)
    assert sums in capsys.readouterr().err
    assert os.listdir(here) == ["d"]


@pytest.mark.parametrize("proof_type", ["0", "3"])
def test_create_and_merkle_print_the_same_root(here, capsys, proof_type):
    assert main(["create", "--proof-type", proof_type, "o.caf", "d"]) == 0
    root = capsys.readouterr().out.split()[-1]
    assert main(["create", "--json", "--proof-type", proof_type, "o.caf", "d"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert main(["merkle", "--json", "--proof-type", proof_type, "o.caf"]) == 0
    merkle = json.loads(capsys.readouterr().out)
    assert (root, line["merkle_root"], line["proof_type"]) == (
        merkle["merkle_root"],
        merkle["merkle_root"],
        merkle["proof_type"],
    )


def test_create_prints_the_root_of_a_large_archive(here, capsys):
    (here / "d" / "large").write_bytes(
        os.urandom(70 << 20)
    )  # twice the size of the first write to disk, and several parts
    assert main(["create", "--proof-type", "3", "o.caf", "d"]) == 0
    root = capsys.readouterr().out.split()[-1]
    assert main(["merkle", "o.caf"]) == 0
    assert capsys.readouterr().out.split() == [root]


def test_files_that_exceed_one_archive_become_a_series(here, capsys):
    assert main(["create", "--json", "o.caf", "-C", "d", ".", "--target-size", "200"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = ["o-00001.caf", "o-00002.caf"]
    assert [line["path"] for line in lines] == [str(here / name) for name in names]
    assert [line["size_bytes"] for line in lines] == [
        (here / name).stat().st_size for name in names
    ]
    assert [keys_of(here / name) for name in names] == [["Z"], ["a.b", "a/x", "ü"]]
    assert not (here / "o.caf").exists()


def test_the_target_is_met_exactly(here):
    main(["create", "whole.caf", "d"])
    size_bytes = (here / "whole.caf").stat().st_size
    assert main(["create", "o.caf", "d", "--target-size", str(size_bytes)]) == 0
    assert (here / "o.caf").read_bytes() == (here / "whole.caf").read_bytes()
    assert main(["create", "p.caf", "d", "--target-size", str(size_bytes - 1)]) == 0
    assert (here / "p-00002.caf").exists()


def test_hard_limits_begin_another_archive(here):
    files = creating.find_files([here / "d"], here, here / "o.caf")
    assert [
        len(volume) for volume in creating.cut_into_archives(files, 1 << 30, Limits(max_members=3))
    ] == [3, 1]


def test_a_longer_series_in_the_way_is_refused(here, capsys):
    (here / "o-00003.caf").write_bytes(b"older")
    assert main(["create", "o.caf", "d", "--target-size", "200"]) == 2
    assert "o-00003.caf" in capsys.readouterr().err
    assert sorted(os.listdir(here)) == ["d", "o-00003.caf"]


def test_an_archive_replaces_no_pipe(here, capsys):
    os.mkfifo(here / "pipe")
    assert main(["create", "pipe", "d"]) == 2
    assert "pipe" in capsys.readouterr().err


# --- list, cat, verify, merkle


def test_list_prints_one_object_a_line(here, capsys):
    path = write_archive(here / "o.caf", {"b": b"123", "a\n\x1b[31m": b""})
    assert main(["list", "--json", path]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"key": "a\n\x1b[31m", "start_byte": 3, "end_byte": 3},
        {"key": "b", "start_byte": 0, "end_byte": 3},
    ]


def test_list_cannot_move_the_cursor(here, capsys):
    path = write_archive(here / "o.caf", {"a\n\x1b[31m\x9b\u202e\\": b"x"})
    assert main(["list", path]) == 0
    assert capsys.readouterr().out.split(maxsplit=1)[1] == "a\\n\\x1b[31m\\x9b\\u202e\\\\\n"


def test_cat_writes_the_bytes(here, capfdbinary):
    path = write_archive(here / "o.caf", {"a": bytes(range(256)) * 5000})
    assert main(["cat", path, "a"]) == 0
    assert capfdbinary.readouterr().out == bytes(range(256)) * 5000


def test_cat_of_a_missing_member_fails(here, capsys):
    assert main(["cat", write_archive(here / "o.caf", {}), "nope"]) == 4
    assert "'nope'" in capsys.readouterr().err


def test_verify_reports_dead_bytes_and_overlaps(here, capsys):
    (here / "o.caf").write_bytes(caf_bytes(bytes(10), index_of(("a", 0, 4), ("b", 2, 6))))
    assert main(["verify", "--json", "o.caf"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (
        report["members"],
        report["data_bytes"],
        report["dead_bytes"],
        report["gaps"],
        report["overlaps"],
    ) == (2, 10, 4, 1, 1)


@pytest.mark.parametrize("command", [["list"], ["extract"], ["cat", "KEY"], ["verify"]])
def test_every_command_reports_a_malformed_archive(here, capsys, command):
    (here / "o.caf").write_bytes(b"this is no archive")
    assert main([command[0], "o.caf", *command[1:]]) == 4
    assert capsys.readouterr().err.startswith("caf: error: o.caf: ")


@pytest.mark.parametrize("index_bytes", [b"\xff\xff\xff\x7f", b"\x04\0\0\0"])
def test_an_encrypted_archive_is_named_so(here, capsys, index_bytes):
    (here / "o.caf").write_bytes(b"age-encryption.org/v1\n" + bytes(100) + index_bytes)
    assert main(["list", "o.caf"]) == 4
    assert "encrypted" in (error := capsys.readouterr().err)
    assert "age -d" in error


def test_lenience_is_optional_and_warns(here, capsys):
    entry = b'"a":{"start_byte":0,"end_byte":1}'
    (here / "o.caf").write_bytes(
        caf_bytes(b"x", b'{"format_version":"1.0","files":{' + entry + b"," + entry + b"}}")
    )
    assert main(["list", "o.caf"]) == 4
    assert main(["list", "--lenient", "o.caf"]) == 0
    assert "warning" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["list"], ["cat", "d/a/x"], ["verify"], ["merkle"]])
def test_a_url_works_like_a_path(here, capfd, command):
    main(["create", "o.caf", "d"])
    capfd.readouterr()
    with serving(Site((here / "o.caf").read_bytes())) as site:
        outputs = []
        for address in ("o.caf", site.url):
            assert main([command[0], address, *command[1:]]) == 0
            outputs.append(capfd.readouterr().out)
    assert outputs[0] == outputs[1]


def test_an_empty_file_has_no_root(here, capsys):
    assert main(["merkle", "d/a.b"]) == 4
    assert "empty" in capsys.readouterr().err


# --- extract

UNHOLDABLE = [
    "",
    "/abs",
    "../up",
    "a/../../up",
    "dir/",
    ".",
    "..",
    "a//b",
    "./c",
    "n\0l",
    "x" * 300,
    "good/below",
]


def test_an_impossible_path_is_reported_and_the_rest_extracted(here, capsys):
    path = write_archive(
        here / "o.caf", {"good": b"1"} | dict.fromkeys(UNHOLDABLE, b"evil") | {"zz/last": b"2"}
    )
    assert main(["extract", path, "-C", "out"]) == 1
    assert tree(here / "out") == {"good": b"1", "zz/last": b"2"}
    assert not (here / "up").exists()
    errors = capsys.readouterr().err
    assert all(repr(key) in errors for key in UNHOLDABLE)
    assert f"{len(UNHOLDABLE)} of {len(UNHOLDABLE) + 2} members" in errors


def test_links_inside_the_folder_do_not_lead_out(here):
    (here / "outside").mkdir()
    (here / "out").mkdir()
    (here / "out" / "folder").symlink_to(here / "outside")
    (here / "out" / "file").symlink_to(here / "outside" / "file")
    path = write_archive(here / "o.caf", {"folder/x": b"evil", "file": b"replaces the link"})
    assert main(["extract", "--force", path, "-C", "out"]) == 1
    assert os.listdir(here / "outside") == []
    assert (here / "out" / "file").read_bytes() == b"replaces the link"


def test_an_existing_file_is_kept_unless_forced(here):
    path = write_archive(here / "o.caf", {"d/Z": b"new", "d/other": b"new"})
    assert main(["extract", path]) == 1
    assert ((here / "d/Z").read_bytes(), (here / "d/other").read_bytes()) == (b"z" * 1000, b"new")
    assert main(["extract", path, "--force"]) == 0
    assert (here / "d/Z").read_bytes() == b"new"


def test_a_folder_is_never_replaced_by_a_file(here, capsys):
    assert main(["extract", "--force", write_archive(here / "o.caf", {"d": b"1"})]) == 1
    assert "'d'" in capsys.readouterr().err
    assert (here / "d" / "Z").exists()


def test_only_the_members_asked_for_are_extracted(here, capsys):
    path = write_archive(here / "o.caf", {"a": b"1", "b": b"2", "c": b"3"})
    assert main(["extract", "--json", path, "c", "a", "missing", "-C", "out"]) == 1
    assert tree(here / "out") == {"a": b"1", "c": b"3"}
    assert [json.loads(line)["key"] for line in capsys.readouterr().out.splitlines()] == ["a", "c"]


def test_a_large_member_and_neighbours_are_extracted_right(here):
    bodies = {"big": os.urandom(9 << 20), "small": b"s", "zero": b""}
    assert main(["extract", write_archive(here / "o.caf", bodies), "-C", "out"]) == 0
    assert tree(here / "out") == bodies


# --- the process


def test_a_broken_pipe_ends_the_command_quietly(here):
    path = write_archive(here / "o.caf", {f"key {n:06}": b"" for n in range(20_000)})
    with subprocess.Popen(
        [*CAF, "list", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_ctrl_c_ends_the_command_with_130_and_leaves_nothing(here):
    big = here / "d" / "big"
    big.touch()
    os.truncate(big, 8 << 30)
    with subprocess.Popen([*CAF, "create", "o.caf", "d"], stderr=subprocess.PIPE) as process:
        while not any(name.endswith(".partial") for name in os.listdir(here)):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert b"Traceback" not in process.stderr.read()
    assert process.returncode == 130
    assert os.listdir(here) == ["d"]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_device_is_one_sentence(here, unbuffered):
    path = write_archive(here / "o.caf", {"a": b"1"})
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "wb") as full:
        run = subprocess.run(
            [*CAF, "list", path],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=environment,
        )
    assert run.returncode == 8
    assert run.stderr == f"caf: error: {os.strerror(errno.ENOSPC)}.\n"


def test_the_help_lists_the_common_exit_statuses(capsys):
    assert main(["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert {"8 (the", "130 (Ctrl", "141 (the"} <= set(re.findall(r"\d+ \(\w+", text))


def run_by_shell(redirected, *arguments):
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    command = ["sh", "-c", f'exec "$@" {redirected}', "sh", *CAF, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_closed_output_is_one_sentence(here):
    path = write_archive(here / "o.caf", {"a": b"1"})
    run = run_by_shell(">&-", "list", path)
    assert (run.returncode, run.stderr) == (1, f"caf: error: {os.strerror(errno.EBADF)}.\n")


def test_notes_for_a_closed_stderr_never_go_to_stdout(here):
    path = write_archive(here / "o.caf", {"a": b"1"})
    run = run_by_shell("2>&-", "cat", path, "b")
    assert (run.returncode, run.stdout) == (4, "")


def test_listing_loads_nothing_heavy(here):
    path = write_archive(here / "o.caf", {"a": b"1"})
    program = (
        "import sys; from caf_pipeline.cli import main; main(['list', sys.argv[1]]);"
        "heavy = ('dagster', 'boto3', 'pyarrow', 'numpy', 'httpx', 'pydantic_settings', 'psycopg', "
        "'sqlalchemy');"
        "print([name for name in heavy if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, path], capture_output=True, text=True, check=True
    )
    assert run.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["create", "list", "extract", "cat", "verify", "merkle"])
def test_the_help_of_each_command_has_examples_and_exit_statuses(command, capsys):
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"caf {command} " in text.partition("Examples:")[2]
    assert "Exit status:\n    0  " in text


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("30GiB", 30 << 30), ("64MiB", 64 << 20), ("1000000", 10**6), ("7 KiB", 7168)],
)
def test_sizes_are_read(text, size_bytes):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "30GB", "-1", "1.5GiB", "GiB", "٣"])
def test_an_invalid_size_is_refused(text):
    with pytest.raises(UsageError):
        parse_size(text)


def test_printable_text_is_left_alone():
    assert printable("plain/ü 日本.txt") == "plain/ü 日本.txt"
