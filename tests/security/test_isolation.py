"""No job can name, cover or remove another's keys, whatever its user calls it."""

import contextlib
import io
import os
import subprocess
import sys

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from elastic_etcd.cli import status
from elastic_etcd.core.schema import PARTS, Keys, Outcome, valid_job, valid_prefix
from elastic_etcd.core.txn import Delete, Get
from elastic_etcd.core.view import Everything, Narrow, covered
from elastic_etcd.core.writes import _end_run, look
from elastic_etcd.errors import UsageError
from elastic_etcd.etcd import wire
from elastic_etcd.launch import parse
from tests.support.etcd import EtcdServer

numbers = st.integers(0, 1 << 40)
near = st.text(st.sampled_from("ab/.-_%\0\n *\u00e4"), max_size=4) | st.sampled_from(sorted(PARTS))
strings = st.text(max_size=8) | near
SCRIPT = ["--etcd=h:1", "--nnodes=1:2", os.devnull]
ODD = (
    "",
    ".",
    "..",
    "a/b",
    "a\0",
    "a\n",
    "a%2f",
    "\u00e4",
    "a b",
    "a" * 129,
    "\udcff",
    "*",
    "acks",
)


@settings(max_examples=300)
@given(strings, strings)
@example("a", "/a/../b")
@example("..", "/a")
@example("a\0", "/a")
@example("a", "/a\n")
def test_any_id_is_refused_or_a_segment(job: str, prefix: str) -> None:
    """A usage error, which is exit code 2, or keys that lie strictly under the job's own."""
    argv = [f"--job={job}", f"--prefix={prefix}", *SCRIPT]
    if not (valid_job(job) and valid_prefix(prefix)):
        with pytest.raises(UsageError):
            parse(argv, {})
        return
    config = parse(argv, {})
    assert (config.job, config.prefix) == (job, prefix)
    root = f"{config.prefix}/{config.job}/"
    assert all(c in "/._-" or (c.isascii() and c.isalnum()) for c in root)
    assert not {"", ".", "..", *PARTS} & set(root[1:-1].split("/"))


# Few of the names that are refused: what has one of them is left out.
PLAIN = ["a", "ab", "a-b", "a.", "b", "x", "acksa", "members2"]
segments = st.sampled_from([*PLAIN * 20, *sorted(PARTS)])
roots = st.tuples(st.lists(segments, min_size=1, max_size=4), segments).map(
    lambda of: ("/" + "/".join(of[0]), of[1])
)


def ranges(keys: Keys, generation: int, lease: int) -> list[tuple[bytes, bytes]]:
    """All that a job ever reads of others or removes by range, as etcd takes it."""
    removed = [d for d in _end_run(keys, Outcome("", "", "", 0, 0)) if isinstance(d, Delete)]
    removed += [Delete(keys.acks(generation), prefix=True)]
    removed += [Delete(keys.reports(generation), prefix=True)]
    read = [*look(keys), *covered(keys, Narrow(lease), lease), Get(keys.history(), prefix=True)]
    every: list[Get | Delete] = [*removed, *read]
    return [(wire.encode(of.key), wire.range_end(of.key, of.prefix)) for of in every]


def own(keys: Keys, generation: int, lease: int) -> list[bytes]:
    names = [keys.spec, keys.ledger, keys.round, keys.outcome, keys.member(lease)]
    names += [keys.ack(generation, lease), keys.report(generation, lease), keys.history(generation)]
    return [wire.encode(name) for name in names]


@settings(max_examples=60)
@given(roots, roots, numbers, numbers)
@example(("/p", "a"), ("/p", "ab"), 1, 1)
@example(("/p", "a"), ("/p/a", "acks"), 1, 1)
@example(("/p", "a"), ("/p/a/acks", "x"), 1, 1)
@example(("/p", "a"), ("/p/a", "x"), 1, 1)
def test_what_one_job_reads_and_removes_is_never_anothers(
    one: tuple[str, str], other: tuple[str, str], generation: int, lease: int
) -> None:
    assume(one != other)
    for prefix, job in (one, other):
        assume(valid_prefix(prefix) and valid_job(job))
    mine, theirs = (Keys(f"{prefix}/{job}") for prefix, job in (one, other))
    for start, end in ranges(mine, generation, lease):
        for key in own(theirs, generation, lease):
            assert not (start <= key < end if end else key == start), (start, key)
    assert not set(own(mine, generation, lease)) & set(own(theirs, generation, lease))


def test_the_whole_of_one_job_is_not_the_whole_of_another() -> None:
    (a,) = covered(Keys("/p/a"), Everything())
    end = wire.range_end(a.key, a.prefix)
    for other in ("ab", "a-", "a.", "a0", "b", "A"):
        assert not wire.encode(a.key) <= wire.encode(f"/p/{other}/spec") < end


@pytest.mark.parametrize("job", ODD, ids=ascii)
def test_status_refuses_what_is_no_job(job: str) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert status.main([job, "--etcd=127.0.0.1:9"]) == 2
    assert said.getvalue().startswith("error: ")


@pytest.mark.parametrize("job", [job for job in ODD if "\0" not in job], ids=ascii)
def test_launch_refuses_what_is_no_job(job: str) -> None:
    argv = [sys.executable, "-m", "elastic_etcd.launch", f"--job={job}", *SCRIPT]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_status_of_one_job_shows_and_changes_no_other(etcd: EtcdServer, prefix: str) -> None:
    for job in ("a", "ab", "a.b"):
        value = f'{{"v": 1, "generation": 1, "ended": "of {job}"}}'
        etcd.ctl("put", f"{prefix}/{job}/history/1", value)
    before = etcd.ctl("get", "--prefix", prefix, "-w=json")
    argv = [sys.executable, "-m", "elastic_etcd", "status", "a", f"--prefix={prefix}"]
    done = subprocess.run(
        [*argv, f"--etcd={etcd.endpoint}"], capture_output=True, text=True, check=True
    )
    assert "of a\n" in done.stdout
    assert "of ab" not in done.stdout
    assert "of a.b" not in done.stdout
    assert etcd.ctl("get", "--prefix", prefix, "-w=json").count("mod_revision") == before.count(
        "mod_revision"
    )
