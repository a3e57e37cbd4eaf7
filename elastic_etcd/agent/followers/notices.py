"""A notice that this machine is about to be taken away: a file that appears.

A thread looks, because each look may wait. An agent loads this module with --preemption-watch only.
examples/spot has programs that make such a file of what a cloud's metadata service says.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from elastic_etcd.agent.inbox import Notice

_PERIOD = 1.0  # seconds between two looks
_SELDOM = 12  # times as long, while the place can't be read
_MOST = 1e6  # seconds that the file may say

log = logging.getLogger(__name__)


class Watch:
    """Looks for the file at `path`, in a thread of its own, until it is there or this is closed.

    The file may hold a number: the seconds that are left. `found(notice)` is called in that
    thread, once.
    """

    def __init__(self, path: str, found: Callable[[Notice], None]) -> None:
        self._path = Path(path)
        self._found = found
        self._ended = threading.Event()
        threading.Thread(target=self._look_for_the_file, name="notices", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._ended.set()

    def _look_for_the_file(self) -> None:
        pause, fails, empty = 0.0, False, False
        while not self._ended.wait(pause):
            pause = _PERIOD
            try:
                text = self._path.read_text(errors="replace").strip()
            except FileNotFoundError:
                continue
            except OSError as error:
                pause *= _SELDOM
                if not fails:
                    log.warning("--preemption-watch: can't be read, and is tried again: %s", error)
                fails = True
                continue
            if text or empty:
                self._found(Notice(f"{self._path} is there", seconds_left(text)))
                return
            empty = True  # it may be written to right now


def seconds_left(text: str) -> float | None:
    """Return the seconds that the file says are left; None where its text is no such number."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 < seconds <= _MOST else None
