"""Looks at a node: `python node_probe.py '{"disk of TMPDIR": {…}, …}'`: checks and their arguments.

A check that ends prints a line of JSON: its name, what was found, and what to do ("" where nothing
is wrong). This is a process of its own, since a disk, a driver or torch may hang.
"""

import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

MIB = 1 << 20
Found: TypeAlias = tuple[str, str]  # what was found, and what to do

_ROOM, _WRITTEN = 64 * MIB, 4 * MIB  # bytes that are to be free on a disk, and that are written
_SLOWEST = 0.5  # MB/s of a disk
_APART = 2.0  # seconds between this clock and etcd's
_ANSWER = 2.0  # seconds for etcd to tell its time
_NVIDIA, _AMD = "nvidia[0-9]*", "kfd"  # in /dev
_SIDE = 4096  # of a product of matrices on a device


def disk(folder: str) -> Found:
    """See whether a folder has room, and how fast it takes what is to stay there."""
    try:
        free = shutil.disk_usage(folder).free
        if free < _ROOM:
            need = f"{_ROOM // MIB} are asked for"
            return (
                f"{folder} has {free // MIB} MiB free, {need}",
                "free some, or give another folder",
            )
        data = os.urandom(_WRITTEN)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            began = time.perf_counter()
            file.write(data)
            os.fsync(file.fileno())
            speed = _WRITTEN / (time.perf_counter() - began) / 1e6
    except OSError as error:
        how = f"{folder} can't be written to: {error.strerror}"
        return how, "mend it, or give another folder"
    found = f"{folder} takes {speed:.2f} MB/s of what is written and synced"
    if speed < _SLOWEST:
        need = f"{found}, {_SLOWEST:g} are asked for"
        return need, "look at the disk, or give another folder"
    return f"{found}, and has {free // MIB} MiB free", ""


def clock(
    endpoint: str, *, tls: bool, cacert: str | None, cert: str | None, key: str | None
) -> Found:
    """See whether this clock goes with etcd's, whose answers over HTTP have the time in seconds.

    Nothing is said where that can't be had. Behind a Unix socket it is this very clock.
    """
    from email.utils import parsedate_to_datetime  # noqa: PLC0415 - in its thread
    from http.client import HTTPConnection, HTTPException, HTTPSConnection  # noqa: PLC0415

    host = endpoint.rpartition(":")[0].strip("[]")
    try:
        port = int(endpoint.rpartition(":")[2])
        asked = HTTPConnection(host, port, timeout=_ANSWER)
        if tls:
            import ssl  # noqa: PLC0415 - likewise

            trusted = ssl.create_default_context(cafile=cacert)
            if cert:
                trusted.load_cert_chain(cert, key)
            asked = HTTPSConnection(host, port, timeout=_ANSWER, context=trusted)
        asked.connect()
        before = time.time()
        asked.request("GET", "/version", headers={"Connection": "close"})
        with asked.getresponse() as answer:
            second = parsedate_to_datetime(answer.headers["Date"]).timestamp()
        after = time.time()
    except (OSError, ValueError, TypeError, HTTPException):
        return "etcd does not tell its time", ""
    ahead, behind = before - (second + 1), second - after  # at least
    if max(ahead, behind) <= _APART:
        return f"within {_APART:g} s of that of etcd at {endpoint}", ""
    off = f"{ahead:.0f} s ahead of" if ahead > 0 else f"{behind:.0f} s behind"
    found = f"{off} that of etcd at {endpoint}, {_APART:g} s are allowed"
    return found, "set the one that is wrong (chronyc makestep)"


def devices() -> Found:
    """See whether each GPU that torch finds computes right."""
    try:
        import torch  # noqa: PLC0415 - only where there are GPUs
    except ImportError:  # workers that need it say so
        return "torch is not here to look at them", ""
    count = torch.cuda.device_count()
    own = torch.backends.cuda.is_built() and (_AMD if torch.version.hip else _NVIDIA)
    if not count and own and any(Path("/dev").glob(own)):
        return "torch finds none of this machine's GPUs", "look at nvidia-smi, or hide them"
    busy = 0
    for number in range(count):
        try:
            compute(torch, f"cuda:{number}", _SIDE)
        except torch.cuda.OutOfMemoryError:  # a worker has all of its memory
            busy += 1
        except (RuntimeError, ArithmeticError) as error:
            line = str(error).strip().splitlines()[0]
            name = f"cuda:{number} {torch.cuda.get_device_name(number)}"
            return f"{name} does not work: {line}", "reset it, or drain this machine"
    return f"{count} found, {count - busy} compute right" + (f", {busy} full" if busy else ""), ""


def compute(torch: Any, device: str, side: int) -> None:
    """Multiply two matrices.

    Raises RuntimeError where the device fails, ArithmeticError where its product is wrong.
    """
    ones = torch.ones(side, side, dtype=torch.bfloat16, device=device)
    if wrong := int((ones @ ones != side).sum()):
        raise ArithmeticError(f"{wrong} of {side * side} numbers of a product are wrong")


CHECKS: dict[str, Callable[..., Found]] = {"disk": disk, "clock": clock, "devices": devices}


def main(argv: list[str]) -> int:
    """Do all checks, beside each other. A name's first word is the check's."""
    asked: dict[str, dict[str, Any]] = json.loads(argv[1])
    threads = [
        threading.Thread(target=tell, args=(name, CHECKS[name.split()[0]]), kwargs=given)
        for name, given in asked.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:  # torch can't be imported any more once this thread has ended
        thread.join()
    return 0


def tell(name: str, check: Callable[..., Found], **given: Any) -> None:
    """Do a check, and print its line."""
    sys.stdout.write(json.dumps([name, *check(**given)]) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv))
