"""Disks that are soon full, and disks that stand still."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
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
    with image.open("wb") as file:
        file.truncate(2 << 30)  # with holes: it takes what is written
    lazily = ["-E", "lazy_itable_init=1,lazy_journal_init=1"]
    subprocess.run(["mkfs.ext4", "-q", *lazily, str(image)], check=True)
    mount = ["mount", "-o", "loop", str(image), str(path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("can't mount a loop device here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
        image.unlink()


@contextmanager
def standing_still(path: Path) -> Iterator[None]:
    """Whoever writes to the disk at `path` waits in the kernel, until this is left."""
    subprocess.run(["fsfreeze", "--freeze", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(path)], check=True)
