"""A password or a private key is nowhere but where it was given, whatever goes wrong."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from elastic_etcd.errors import UsageError
from elastic_etcd.etcd.access import EtcdConfig
from elastic_etcd.launch import parse
from tests.support.etcd import FAST, EtcdServer, tool
from tests.support.job import Job
from tests.support.processes import command, marked
from tests.support.tls import Authority, Files

SECRET, WRONG, ROOT = "Zq7-secret-of-the-trainer", "Zq7-a-wrong-one", "Zq7-secret-of-root"

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("form", ["http://u:{}@h:1", "https://{}@h", "u:{}@h:1", "a:1,x://u:{}@h"])
def test_an_endpoint_with_a_password_is_refused_without_showing_it(form: str) -> None:
    text = form.format(SECRET)
    for flag, env in ((text, {}), (None, {"ETCDCTL_ENDPOINTS": text})):
        with pytest.raises(UsageError, match=r"\*\*\*@h") as error:
            EtcdConfig.parse(flag, env=env)
        assert SECRET not in str(error.value)
        assert error.value.__cause__ is error.value.__context__ is None


@pytest.mark.parametrize(
    ("argv", "env"),
    [
        (["--password", SECRET], {}),
        ([f"--password={SECRET}"], {}),
        ([], {"PET_PASSWORD": SECRET}),
        (["--user", f"u:{SECRET}"], {}),
        ([], {"PET_USER": f"u:{SECRET}"}),
        ([], {"PET_ETCD": f"u:{SECRET}@h"}),
    ],
)
def test_a_password_on_the_command_line_is_refused_without_showing_it(
    argv: list[str], env: dict[str, str]
) -> None:
    etcd = [] if "PET_ETCD" in env else ["--etcd=h:1"]
    with pytest.raises(UsageError, match="password") as error:
        parse([*etcd, *argv, os.devnull], env)
    assert SECRET not in str(error.value)


def test_a_password_file_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_bytes(SECRET.encode() + b"\xff\n")
    with pytest.raises(UsageError, match="not UTF-8") as error:
        EtcdConfig.parse("h", user="u", password_file=str(file), env={})
    assert SECRET not in str(error.value)


# --- a job


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ca")


@pytest.fixture
def client(authority: Authority) -> Files:
    return authority.issue("someone")


@pytest.fixture
def etcd(tmp_path: Path, authority: Authority) -> Iterator[EtcdServer]:
    """With TLS and users; `ctl` is root."""
    files = authority.issue("etcd")
    tls = (f"--cert-file={files.cert}", f"--key-file={files.key}")
    server = EtcdServer(tmp_path, arguments=(*FAST, *tls, "--bcrypt-cost=4"), scheme="https")
    server.start()
    for line in (
        f"user add root:{ROOT}",
        "user grant-role root root",
        f"user add trainer:{SECRET}",
        "role add training",
        "role grant-permission training --prefix=true readwrite /elastic_etcd/",
        "user grant-role trainer training",
        "auth enable",
    ):
        server.ctl(f"--cacert={authority.cacert}", *line.split())
    yield server
    server.kill()


@pytest.fixture
def job(etcd: EtcdServer, tmp_path: Path) -> Iterator[Job]:
    job = Job(f"https://{etcd.endpoint}", tmp_path / "job")
    yield job
    job.close()


def test_nothing_shows_a_secret(
    job: Job, etcd: EtcdServer, authority: Authority, client: Files, tmp_path: Path
) -> None:
    """Debug logs, a wrong password, failing workers, a killed agent, an etcd that goes away."""
    file = tmp_path / "password"
    file.write_text(SECRET + "\n")
    flags: dict[str, Any] = {
        "user": "trainer",
        "cacert": authority.cacert,
        "cert": client.cert,
        "key": client.key,
    }
    more: dict[str, Any] = {
        "log_level": "debug",
        "log_dir": job.directory / "logs",
        "tee": 3,
        "min_uptime": 0,
    }
    variable = {"ELASTIC_ETCD_PASSWORD": SECRET, "ETCDCTL_PASSWORD": SECRET}
    inline = {"ETCDCTL_USER": f"trainer:{SECRET}"}
    fault = ("--fault", "raise@rank=0,generation=1,step=2")
    n1 = job.start("n1", *fault, env=variable | inline, **flags, **more)
    n2 = job.start("n2", *fault, password_file=file, **flags, **more)
    generation = job.trains(2, after=1)
    wrong = job.start("n3", env={"ELASTIC_ETCD_PASSWORD": WRONG}, **flags, **more)
    job.exits(wrong, 5)
    assert "password" in wrong.output
    seen = processes(job)
    assert any("guardian_process.py" in line for line in seen)
    etcd.kill()
    job.goes_on(generation)
    job.said(n1, "etcd does not answer")
    etcd.start()
    os.kill(job.worker(generation, rank=1).pid, signal.SIGKILL)
    generation = job.trains(2, after=generation)
    n2.kill()
    generation = job.trains(1, after=generation)
    job.said(n2, "revoked")
    seen += processes(job)
    seen += status(etcd, job, flags, file)
    job.finish(n1)
    seen += history(etcd, authority)
    seen += [f"{path}: {path.read_text(errors='replace')}" for path in files_of(job)]
    assert any("Traceback" in text for text in seen), "the logs are among it"
    key = Path(client.key).read_text().splitlines()[1]
    for secret in (SECRET, WRONG, ROOT, key):
        shown = [text[:200] for text in seen if secret in text]
        assert not shown, secret


def processes(job: Job) -> list[str]:
    """Command lines of all, and the environment of all but the agents, which are given it."""
    agents = [agent.pid for agent in job.agents]
    seen = []
    for pid in marked(job.mark):
        seen.append(f"{pid}: {command(pid)}")
        if pid not in agents:
            with suppress(OSError):  # it has ended
                seen.append(Path(f"/proc/{pid}/environ").read_text(errors="replace"))
    return seen


def status(etcd: EtcdServer, job: Job, flags: dict[str, str], file: Path) -> list[str]:
    argv = [sys.executable, "-m", "elastic_etcd", "status", job.name]
    argv += [f"--{name}={value}" for name, value in flags.items()]
    argv += [f"--etcd=https://{etcd.endpoint}", f"--password-file={file}", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert '"phase": "final"' in done.stdout
    return [done.stdout, done.stderr]


def history(etcd: EtcdServer, authority: Authority) -> list[str]:
    """Every value that any key ever had."""
    root = {"ETCDCTL_USER": f"root:{ROOT}"}
    tls = f"--cacert={authority.cacert}"
    etcd.ctl(tls, "put", "/the-end", "now", env=root)
    watch = [tool("etcdctl"), f"--endpoints=https://{etcd.endpoint}", tls]
    watch += ["watch", "--prefix", "/", "--rev=1"]
    seen = []
    with subprocess.Popen(watch, env=os.environ | root, stdout=subprocess.PIPE, text=True) as told:
        assert told.stdout
        for line in told.stdout:
            seen.append(line)
            if line == "/the-end\n":
                break
        told.kill()
    assert any("/history/" in line for line in seen)
    return seen


def files_of(job: Job) -> list[Path]:
    return [path for path in job.directory.rglob("*") if path.is_file() and path.suffix != ".pt"]
