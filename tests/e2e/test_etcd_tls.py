"""Certificates that are no good are refused in words, and good ones may be renewed under a job."""

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support.etcd import FAST, EtcdServer
from tests.support.job import ROOT
from tests.support.ticking import ticking
from tests.support.tls import Authority, Files, asking, shows

pytestmark = pytest.mark.timeout(600)

LONG = 10  # a TTL that outlives the restarts of a server


@dataclass
class Servers:
    """Those whose own certificates are no good, and one that asks for the client's."""

    authority: Authority
    stranger: Authority
    folder: Path
    asking: EtcdServer
    expired: EtcdServer
    early: EtcdServer
    misnamed: EtcdServer


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("tls")
    authority, stranger = Authority(folder, "authority"), Authority(folder, "stranger")
    asks = asking(authority)

    def server(name: str, files: Files, *arguments: str) -> EtcdServer:
        return EtcdServer(folder, name, (*FAST, *shows(files), *arguments), "https")

    it = Servers(
        authority,
        stranger,
        folder,
        server("asking", authority.issue("server"), *asks),
        server("expired", authority.issue("expired", days=(-2, -1))),
        server("early", authority.issue("early", days=(1, 2))),
        server("misnamed", authority.issue("misnamed", "10.1.2.3")),
    )
    all_of_them = it.asking, it.expired, it.early, it.misnamed
    for each in all_of_them:
        each.start()
    yield it
    for each in all_of_them:
        each.kill()


def launch(server: EtcdServer, cacert: str, client: Files | None = None) -> list[str]:
    argv = [sys.executable, "-m", "elastic_etcd.launch", "--nnodes=1", "--job=a", "--no-python"]
    argv += [f"--etcd=https://{server.endpoint}", f"--cacert={cacert}"]
    argv += [f"--cert={client.cert}", f"--key={client.key}"] if client else []
    return [*argv, "true"]


def test_certificates_that_are_no_good_are_refused_in_words(servers: Servers) -> None:
    authority, stranger = servers.authority, servers.stranger
    ca = authority.cacert
    check = "check --cert and --key"
    cases = {
        "another authority's server": (launch(servers.misnamed, stranger.cacert), "--cacert"),
        "a server for another name": (launch(servers.misnamed, ca), "another host"),
        "an expired server": (launch(servers.expired, ca), "has expired"),
        "a server of tomorrow": (launch(servers.early, ca), "not yet valid"),
        "no client certificate": (launch(servers.asking, ca), check),
        "a stranger": (launch(servers.asking, ca, stranger.issue("client")), check),
        "a key of another": (
            launch(servers.asking, ca, replace(authority.issue("a"), key=authority.issue("b").key)),
            "must belong together",
        ),
        "an expired client": (
            launch(servers.asking, ca, authority.issue("late", days=(-2, -1))),
            check,
        ),
    }
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    began = time.monotonic()
    running = {
        name: subprocess.Popen(
            argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for name, (argv, _) in cases.items()
    }
    for name, process in running.items():
        told, _ = process.communicate(timeout=120)
        assert process.returncode == 5, (name, told)
        assert cases[name][1] in told, (name, told)
        assert "Traceback" not in told, (name, told)
        others = ("a dead agent left", ": elastic_etcd ")  # a test's, and the first line
        said = [line for line in told.splitlines() if not any(other in line for other in others)]
        assert "error: no trust between this client and etcd at " in said[0], (name, told)
        assert len(said) == 2, (name, told)
    assert time.monotonic() - began < 30


def test_certificates_expire_and_are_renewed_under_a_job(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A connection that stands goes on; the next one reads the files again."""
    old, new = (Authority(make(tmp_path / name), "ca") for name in ("old", "new"))
    late = old.issue("late", days=(-2, -1))
    ours = {"cacert": "ca.pem", "cert": "client.crt", "key": "client.key"}

    def hand_out(authority: Authority) -> None:
        authority.issue("client")
        for file in ours.values():
            shutil.copy(Path(authority.cacert).with_name(file), tmp_path / file)

    hand_out(old)
    asks = asking(old)
    server = EtcdServer(tmp_path, "m", (*FAST, *shows(old.issue("server")), *asks), "https")
    server.start()
    try:
        with ticking(f"https://{server.endpoint}", None, tmp_path / "job", request) as job:
            flags = {name: tmp_path / file for name, file in ours.items()}
            n1, n2 = (job.start(node, lease_ttl=LONG, **flags) for node in ("n1", "n2"))
            g = job.trains(2)
            server.kill()
            server.arguments = (*FAST, *shows(late), *asks)
            server.start()
            job.undisturbed(g, 1)
            for agent in (n1, n2):
                job.said(agent, "training goes on")
            server.kill()
            hand_out(new)
            server.arguments = (*FAST, *shows(new.issue("server")), *asking(new))
            server.start()
            for agent in (n1, n2):
                job.said(agent, "etcd answers again")
            job.kill_worker(g)
            assert job.trains(2, after=g) == g + 1
            job.finish(n1, n2)
    finally:
        server.kill()


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder
