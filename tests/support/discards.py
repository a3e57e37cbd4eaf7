"""Children that are given up: a test must see them reaped before its event loop is closed."""

import asyncio
import subprocess

import pytest

from elastic_etcd.system.child_process import discard


def next_discarded(
    patch: pytest.MonkeyPatch, module: str = "elastic_etcd.system.child_process"
) -> asyncio.Future[subprocess.Popen[bytes]]:
    """The next child that this module discards, for `exited`."""
    found: asyncio.Future[subprocess.Popen[bytes]] = asyncio.get_running_loop().create_future()

    def discarded(process: subprocess.Popen[bytes]) -> None:
        discard(process)
        found.set_result(process)

    patch.setattr(f"{module}.discard", discarded)
    return found
