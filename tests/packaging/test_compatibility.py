"""Both ends of the versions of protobuf and grpcio in setup.cfg, beside other etcd clients."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.etcd import EtcdServer
from tests.support.venv import ROOT, venv

pytestmark = [
    pytest.mark.timeout(600),  # the first time, pip has to download
    pytest.mark.nightly(part="packaging"),
]

SMOKE = Path(__file__).with_name("smoke.py")
# Of grpcio, protobuf and msgspec, as setup.cfg says; 1.75.1 is the first with a wheel for 3.14.
OLDEST = {
    (3, 11): ("1.62.3", "4.21.12", "0.19.0"),
    (3, 13): ("1.67.1", "4.21.12", "0.19.0"),
    (3, 14): ("1.75.1", "5.27.0", "0.20.0"),
}
# Before 5.27 protobuf uses what Python 3.12 deprecates, and crashes when told so by an exception.
STRICT = "-W", "error"
LENIENT = (*STRICT, "-W", "ignore::DeprecationWarning") if sys.version_info >= (3, 12) else STRICT


def smoke(
    python: Path, etcd: EtcdServer, prefix: str, *other: str, warnings: tuple[str, ...] = STRICT
) -> list[str]:
    """Versions of grpcio and protobuf, and protobuf's implementation, if all went well."""
    done = subprocess.run(
        [python, *warnings, SMOKE, etcd.endpoint, prefix, *other],
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.split()


def test_the_oldest_versions(etcd: EtcdServer, prefix: str) -> None:
    grpcio, protobuf, msgspec = OLDEST[max(each for each in OLDEST if each <= sys.version_info)]
    needs = (f"grpcio=={grpcio}", f"protobuf=={protobuf}", f"msgspec=={msgspec}")
    python = venv("oldest", *needs, "tenacity==8.2.3")
    assert smoke(python, etcd, prefix, warnings=LENIENT) == [grpcio, protobuf, "upb"]


def test_the_newest_versions(etcd: EtcdServer, prefix: str) -> None:
    python = venv("newest", "grpcio", "protobuf>=7,<8", "tenacity", "msgspec")
    grpcio, protobuf, implementation = smoke(python, etcd, prefix)
    assert tuple(map(int, grpcio.split(".")[:2])) >= (1, 80)
    assert protobuf.startswith("7.")
    assert implementation == "upb"


def test_beside_another_etcd_client(etcd: EtcdServer, prefix: str) -> None:
    """Two packages that register etcd's own names crash the process; ours are our own."""
    python = venv("beside", "etcd-sdk-python==0.0.7", "protobuf>=6,<8", "tenacity", "msgspec")
    assert smoke(python, etcd, prefix, "pyetcd")
