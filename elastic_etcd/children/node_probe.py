"""Measures a node: `python node_probe.py '{"processor": {…}, …}'`: checks and their arguments.

A check that ends prints a line of JSON: its name, what keeps the node out ("" for nothing), and
speeds by what they are of. This is a process of its own, since a disk, a driver or torch may hang.
"""

import hashlib
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
Found: TypeAlias = tuple[str, dict[str, float]]  # what keeps it out, and speeds

_HASHED = 64 * MIB  # bytes, in a tenth of a second
_ROOM, _WRITTEN = 64 * MIB, 4 * MIB  # bytes that are to be free on a disk, and that are written
_SLOWEST = 0.5  # MB/s of a disk
_APART = 2.0  # seconds between this clock and etcd's
_ANSWER = 2.0  # seconds for etcd to tell its time
_NVIDIA, _AMD = "nvidia[0-9]*", "kfd"  # in /dev
_SIDE, _COPIED = 4096, 256 * MIB  # of a product of matrices, and of a copy, on a device


def processor(statistics: list[str]) -> Found:
    """How fast a processor computes: beside other processes, too, but within its cgroups' quotas.

    `statistics` are the files that say for how long those have stopped this process.
    """
    block = bytes(1 << 16)
    began, stopped = time.thread_time(), max(map(_throttled, statistics), default=0.0)
    for _ in range(_HASHED >> 16):
        hashlib.blake2b(block)
    took = time.thread_time() - began + max(map(_throttled, statistics), default=0.0) - stopped
    return "", {"processor (MB/s of blake2b)": _HASHED / took / 1e6}


def _throttled(statistics: str) -> float:
    """Seconds, as cgroups of version 2 and of version 1 have them."""
    units = {"throttled_usec": 1e-6, "throttled_time": 1e-9}
    try:
        lines = [line.split() for line in Path(statistics).read_text().splitlines()]
    except OSError:
        return 0.0
    return sum(int(number) * units.get(name, 0.0) for name, number in lines)


def disk(flag: str, folder: str) -> Found:
    """Whether a folder has room, and how fast it takes what is to stay there."""
    where = f"{flag} {folder}"
    try:
        free = shutil.disk_usage(folder).free
        if free < _ROOM:
            need = f"{_ROOM // MIB} are asked for: free some, or give another folder"
            return f"{where} has {free // MIB} MiB free, {need}", {}
        data = os.urandom(_WRITTEN)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            began = time.perf_counter()
            file.write(data)
            os.fsync(file.fileno())
            speed = _WRITTEN / (time.perf_counter() - began) / 1e6
    except OSError as error:
        return f"{where} can't be written to: {error.strerror}: mend it, or give another folder", {}
    if speed < _SLOWEST:
        need = f"{_SLOWEST:g} are asked for: look at the disk, or give another folder"
        return f"{where} takes {speed:.2f} MB/s of what is written and synced, {need}", {}
    return "", {f"disk of {flag} (MB/s written and synced)": speed}


def clock(
    endpoint: str, *, tls: bool, cacert: str | None, cert: str | None, key: str | None
) -> Found:
    """Whether this clock goes with etcd's, whose answers over HTTP have the time in seconds.

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
        return "", {}
    ahead, behind = before - (second + 1), second - after  # at least
    if max(ahead, behind) <= _APART:
        return "", {}
    off = f"{ahead:.0f} s ahead of" if ahead > 0 else f"{behind:.0f} s behind"
    need = f"{_APART:g} s are allowed: set the one that is wrong (chronyc makestep)"
    return f"its clock is {off} that of etcd at {endpoint}, {need}", {}


def devices() -> Found:
    """Whether each GPU that torch finds computes right, and how fast."""
    try:
        import torch  # noqa: PLC0415 - only where there are GPUs
    except ImportError:  # workers that need it say so
        return "", {}
    speeds: dict[str, float] = {}
    own = torch.backends.cuda.is_built() and (_AMD if torch.version.hip else _NVIDIA)
    if not torch.cuda.device_count() and own and any(Path("/dev").glob(own)):
        return "torch finds none of this machine's GPUs: look at nvidia-smi, or hide them", speeds
    for number in range(torch.cuda.device_count()):
        name = f"cuda:{number} {torch.cuda.get_device_name(number)}"
        try:
            product, copy = device_speeds(torch, f"cuda:{number}", _SIDE, _COPIED)
        except (RuntimeError, ArithmeticError) as error:
            line = str(error).strip().splitlines()[0]
            return f"{name} does not work: {line}: reset it, or drain this machine", speeds
        speeds[f"{name} product (GFLOP/s)"] = product
        speeds[f"{name} copy (MB/s)"] = copy
    return "", speeds


def device_speeds(torch: Any, device: str, side: int, size: int) -> tuple[float, float]:
    """GFLOP/s of a product of matrices, and MB/s of a copy of so many bytes.

    Raises RuntimeError where the device fails, ArithmeticError where its product is wrong.
    """
    ones = torch.ones(side, side, dtype=torch.bfloat16, device=device)
    data = torch.zeros(size, dtype=torch.uint8, device=device)
    times: list[tuple[float, float]] = []
    for _ in range(3):  # the first loads what it needs
        began = time.perf_counter()
        wrong = int((ones @ ones != side).sum())
        middle = time.perf_counter()
        int(data.clone()[-1])
        times.append((middle - began, time.perf_counter() - middle))
        if wrong:
            raise ArithmeticError(f"{wrong} of {side * side} numbers of a product are wrong")
    product, copy = (min(each) for each in zip(*times, strict=True))
    return 2 * side**3 / product / 1e9, size / copy / 1e6


CHECKS: dict[str, Callable[..., Found]] = {
    "--log-dir": disk,
    "--memory-dir": disk,
    "clock": clock,
    "devices": devices,
}


def main(argv: list[str]) -> int:
    """Do all checks, beside each other but for the processor's."""
    asked: dict[str, dict[str, Any]] = json.loads(argv[1])
    tell("processor", processor, **asked.pop("processor"))
    threads = [
        threading.Thread(target=tell, args=(name, CHECKS[name]), kwargs=given)
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
