"""Programs of Debian's packages, from the mirror that this machine uses; nothing is installed."""

import functools
import os
import subprocess
import tempfile
from pathlib import Path

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
DOWNLOAD_TIMEOUT = 60.0


class NotToBeHad(Exception):
    """Why there is no program of this kind on this machine."""


def cached(folder: str) -> Path:
    """Where such a program is kept from one run of the tests to the next."""
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(home, "elastic_etcd-tests", folder)


@functools.cache
def unpacked(packages: str, suite: str, folder: str, *, missing: bool = False) -> Path:
    """The root of packages of a Debian suite, in this folder of a cache. Raises NotToBeHad.

    With `missing` it also has the packages that these need and this machine has not.
    """
    root = cached(folder)
    if not (root / "usr/bin").exists():
        try:
            _fetch(packages, suite, root, missing=missing)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip()
            reason = f"no {packages} of Debian {suite}: {said.splitlines()[-1]}"
            raise NotToBeHad(reason) from None
    return root


def _fetch(packages: str, suite: str, root: Path, *, missing: bool) -> None:
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent) as aside:
        _unpack(packages, suite, Path(aside), missing=missing)
        Path(aside, "root").rename(root)


def _unpack(packages: str, suite: str, aside: Path, *, missing: bool) -> None:
    """Into the folder `root`, with lists of packages that are used for nothing else."""
    for name in ("lists/partial", "archives/partial"):
        (aside / name).mkdir(parents=True)
    (aside / "sources.list").write_text(f"deb [signed-by={KEYRING}] {_mirror()} {suite} main\n")
    apt = [
        "apt-get",
        f"-oDir::Etc::sourcelist={aside}/sources.list",
        "-oDir::Etc::sourceparts=-",
        f"-oDir::State::lists={aside}/lists",
        f"-oDir::Cache={aside}",
        "-oAcquire::Languages=none",
        "-oAPT::Update::Error-Mode=any",
        "-oAcquire::Retries=1",
        "-oAcquire::http::Timeout=10",
    ]
    _run([*apt, "-qq", "update"], aside)
    if missing:  # of another suite than this machine's they often don't go together: then it fails
        only = ("--download-only", "--no-install-recommends", "--reinstall", "-oDebug::NoLocking=1")
        _run([*apt, "-qqy", *only, "install", *packages.split()], aside)
    else:
        _run([*apt, "-qq", "download", *packages.split()], aside)
    for archive in (*aside.glob("*.deb"), *aside.glob("archives/*.deb")):
        _run(["dpkg", "-x", str(archive), "root"], aside)


def _mirror() -> str:
    """Where this machine has Debian's packages from."""
    given = _run(["apt-get", "indextargets", "--format", "$(REPO_URI)"], Path("/")).split()
    found = next((uri for uri in given if uri.rstrip("/").endswith("/debian")), None)
    if found is None:
        raise FileNotFoundError("this machine has no mirror of Debian's packages")
    return found


def _run(command: list[str], folder: Path) -> str:
    return subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT
    ).stdout
