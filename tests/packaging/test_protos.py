"""The messages that are checked in are those of protos/."""

import subprocess
import sys

import pytest

from elastic_etcd.etcd.pb import elastic_etcd_rpc_pb2 as pb
from tests.support.venv import ROOT


@pytest.mark.timeout(600)
def test_the_checked_in_messages_are_current() -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "protos"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_names_of_our_own() -> None:
    assert pb.DESCRIPTOR.name == "elastic_etcd_rpc.proto"
    assert pb.DESCRIPTOR.package == "elastic_etcd.rpc"


def test_every_field_names_its_original() -> None:
    for line in (ROOT / "protos" / "elastic_etcd_rpc.proto").read_text().splitlines():
        declaration, _, comment = line.partition("//")
        if " = " in declaration and not declaration.startswith("syntax"):
            number = declaration.rpartition("=")[2].strip(" ;")
            assert number.isdigit()
            assert comment.strip(), line
