"""When a watcher sees the acks and the rounds of a job, through etcdctl."""

import base64
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from elastic_etcd.etcd.embedded import find_program

STAMP = """
import sys, time
for line in sys.stdin:
    print(time.monotonic(), line, end="", flush=True)
"""


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

    def close(self) -> list[float]:
        """Seconds from the last needed ack to the final round, for each generation.

        The last needed ack is the last one before the round is frozen, or the end of the lease
        of a member whose ack will not come; from there on the coordinator waits for nobody but
        group rank 0's offer of its store.
        """
        self._watch.send_signal(signal.SIGTERM)
        self._watch.wait()
        self._stamp.wait()
        self._seen.seek(0)
        needed, frozen = 0.0, False
        found = []
        for line in self._seen:
            stamp, _, answer = line.partition(" ")
            for event in json.loads(answer).get("Events", []):
                kv = event["kv"]
                kind = base64.b64decode(kv["key"]).decode()[len(self._root) :].split("/")[1]
                phase = json.loads(base64.b64decode(kv.get("value", "e30="))).get("phase")
                acked = kind == "acks" and "value" in kv and not frozen
                if acked or (kind == "members" and "value" not in kv):
                    needed = float(stamp)
                elif kind == "round" and phase == "frozen":
                    frozen = True
                elif kind == "round" and phase == "final":
                    found.append(float(stamp) - needed)
                    frozen = False
        self._seen.close()
        return found
