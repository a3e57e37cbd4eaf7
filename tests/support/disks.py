"""Disks that are soon full, and disks that stand still."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(path: Path, *options: str) -> Iterator[None]:
    """256 KiB at this folder, for as long as it is entered; without root the test is skipped."""
    chosen = ",".join(("size=256k", *options))
    mount = ["mount", "-t", "tmpfs", "-o", chosen, "tmpfs", str(path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("can't mount a tmpfs here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextmanager
def disk_that_may_stand_still(path: Path, image: Path) -> Iterator[None]:
    """An ext4 at this folder, kept in `image`; without root the test is skipped."""
    with loop_disk(path, image) as made:
        if not made:
            pytest.skip("can't mount a loop device here")
        yield


@contextmanager
def loop_disk(path: Path, image: Path) -> Iterator[bool]:
    """The same, and whether it could be made; else the folder stays as it is."""
    with image.open("wb") as file:
        file.truncate(2 << 30)  # with holes: it takes what is written
    lazily = ["-E", "lazy_itable_init=1,lazy_journal_init=1"]
    subprocess.run(["mkfs.ext4", "-q", *lazily, str(image)], check=True)
    mount = ["mount", "-o", "loop", str(image), str(path)]
    made = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    try:
        yield made
    finally:
        if made:
            subprocess.run(["umount", "--lazy", str(path)], check=True)
        image.unlink()


@contextmanager
def standing_still(path: Path) -> Iterator[None]:
    """Whoever writes to the disk at `path` waits in the kernel, until this is left."""
    stand_still(path)
    try:
        yield
    finally:
        turn_again(path)


def stand_still(path: Path) -> None:
    subprocess.run(["fsfreeze", "--freeze", str(path)], check=True)


def turn_again(path: Path) -> None:
    subprocess.run(["fsfreeze", "--unfreeze", str(path)], check=True)


@contextmanager
def not_executable_yet(program: Path) -> Iterator[None]:
    """Whoever executes `program` waits in the kernel, until this is left (fanotify).

    As a network file system makes him wait that stands still; without root the test is skipped.
    So it is before Python 3.11.4, which stands still with the thread that executes.
    """
    if sys.version_info < (3, 11, 4):
        pytest.skip("this Python waits with all its threads (python/cpython#104372)")
    libc, add, open_exec, here = ctypes.CDLL(None), 1, 0x40000, -100
    asking = libc.fanotify_init(0x4 | 0x1, os.O_RDONLY)  # for permission; closed by exec
    if asking < 0:
        pytest.skip("can't make the kernel ask for permission here")
    try:
        wanted = ctypes.c_uint64(open_exec)
        if libc.fanotify_mark(asking, add, wanted, here, os.fsencode(program)):
            pytest.skip("this kernel asks for no permission")
        yield
    finally:
        os.close(asking)  # what has been asked is granted


@contextmanager
def interpreter_not_found_yet(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """As `not_executable_yet`, of what this Python is started by from now on."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    patch.setattr(sys, "executable", str(python))
    with not_executable_yet(python):
        yield


@contextmanager
def memory_limit(size: int) -> Iterator[Path]:
    """A cgroup that may use so many bytes; the processes in `cgroup.procs` below it are in it."""
    for root, limit, swap, most in (
        (Path("/sys/fs/cgroup"), "memory.max", "memory.swap.max", 0),
        (
            *(Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
            *("memory.memsw.limit_in_bytes", size),
        ),
    ):
        group = root / f"elastic_etcd-test-{os.getpid()}"
        try:
            group.mkdir()
            os.truncate(group / limit, 0)  # else it would be made where this is no cgroup
            (group / limit).write_text(str(size))
            if (group / swap).exists():  # the kernel may count none
                (group / swap).write_text(str(most))
        except OSError:  # no such version, no root, or this controller is not handed down
            with suppress(OSError):
                group.rmdir()
            continue
        try:
            yield group
        finally:
            group.rmdir()
        return
    pytest.skip("can't make a cgroup with a memory limit here")


@contextmanager
def slow_disk(path: Path, image: Path, speed: int) -> Iterator[None]:
    """As `disk_that_may_stand_still`, and it takes so many bytes a second."""
    with disk_that_may_stand_still(path, image):
        number = path.stat().st_dev
        device = f"{os.major(number)}:{os.minor(number)}"
        limit = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_bps_device")
        if not limit.exists():
            pytest.skip("can't make a disk slow here: no blkio controller of version 1")
        limit.write_text(f"{device} {speed}")
        try:
            yield
        finally:
            limit.write_text(f"{device} 0")


@contextmanager
def slow_processor(share: float) -> Iterator[Path]:
    """A cgroup that may use so much of a processor; processes in `cgroup.procs` below are in it."""
    root = Path("/sys/fs/cgroup")
    old = (root / "cpu").is_dir()
    group = root / ("cpu" if old else "") / f"elastic_etcd-test-{os.getpid()}"
    period = 20_000
    quota = str(int(share * period))
    try:
        group.mkdir()
        if old:
            (group / "cpu.cfs_period_us").write_text(str(period))
            (group / "cpu.cfs_quota_us").write_text(quota)
        else:
            (group / "cpu.max").write_text(f"{quota} {period}")
    except OSError:
        with suppress(OSError):
            group.rmdir()
        pytest.skip("can't make a cgroup with a quota of processors here")
    try:
        yield group
    finally:
        group.rmdir()
