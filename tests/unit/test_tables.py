"""Tables of any terminal's width, and commands whose output is a pipe, a full disk or ASCII."""

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_etcd.cli.status import jobs_table
from elastic_etcd.cli.tables import cut, table, told_apart
from elastic_etcd.core.schema import Member, encode
from tests.support.etcd import EtcdServer
from tests.support.jobs import KEYS, RUNNING

# As the manifests of examples/kubernetes call nodes.
NAMES = [f"gpu-pool-a-{n}.europe-west4.compute.example.org-{n % 8}" for n in range(9, 12)]
JOB = {
    "state": "training",
    "why": "x" * 200,
    "last_words": "",
    "hangs_since": None,
    "restarts": 1,
    "limits": None,
    "nodes": {"training": 128, "spare": 3, "leaving": 12},
    "world_size": 1024,
}


def test_o4_names_give_way_last_and_stay_apart() -> None:
    _, *rows = jobs_table([JOB | {"job": name} for name in NAMES], 80)
    assert len({row.split()[0] for row in rows}) == len(NAMES), rows
    assert all(len(row) <= 80 for row in rows)
    _, *rows = jobs_table([JOB | {"job": name} for name in NAMES], 120)
    assert [row.split()[0] for row in rows] == NAMES, "what is behind gives way first"


@given(st.lists(st.text("ab-", min_size=1, max_size=30), min_size=1, unique=True), st.integers(8))
def test_o4_names_are_cut_where_they_are_alike(names: list[str], most: int) -> None:
    told = told_apart(names, most)
    assert max(map(len, told)) <= most
    middles = [name.replace("~", "") for name in told]
    assert all(middle in name for middle, name in zip(middles, names, strict=True))


@pytest.mark.parametrize("before", ["", "a-long-way-"])
@pytest.mark.parametrize("after", ["", "-of-saying-nothing"])
def test_o4_none_looks_as_another(before: str, after: str) -> None:
    names = [f"{before}{n}{after}" for n in range(8, 12)]
    assert len(set(told_apart(names, 8))) == len(names)
    assert told_apart(names, 40) == names


WIDE = st.text("a\u30ce\u8282", max_size=30)  # two of these take two columns each


@given(st.lists(st.tuples(WIDE, WIDE, WIDE), min_size=1), st.integers(30, 60))
def test_wide_characters_count_twice(rows: list[tuple[str, str, str]], room: int) -> None:
    lines = table(("name", "n", "text"), rows, room, soft=(2,), right=(1,))
    assert all(sum(1 if c.isascii() else 2 for c in line) <= room for line in lines)
    assert sum(1 if c.isascii() else 2 for c in cut(rows[0][2], 8)) <= 8


def test_a_table_has_no_more_than_its_room() -> None:
    assert table(("name", "n"), [("\u8282\u70b9", "1"), ("a", "22")], 9, right=(1,)) == [
        "name   n",
        "\u8282\u70b9   1",
        "a     22",
    ]
    lines = table(("name", "n", "text"), [("a", "1", "why\n\x1b"), ("b", "22", "")], 14, right=(1,))
    assert lines == ["name   n  text", "a      1  why~", "b     22"]
    assert cut("too long", 4) == "too~"
    assert table(("name", "n"), [], 80) == ["name  n"]


# --- where it goes ------------------------------------------------------------------------


@pytest.fixture
def command(etcd: EtcdServer, prefix: str) -> Iterator[list[str]]:
    for key, value in RUNNING.items():
        etcd.ctl("put", key.replace(KEYS.root, f"{prefix}/j"), value)
    odd = Member(0xC, "gpu:100:a-ü", 1, "2001:db8::7", run="r")
    etcd.ctl("put", f"{prefix}/j/members/{0xC:016x}", encode(odd))
    where = ("--etcd", etcd.endpoint, "--prefix", prefix, "--timeout", "60")
    yield [sys.executable, "-m", "elastic_etcd", "status", "j", *where]
    etcd.ctl("del", "--prefix", prefix)


@pytest.mark.parametrize("kind", ["status", "top", "events", "report"])
def test_o5_who_reads_the_first_line_only_breaks_nothing(command: list[str], kind: str) -> None:
    command[3] = kind
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_o5_a_full_disk_is_told(command: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "error: standard output: No space left on device\n",
    )


def test_o5_any_name_is_shown_in_ascii(command: list[str]) -> None:
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=env, capture_output=True, check=True)
    assert b"gpu:100:a-\\xfc" in done.stdout, "no emoji, either"


@pytest.mark.parametrize("term", ["dumb", None])
def test_o7_a_dumb_terminal_is_shown_the_job_once(command: list[str], term: str | None) -> None:
    command[3] = "top"
    env = {name: value for name, value in os.environ.items() if name != "TERM"}
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command,
        env=env | ({"TERM": term} if term else {}),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    ) as process:
        assert process.wait(90) == 0
    os.close(theirs)
    told = os.read(ours, 1 << 16)
    os.close(ours)
    assert b"job j: training" in told
    assert b"\x1b" not in told
