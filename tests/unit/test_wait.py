"""`elastic-etcd wait`, and `events --follow` while etcd is silent: on jobs without agents."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from msgspec.structs import replace

from elastic_etcd.core.schema import Keys, Phase, encode
from tests.support.etcd import EtcdServer
from tests.support.jobs import FAILURE, FINAL, KEYS, OUTCOME, RUNNING

FAILED = replace(OUTCOME, state="failed", reason="it is over", failure=FAILURE, exit_code=3)


class Shell:
    def __init__(self, etcd: EtcdServer, prefix: str) -> None:
        self.etcd, self.keys = etcd, Keys(f"{prefix}/j")
        self.where = ("--etcd", etcd.endpoint, "--prefix", prefix, "--timeout", "60")

    def put(self, values: dict[str, str]) -> None:
        # Nodes come first, as else the job would be deserted for a moment.
        for key, value in sorted(values.items(), key=lambda kv: KEYS.members not in kv[0]):
            self.etcd.ctl("put", key.replace(KEYS.root, self.keys.root), value)

    @contextmanager
    def begun(self, command: str, *flags: str) -> Iterator["subprocess.Popen[str]"]:
        argv = [sys.executable, "-m", "elastic_etcd", command, "j", *self.where, *flags]
        with subprocess.Popen(
            argv, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def run(self, words: str, closed: str) -> "subprocess.CompletedProcess[str]":
        """Run a command whose standard streams bash has closed, or nobody reads."""
        program = [sys.executable, "-m", "elastic_etcd", *words.split(), *self.where]
        argv = ["bash", "-o", "pipefail", "-c", f'exec "$@" {closed}', "bash", *program]
        return subprocess.run(argv, text=True, capture_output=True, check=False, timeout=90)

    def waited(self, *flags: str) -> tuple[int, str, str]:
        with self.begun("wait", *flags) as process:
            out, err = process.communicate(timeout=90)
        return process.returncode, out, err


@pytest.fixture
def shell(etcd: EtcdServer, prefix: str) -> Iterator[Shell]:
    yield Shell(etcd, prefix)
    etcd.ctl("del", "--prefix", prefix)


@pytest.mark.parametrize(("state", "code"), [("succeeded", 0), ("failed", 1), ("stopped", 3)])
def test_its_exit_code_tells_the_outcome(shell: Shell, state: str, code: int) -> None:
    """Of a job that begins later than it, and does not end at once."""
    with shell.begun("wait") as process:
        assert process.stderr
        assert next(process.stderr).endswith(f"has no job at {shell.keys.root} yet\n")
        shell.put(RUNNING)
        shell.put({KEYS.outcome: encode(replace(FAILED, state=state))})
        out, err = process.communicate(timeout=90)
    assert (process.returncode, err) == (code, "")
    assert out.splitlines() == [
        f"job j: {state} since 2026-11-21T10:03:06Z, generation 2",
        "  because it is over",
        "  last words: RuntimeError: why",
    ]
    assert shell.waited("--for", "training")[0] == code, "it has trained, or will not"


@pytest.mark.parametrize("until", ["end", "training"])
def test_a_note_says_that_the_outcome_was_there_before(shell: Shell, until: str) -> None:
    """Agents that have not joined yet are in no key, and will begin another run."""
    shell.put({KEYS.outcome: encode(OUTCOME)})
    code, out, err = shell.waited("--for", until)
    assert (code, out.splitlines()[0].partition(",")[0]) == (
        0,
        "job j: succeeded since 2026-11-21T10:03:06Z",
    )
    assert err == (
        "note: job j was over before: if agents were just started for another run, this is the "
        "former one's end\n"
    )


def test_a_world_is_waited_for(shell: Shell) -> None:
    forming = {KEYS.round: encode(replace(FINAL, phase=Phase.JOINABLE))}
    shell.put(RUNNING | forming)
    with shell.begun("wait", "--for", "training") as process, shell.begun("wait") as to_the_end:
        shell.put(RUNNING)
        out, _ = process.communicate(timeout=90)
        assert (process.returncode, out.partition(" since")[0]) == (0, "job j: training")
        assert to_the_end.poll() is None


def test_a_deserted_job_is_waited_for_with_a_note(shell: Shell) -> None:
    shell.put({key: value for key, value in RUNNING.items() if not key.startswith(KEYS.members)})
    with shell.begun("wait") as process:
        assert process.stderr
        assert next(process.stderr).startswith("note: job j is deserted: it goes on if agents ")
        shell.put({KEYS.outcome: encode(OUTCOME)})
        assert process.wait(90) == 0


@pytest.mark.parametrize(("command", "flags"), [("events", ["--follow"]), ("wait", [])])
def test_o7_who_follows_a_job_is_told_that_etcd_is_silent(
    shell: Shell, command: str, flags: list[str]
) -> None:
    if command == "events":
        shell.put(RUNNING)
    with shell.begun(command, *flags, "--timeout", "5") as process:
        assert process.stderr
        assert process.stdout
        next(process.stdout if command == "events" else process.stderr)  # it has begun
        shell.etcd.freeze()
        try:
            assert next(process.stderr).startswith("note: no answer from etcd since 2")
        finally:
            shell.etcd.thaw()
        assert next(process.stderr) == "note: etcd answers\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


@pytest.mark.parametrize(
    ("words", "closed", "code", "told"),
    [
        ("wait j --for training", ">&-", 0, ""),
        ("status j", ">&- 2>&-", 0, ""),
        ("top j", "<&-", 0, ""),
        ("stop --all", "<&-", 2, "here is no terminal: give --yes"),
    ],
)
def test_closed_streams_change_no_exit_code(
    shell: Shell, words: str, closed: str, code: int, told: str
) -> None:
    shell.put(RUNNING)
    done = shell.run(words, closed)
    assert (done.returncode, told in done.stderr, "Traceback" in done.stderr) == (code, True, False)


def test_notes_do_not_go_among_json_where_stderr_is_closed(shell: Shell) -> None:
    shell.put(RUNNING)
    assert json.loads(shell.run("stop --all --yes --json", "2>&-").stdout)["job"] == "j"


def test_its_exit_code_tells_the_outcome_also_where_nobody_reads(shell: Shell) -> None:
    shell.put(RUNNING)
    shell.put({KEYS.outcome: encode(FAILED)})
    assert shell.run("wait j", "| true").returncode == 1
