"""What the peers need and this program does not: a venv each, and an etcd with the v2 API.

A venv lies within the one that runs the benchmark and sees its packages, so that all launchers
run the same torch; only what a peer adds (python-etcd, nvidia-resiliency-ext) is its own.
"""

import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic_etcd.etcd.embedded import find_program, free_ports, notification_socket

START_TIMEOUT = 15.0


class Unavailable(Exception):
    """A peer can't be measured here; why."""


def venv(name: str, requirement: str) -> Path:
    """The Python of a venv that has `requirement`. Raises Unavailable."""
    folder = Path(sys.prefix) / "peers" / name
    python, done = folder / "bin" / "python", folder / f"has-{requirement}"
    if not done.exists():
        _do(sys.executable, "-m", "venv", "--clear", str(folder))
        shared = sysconfig.get_path("purelib")
        site = sysconfig.get_path("purelib", vars={"base": str(folder)})
        (Path(site) / "shared.pth").write_text(shared + "\n")
        _do(str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", requirement)
        done.touch()
    return python


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise Unavailable(f"`{' '.join(command[1:])}`: {' '.join(last)}")


@contextmanager
def etcd_v2() -> Iterator[str]:
    """The endpoint of an etcd with --enable-v2, which 3.5 is the last to have.

    Raises Unavailable.
    """
    client, peer = (f"127.0.0.1:{port}" for port in free_ports(2))
    with tempfile.TemporaryDirectory() as folder, notification_socket() as notify:
        notify.setblocking(True)
        notify.settimeout(START_TIMEOUT)
        with (Path(folder) / "log").open("w+") as log:
            server = subprocess.Popen(
                [
                    *(find_program(), "--enable-v2", "--name=v2", f"--data-dir={folder}/data"),
                    *(f"--listen-client-urls=http://{client}", "--unsafe-no-fsync"),
                    *(f"--advertise-client-urls=http://{client}", "--log-level=warn"),
                    *(f"--listen-peer-urls=http://{peer}", f"--initial-cluster=v2=http://{peer}"),
                    f"--initial-advertise-peer-urls=http://{peer}",
                ],
                env={"NOTIFY_SOCKET": "@" + notify.getsockname()[1:].decode()},
                stdout=log,
                stderr=log,
            )
            try:
                notify.recv(4096)  # READY=1
                yield client
            except TimeoutError:
                log.seek(0)
                text = log.read().strip().splitlines()[-1:]
                raise Unavailable(f"etcd --enable-v2: {' '.join(text)}") from None
            finally:
                server.kill()
                server.wait()
