"""A disk that is soon full."""

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
