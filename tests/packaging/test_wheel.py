"""The files of a release: what is in them, and that they run where nothing else is installed."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email import message_from_string
from email.message import Message
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from elastic_etcd import __version__
from elastic_etcd.__main__ import _MODULES, _STEERING
from tests.support.etcd import EtcdServer
from tests.support.jobs import KEYS, RUNNING
from tests.support.venv import ROOT, venv_or_skip

pytestmark = [
    pytest.mark.timeout(600),  # the first time, pip has to download
    pytest.mark.nightly(part="packaging"),
]

SMOKE = Path(__file__).with_name("smoke.py")
EXTRAS = "embedded,metrics,web,notebook"
TRAIN = """\
import os
import torch.distributed as dist
dist.init_process_group("gloo")
print("a world of", dist.get_world_size(), "in generation", os.environ["ELASTIC_ETCD_GENERATION"])
dist.destroy_process_group()
"""
VALID = """\
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
print(JsonStrictValidator(SchemaVersion.V1_6).validate_str(open(sys.argv[1]).read()))
"""
LOADED = (
    "elastic_etcd.agent.followers.metrics, elastic_etcd.cli.live.web, elastic_etcd.launcher, "
    "uvicorn"
)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(ROOT / "scripts" / "dist", folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"elastic_etcd-{__version__}.dist-info/METADATA").decode()
    return message_from_string(text)


@pytest.fixture(scope="module")
def user(
    wheel: Path, metadata: Message, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """An empty folder, and the programs of an environment into which the wheel was installed.

    All but torch comes from a folder of wheels, without an index.
    """
    folder = tmp_path_factory.mktemp("user")
    python = folder / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    lend("torch", folder / "venv")
    wheels = needed(metadata)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index"]
    alone = {"PATH": os.environ["PATH"], "PIP_CONFIG_FILE": os.devnull}
    run(*pip, "--find-links", wheels, f"elastic_etcd[{EXTRAS}] @ {wheel.as_uri()}", env=alone)
    return folder, python.parent


def needed(metadata: Message) -> Path:
    """A folder of wheels, kept for the next time: all that ours asks for, but torch."""
    asked = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    wanted = [f"{r.name}{r.specifier}" for r in asked if r.name != "torch" and applies(r)]
    constraints = ROOT / "scripts" / "constraints.txt"
    stamp = "\n".join([*wanted, constraints.read_text()])
    folder = ROOT / "build" / f"needed-{sys.version_info.major}.{sys.version_info.minor}"
    done = folder / "requirements.txt"
    if not done.exists() or done.read_text() != stamp:
        shutil.rmtree(folder, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
        run(*pip, "--constraint", constraints, "--dest", folder, *wanted)
        done.write_text(stamp)
    return folder


def applies(requirement: Requirement) -> bool:
    marker = requirement.marker
    return not marker or any(marker.evaluate({"extra": extra}) for extra in EXTRAS.split(","))


def lend(name: str, venv: Path) -> None:
    """Let an environment have a package of this one, and what that needs: it is large."""
    (site,) = venv.glob("lib/*/site-packages")
    for each in {asked.name: distribution(asked.name) for asked in closure(name)}.values():
        for part in {Path(file).parts[0] for file in each.files or []} - {"..", "__pycache__"}:
            link = site / part
            if not link.exists():
                link.symlink_to(str(each.locate_file(part)))


def closure(name: str) -> Iterator[Requirement]:
    """The package and all that it needs, some more than once: with other extras they need more."""
    known, rest = set(), [Requirement(name)]
    while rest:
        asked = rest.pop()
        if (it := (asked.name, frozenset(asked.extras))) not in known:
            known.add(it)
            yield asked
            extras = [{"extra": extra} for extra in ("", *asked.extras)]
            needs = map(Requirement, distribution(asked.name).requires or [])
            rest += [n for n in needs if not n.marker or any(map(n.marker.evaluate, extras))]


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """What it prints; it must go well."""
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_has_all_files_of_the_package_and_no_others(wheel: Path) -> None:
    """It was built from the sdist, so that has them, too."""
    tracked = run("git", "ls-files", "elastic_etcd", cwd=ROOT).split()
    assert {"elastic_etcd/py.typed", "elastic_etcd/cli/live/page/page.html"} < set(tracked)
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        assert sorted(names) == sorted(tracked)
        assert [n for n in names if archive.read(n) != (ROOT / n).read_bytes()] == []


def test_o11_two_builds_are_equal(dist: Path, tmp_path: Path) -> None:
    """At another time, under another umask, with a file that was checked out later."""
    dated = (ROOT / "README.md").stat()
    os.utime(ROOT / "README.md")
    try:
        again = ("sh", "-c", 'umask 077 && exec scripts/dist "$1"', "sh", tmp_path)
        run(*again, cwd=ROOT, env=os.environ | {"TZ": "Asia/Tokyo"})
    finally:
        os.utime(ROOT / "README.md", ns=(dated.st_atime_ns, dated.st_mtime_ns))
    first, second = ({f.name: f.read_bytes() for f in d.iterdir()} for d in (dist, tmp_path))
    assert len(first) == 2
    assert first == second


def test_o11_a_release_has_its_sums_and_its_parts(dist: Path, tmp_path: Path) -> None:
    run(ROOT / "scripts" / "release", "--rehearse", tmp_path)
    summed = run("sha256sum", "--check", "SHA256SUMS", cwd=tmp_path)
    assert summed.count(": OK\n") == len([*tmp_path.iterdir()]) - 1 == 5
    for built in dist.iterdir():
        assert (tmp_path / built.name).read_bytes() == built.read_bytes()
    (parts,) = tmp_path.glob("*.cdx.json")
    python = venv_or_skip("sbom", "cyclonedx-python-lib[json-validation]==11.*")
    assert run(python, "-c", VALID, parts) == "None\n"
    spoilt = json.loads(parts.read_text()) | {"components": [{"type": "librarian"}]}
    parts.write_text(json.dumps(spoilt))
    assert "librarian" in run(python, "-c", VALID, parts)


def test_the_licence_is_in_both(dist: Path, wheel: Path) -> None:
    licence = (ROOT / "LICENSE").read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        name = f"elastic_etcd-{__version__}.dist-info/licenses/LICENSE"
        assert archive.read(name) == licence
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        member = archive.extractfile(f"elastic_etcd-{__version__}/LICENSE")
        assert member
        assert member.read() == licence


def test_what_it_says_of_itself(metadata: Message) -> None:
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    assert set(EXTRAS.split(",")) < set(metadata.get_all("Provides-Extra", []))


def test_a_new_user_without_a_network(user: tuple[Path, Path]) -> None:
    folder, programs = user
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    (folder / "train.py").write_text(TRAIN)
    assert run("elastic-etcd", "--version", env=env) == f"elastic-etcd {__version__}\n"
    assert "--nnodes" in run("python", "-m", "elastic_etcd.launch", "--help", env=env)
    run("python", "-W", "error", "-c", f"import {LOADED}", env=env)
    told = run("elastic-etcd", "launch", "train.py", cwd=folder, env=env)
    assert "a world of 1 in generation 1" in told


def test_a_client_that_needs_no_torch(
    wheel: Path, metadata: Message, etcd: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    """With the packages that the page names, and no others."""
    page = (ROOT / "docs" / "operate.md").read_text()
    ((ours, needs),) = re.findall(r"`pip install (--no-deps) \.`, then `pip install ([\w ]+)", page)
    programs = tmp_path / "venv" / "bin"
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = str(programs / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index"]
    run(*pip, ours, wheel)
    run(*pip, "--find-links", needed(metadata), *needs.split())
    env = {"PATH": f"{programs}"}
    for command in {*_MODULES, *_STEERING}:
        assert f"usage: elastic-etcd {command}" in run("elastic-etcd", command, "--help", env=env)
    for key, value in RUNNING.items():
        etcd.ctl("put", key.replace(KEYS.root, f"{prefix}/j"), value)
    where = (f"--etcd={etcd.endpoint}", f"--prefix={prefix}")
    assert "job j: training" in run("elastic-etcd", "status", "j", *where, env=env)
    assert "generation 2" in run("elastic-etcd", "events", "j", *where, env=env)


def test_its_client(user: tuple[Path, Path], etcd: EtcdServer, prefix: str) -> None:
    folder, programs = user
    run(programs / "python", "-W", "error", SMOKE, etcd.endpoint, prefix, cwd=folder, env={})
