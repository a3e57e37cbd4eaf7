"""A loop that stands still is told while it does, by a thread."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from elastic_etcd.agent.followers.loop_watchdog import Watchdog
from tests.support.aio import elapse

DEADLINE = 30.0


class Heard(logging.Handler):
    """Wakes up whoever waits for a line with these words."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self._words = words
        self.heard = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self._words in record.getMessage():
            self.heard.set()


@pytest.fixture
def logger() -> logging.Logger:
    return logging.getLogger("elastic_etcd")


async def test_r8_a_loop_that_stands_still_is_told_with_its_stack(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    def blocks_the_loop() -> None:
        assert told.heard.wait(DEADLINE), "it has to be told without the loop"

    told, again = Heard("has stood still"), Heard("turns again")
    logger.addHandler(told)
    logger.addHandler(again)
    try:
        async with Watchdog(ttl=0.4):
            blocks_the_loop()
            assert await asyncio.to_thread(again.heard.wait, DEADLINE)
    finally:
        logger.removeHandler(told)
        logger.removeHandler(again)
    message = next(r.getMessage() for r in caplog.records if "stood still" in r.getMessage())
    assert message.count("called by") == 4
    assert "called by blocks_the_loop (test_watchdog.py:" in message


STOPPED = """
import asyncio, logging, sys
from elastic_etcd.agent.followers.loop_watchdog import Watchdog

async def watched():
    async with Watchdog(ttl=1.0):
        print("watched", flush=True)
        await asyncio.sleep(600)

logging.basicConfig(stream=sys.stdout)
asyncio.run(watched())
"""


def test_a_process_that_was_stopped_says_so() -> None:
    command = [sys.executable, "-u", "-c", STOPPED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "watched\n"
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        time.sleep(1.0)  # so long it stands still
        process.send_signal(signal.SIGCONT)
        assert "this process stood still for" in process.stdout.readline()
        process.kill()


async def test_a_loop_that_turns_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    async with Watchdog(ttl=60):
        await elapse(0.5)
    assert not caplog.records
