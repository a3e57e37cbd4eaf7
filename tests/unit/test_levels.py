"""What pytest says at its end of the cost of each folder's tests."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.support import levels

SPINS = """
import sys, time
while time.process_time() < 0.3:
    pass
print(flush=True)
sys.stdin.read()
"""


def test_rows_are_added_up_and_the_most_expensive_comes_first(tmp_path: Path) -> None:
    rows = tmp_path / "levels"
    lines = [["unit", 3, 60, 30], ["e2e", 1, 120, 90], ["unit", 1, 60, 30]]
    rows.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    command = [sys.executable, "-m", "tests.support.levels", str(rows)]
    told = subprocess.check_output(command, text=True).splitlines()
    assert [line.split() for line in told[1:]] == [
        ["e2e", "1", "2.0", "1.5"],
        ["unit", "4", "2.0", "1.0"],
        ["all", "5", "4.0", "2.5"],
    ]


def test_a_child_counts_while_it_lives_and_afterwards() -> None:
    before = levels.cpu()
    command = [sys.executable, "-c", SPINS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout
        child.stdout.readline()
        alive = levels.cpu()
    # The kernel counts in hundredths of a second, and sums of them are not exact.
    assert levels.cpu() + 0.001 >= alive >= before + 0.25


def test_threads_may_end_while_it_looks() -> None:
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            threads = [threading.Thread(target=time.sleep, args=(1e-4,)) for _ in range(50)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    others = threading.Thread(target=come_and_go)
    others.start()
    try:
        assert all(levels.cpu() > 0 for _ in range(2000))
    finally:
        over.set()
        others.join()
