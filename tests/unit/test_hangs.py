"""What is found out about a process that hangs, whatever it is called."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from elastic_etcd.agent.followers.evidence import _kernel_state, status

# A name is cut at 15 bytes, here inside a character.
NAMED = r"""
import ctypes, sys
ctypes.CDLL(None).prctl(15, "train\u5b66\u7fd2\u30d7\u30ed".encode()[:15] + b"\0")
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def named() -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", NAMED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_a_name_that_is_cut_inside_a_character(named: "subprocess.Popen[str]") -> None:
    assert status(named.pid, "TracerPid") == "0"
    _, thread = _kernel_state(named.pid)
    assert thread.startswith(f"{named.pid} {named.pid} train")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can join groups")
def test_a_user_in_many_groups_has_a_status() -> None:
    """Their numbers come before the signals that it handles, and are 4 KB of 310 groups."""
    code = f"import os; os.setgroups(range(1 << 31, (1 << 31) + 500)); {NAMED}"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert status(process.pid, "SigCgt") != ""
        process.kill()


def test_a_process_that_is_gone_has_nothing(named: "subprocess.Popen[str]") -> None:
    named.kill()
    named.wait()
    assert status(named.pid, "TracerPid") == ""
    assert len([*_kernel_state(named.pid)]) == 1
