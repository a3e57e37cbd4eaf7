"""docs/security.md as a test: its commands run as they stand, and give what it says, no more."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.etcd import FAST, EtcdServer, tool

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "security.md").read_text()
USERS = ("root", "trainer", "watcher", "operator", "stranger")
PASSWORDS = {name: f"hidden-word-of-{name}" for name in USERS}
# In generation 1 rank 1 fails; so reports, claims and history are written, too.
WORKER = """
env
if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then
    if [ $RANK = 1 ]; then exit 1; fi
    exec sleep 600
fi
"""

pytestmark = pytest.mark.timeout(300)


def commands(program: str) -> list[str]:
    """The document's blocks of commands, those that use the program."""
    blocks = re.findall(r"(?:^    \S.*\n)+", DOCUMENT, re.MULTILINE)
    found = [
        line.strip() for block in blocks if f"{program} " in block for line in block.split("\n")
    ]
    return [line for line in found if line]


def shell(folder: Path, lines: list[str], env: Mapping[str, str] = os.environ) -> None:
    """As a person would in that folder; the etcd that the tests use comes first on the PATH."""
    path = os.pathsep.join([str(Path(tool("etcdctl")).parent), env["PATH"]])
    done = subprocess.run(
        ["sh", "-e"],
        input="\n".join(lines),
        cwd=folder,
        env={**env, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """Users and roles as documented; `stranger` has another prefix, `narrow` one job only."""
    folder = tmp_path_factory.mktemp("roles")
    server = EtcdServer(folder, arguments=(*FAST, "--bcrypt-cost=4"))
    server.start()
    for name, password in PASSWORDS.items():
        (folder / f"{name}.password").write_text(f"{password}\n")
    for command in (
        f"user add stranger:{PASSWORDS['stranger']}",
        "role add strange",
        "role grant-permission strange --prefix=true readwrite /strange/",
        "user grant-role stranger strange",
        f"user add narrow:{PASSWORDS['trainer']}",
        "role add narrow",
        "role grant-permission narrow --prefix=true readwrite /elastic_etcd/resnet-7/",
        "user grant-role narrow narrow",
    ):
        server.ctl(*command.split())
    lines = commands("etcdctl")
    assert sum("role grant-permission" in line for line in lines) == 5
    shell(folder, lines, {**os.environ, "ETCDCTL_ENDPOINTS": server.endpoint})
    yield server
    server.kill()


def as_user(name: str) -> dict[str, str]:
    return {"ETCDCTL_USER": name, "ETCDCTL_PASSWORD": PASSWORDS[name]}


def denied(server: EtcdServer, user: Mapping[str, str], *command: str) -> bool:
    """Whether etcd refuses etcdctl's command."""
    try:
        server.ctl(*command, env=user)
    except subprocess.CalledProcessError as error:
        return "permission denied" in error.stderr
    return False


def launch(folder: Path, node: str, *flags: str, password: str = "") -> "subprocess.Popen[str]":
    script = folder / "worker.sh"
    script.write_text(WORKER)
    fixed = [f"--node-name={node}", "--nnodes=2", "--settle=0", "--min-uptime=0", "--no-python"]
    argv = [sys.executable, "-m", "elastic_etcd.launch", *fixed, "--log-level=debug"]
    given = {"ELASTIC_ETCD_PASSWORD": password} if password else {}
    return subprocess.Popen(
        [*argv, *flags, "sh", str(script)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **given},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def trains(folder: Path, *flags: str, password: str = "") -> str:
    """A job of two nodes fails once and succeeds; what was printed."""
    agents = [launch(folder, node, *flags, password=password) for node in ("n1", "n2")]
    told = [agent.communicate(timeout=120)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], told
    return "".join(told)


def status(server: EtcdServer, user: str, *flags: str) -> "subprocess.CompletedProcess[str]":
    return shown_to(server, user, "status", *flags)


def shown_to(server: EtcdServer, user: str, *argv: str) -> "subprocess.CompletedProcess[str]":
    """What `elastic-etcd` tells that user."""
    command = (sys.executable, "-m", "elastic_etcd", *argv)
    return subprocess.run(
        [*command, f"--etcd={server.endpoint}", f"--user={user}"],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "ELASTIC_ETCD_PASSWORD": PASSWORDS[user],
        },
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_documented_role_is_enough_and_the_password_is_nowhere(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    flags = f"--etcd={etcd.endpoint}", "--job=a", "--user=trainer"
    told = trains(tmp_path, *flags, password=PASSWORDS["trainer"])
    assert "RANK=1" in told, "the workers have printed their environment"
    assert PASSWORDS["trainer"] not in told
    everything = etcd.ctl("get", "--prefix", "", env=as_user("root"))
    assert "/elastic_etcd/a/history/2" in everything
    assert PASSWORDS["trainer"] not in everything
    keys = etcd.ctl("get", "--prefix", "", "--keys-only", env=as_user("root")).split()
    assert all(key.startswith("/elastic_etcd/") for key in keys)


def test_a_role_for_one_job(etcd: EtcdServer, tmp_path: Path) -> None:
    flags = f"--etcd={etcd.endpoint}", "--user=narrow"
    trains(tmp_path, *flags, "--job=resnet-7", password=PASSWORDS["trainer"])
    denied = launch(tmp_path, "n1", *flags, "--job=resnet-70", password=PASSWORDS["trainer"])
    told, _ = denied.communicate(timeout=120)
    assert denied.returncode == 5, told
    assert "denies user 'narrow' access to /elastic_etcd/resnet-70/" in told
    assert PASSWORDS["trainer"] not in told


def test_who_watches_sees_and_changes_nothing(etcd: EtcdServer, tmp_path: Path) -> None:
    key = "/elastic_etcd/b/outcome"
    etcd.ctl("put", key, '{"v": 1}', env=as_user("trainer"))
    shown = status(etcd, "watcher", "a")
    assert shown.returncode == 0, shown.stderr
    assert "succeeded" in shown.stdout
    assert denied(etcd, as_user("watcher"), "put", key, "x")
    assert denied(etcd, as_user("watcher"), "del", key)
    flags = f"--etcd={etcd.endpoint}", "--job=c", "--user=watcher"
    agent = launch(tmp_path, "n1", *flags, password=PASSWORDS["watcher"])
    told, _ = agent.communicate(timeout=120)
    assert agent.returncode == 5, told
    assert "denies user 'watcher'" in told


def test_who_steers_a_job_writes_two_keys_of_it(etcd: EtcdServer, tmp_path: Path) -> None:
    flags = f"--etcd={etcd.endpoint}", "--user=trainer", "--nnodes=1", "--rerun"
    agent = launch(tmp_path, "n1", *flags, "--job=resnet-7", password=PASSWORDS["trainer"])
    spare = launch(tmp_path, "n2", *flags, "--job=resnet-7", password=PASSWORDS["trainer"])
    root = "/elastic_etcd/resnet-7"
    deadline = time.monotonic() + 60
    members = ("get", "--prefix", "--keys-only", f"{root}/members/")
    while etcd.ctl(*members, env=as_user("watcher")).count("members/") < 2:
        assert time.monotonic() < deadline
    for command in (("drain", "resnet-7", "n1"), ("stop", "resnet-7")):
        for user in ("watcher", "stranger"):
            refused = shown_to(etcd, user, *command)
            assert refused.returncode == 5, refused
            assert f"denies user '{user}' access to {root}/" in refused.stderr
    for user, shown in (("operator", False), ("watcher", True)):
        seen = shown_to(etcd, user, "top", "resnet-7")
        assert seen.returncode == 0, seen
        assert ("steps are not shown" in seen.stdout) == shown, seen
    for steered in (("drain", "resnet-7", "n2", "--wait"), ("stop", "resnet-7", "--wait")):
        done = shown_to(etcd, "operator", *steered, "--timeout=60")
        assert done.returncode == 0, done
    for one in (agent, spare):
        told, _ = one.communicate(timeout=120)
        assert one.returncode == 143, told
    assert shown_to(etcd, "operator", "undrain", "resnet-7", "n2").returncode == 0
    for key in ("round", "members/1", "wanted2", "outcome"):
        assert denied(etcd, as_user("operator"), "put", f"{root}/{key}", "x"), key
    assert denied(etcd, as_user("operator"), "put", "/elastic_etcd/resnet-70/wanted", "x")


def test_a_stranger_reads_writes_and_revokes_nothing(etcd: EtcdServer) -> None:
    granted = etcd.ctl("lease", "grant", "60", env=as_user("trainer"))
    lease = granted.split()[1]
    key = f"/elastic_etcd/d/members/{lease}"
    etcd.ctl("put", f"--lease={lease}", key, "{}", env=as_user("trainer"))
    for command in (
        ("get", key),
        ("put", key, "x"),
        ("del", key),
        ("get", "--prefix", ""),
        ("lease", "revoke", lease),
        ("put", f"--lease={lease}", "/strange/key", "x"),
        ("role", "list"),
        ("user", "list"),
    ):
        assert denied(etcd, as_user("stranger"), *command), command
    assert etcd.ctl("get", "--keys-only", key, env=as_user("trainer")).split() == [key]
    assert status(etcd, "stranger", "d").returncode == 5
    etcd.ctl("lease", "revoke", lease, env=as_user("trainer"))


def test_certificates_instead_of_passwords(tmp_path: Path) -> None:
    """The documented recipe: the common name of a certificate is the user."""
    shell(tmp_path, commands("openssl"))
    (line,) = [line for line in commands("etcd") if line.startswith("etcd ")]
    shown = [flag for flag in line.split() if "listen" not in flag and "advertise" not in flag]
    flags = [re.sub(r"=(\w+\.\w+)$", rf"={tmp_path}/\1", flag) for flag in shown[1:]]
    server = EtcdServer(tmp_path, arguments=(*FAST, *flags), scheme="https")
    files = {"cacert": "ca.pem", "cert": "trainer.pem", "key": "trainer.key"}
    env = {f"ETCDCTL_{name.upper()}": str(tmp_path / file) for name, file in files.items()}
    server.start()
    try:
        lines = [
            re.sub(r"--interactive=false < \S+", "--no-password", command)
            for command in commands("etcdctl")
        ]
        endpoint = {"ETCDCTL_ENDPOINTS": f"https://{server.endpoint}"}
        shell(tmp_path, lines, {**os.environ, **env, **endpoint})
        certificates = [f"--{name}={file}" for name, file in files.items()]
        told = trains(tmp_path, f"--etcd=https://{server.endpoint}", "--job=a", *certificates)
        assert "succeeded" in told
        stranger = launch(
            tmp_path, "n1", f"--etcd=https://{server.endpoint}", "--job=a", *certificates[:1]
        )
        told, _ = stranger.communicate(timeout=120)
        assert stranger.returncode == 5, told
        assert "check --cert and --key" in told
        assert denied(server, env, "get", "/other")
    finally:
        server.kill()
