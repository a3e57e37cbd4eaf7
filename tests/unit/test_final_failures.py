"""Which failures another start would only repeat, by what workers of real scripts have said."""

import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from elastic_etcd.agent.failures import failure_message
from elastic_etcd.core.final_failures import TRAINED, is_usage_error, noted, why_final
from elastic_etcd.core.peers import was_left
from elastic_etcd.core.schema import Failure

USAGE = """
from elastic_etcd.errors import UsageError, WrongHere
import atexit
atexit.register(lambda: __import__("sys").stderr.write("tracker: 3 records were written\\n"))
try:
    1 / 0
except ZeroDivisionError:
    raise {}("two lines:\\nmore of it")
"""
ARGUMENTS = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, required=True)
parser.parse_args()
"""
GLOO = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection reset by peer"


def failed(folder: Path, script: str) -> Failure:
    """The failure of a worker that runs this script."""
    path = folder / "train.py"
    path.write_text(script)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, check=False)
    said = failure_message(done.returncode, "", done.stderr, 0)
    return Failure("n1", 1, 1, 42, done.returncode, 1.5, said)


def final(failure: Failure, before: str = "", trained: float = 2.0) -> str:
    return why_final(before, noted(before, failure, trained), failure)


def test_t13_a_usage_error_is_final_at_once(tmp_path: Path) -> None:
    failure = failed(tmp_path, USAGE.format("UsageError"))
    assert is_usage_error(failure)
    assert final(failure) == "a UsageError, which no restart mends"
    assert final(replace(failure, step=1000), TRAINED, 9999.0)


def test_t13_what_is_wrong_on_one_node_or_once_is_not(tmp_path: Path) -> None:
    failure = failed(tmp_path, USAGE.format("WrongHere"))
    assert not is_usage_error(failure)
    assert final(failure) == ""
    assert noted("", failure, 2.0).startswith("exit code 1: elastic_etcd.errors.WrongHere: two")


@pytest.mark.parametrize(
    "script", ["train(", "def train():\nreturn 1", "if True:\n\tx = 1\n        y = 2"]
)
def test_t13_a_script_that_cannot_be_read_is_final_at_once(tmp_path: Path, script: str) -> None:
    failure = failed(tmp_path, script)
    assert final(failure) == "a script that can't be read, which no restart mends"
    assert final(failure, TRAINED) == "", "somebody may be about to write it"


@pytest.mark.parametrize(
    "script", ["import no_such_module", "import sys\nsys.exit('no data')", ARGUMENTS]
)
def test_t13_the_same_error_twice_is_final_before_the_first_step(
    tmp_path: Path, script: str
) -> None:
    failure = failed(tmp_path, script)
    assert final(failure) == ""
    before = noted("", failure, 2.0)
    assert final(failure, before) == "the same error twice before the first step"
    assert final(replace(failure, node="n2", rank=7, pid=43), before)
    assert final(failure, before + "0") == final(failure, TRAINED) == ""
    for later in (replace(failure, step=1), replace(failure, code=3)):
        assert final(later, before) == ""
    left = was_left(replace(failure, step=11), "rank 1 on n2 ended")
    assert noted(before, left, 2.0) == TRAINED
    assert final(failure, before, trained=600.0) == "", "nobody may see its steps"
    assert noted(before, failure, 600.0) == noted("", replace(failure, step=1), 2.0) == TRAINED


def test_t13_the_same_error_elsewhere_is_another(tmp_path: Path) -> None:
    first = failed(tmp_path, "def load():\n    raise OSError('no answer')\nload()")
    second = failed(tmp_path, "\ndef load():\n    raise OSError('no answer')\nload()")
    assert noted("", first, 2.0) != noted("", second, 2.0)


@pytest.mark.parametrize(
    "failure",
    [
        Failure("n1", 1, 1, 42, -9, 1.5, "out of memory: the kernel has killed it"),
        Failure("n1", 1, 1, 42, 1, 1.5, ""),
        Failure("n1", 1, 1, 42, 1, 1.5, GLOO),
        Failure("n1", 1, 1, 42, 1, 1.5, "RuntimeError: CUDA error: all devices are busy"),
        Failure("", 0, 0, 0, 0, 1.5, "", hang="the store server on n1 was killed by SIGKILL"),
    ],
)
def test_t13_what_may_have_another_cause_each_time_is_tried_again(failure: Failure) -> None:
    assert noted("", failure, 2.0) == ""
    assert final(failure) == ""
