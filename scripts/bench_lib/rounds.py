"""What is written to a job's keys, and when a watcher sees it, through etcdctl."""

import base64
import json
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_etcd.etcd.embedded import find_program

from .nodes import STAMP


@dataclass(frozen=True)
class Written:
    """One key of one commit. `at` is CLOCK_MONOTONIC; no value: removed."""

    at: float
    revision: int
    key: str
    value: dict[str, Any] | None

    @property
    def kind(self) -> str:
        """Such as "acks" or "round"."""
        return self.key.split("/")[0]


class RoundsWatch:
    """Watches a job from its first key on; a process of its own stamps each answer's arrival."""

    def __init__(self, endpoint: str, root: str) -> None:
        self._root = root
        self._seen = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open until close()
        etcdctl = str(Path(find_program()).with_name("etcdctl"))
        watch = [etcdctl, "--endpoints", endpoint, "watch", "--prefix", root, "-w", "json"]
        self._watch = subprocess.Popen(watch, stdout=subprocess.PIPE)
        stamp = [sys.executable, "-S", "-c", STAMP]
        self._stamp = subprocess.Popen(stamp, stdin=self._watch.stdout, stdout=self._seen)
        assert self._watch.stdout
        self._watch.stdout.close()

    def close(self) -> list[Written]:
        """All that was written, in order."""
        self._watch.send_signal(signal.SIGTERM)
        self._watch.wait()
        self._stamp.wait()
        self._seen.seek(0)
        found = []
        for line in self._seen:
            stamp, _, answer = line.partition(" ")
            for event in json.loads(answer).get("Events", []):
                kv = event["kv"]
                key = base64.b64decode(kv["key"]).decode()[len(self._root) + 1 :]
                value = json.loads(base64.b64decode(kv["value"])) if "value" in kv else None
                found.append(Written(float(stamp), kv["mod_revision"], key, value))
        self._seen.close()
        return found
