"""etcd of other versions: Debian's packages, unpacked into a cache, not installed."""

import functools
import os
import subprocess
import tempfile
from pathlib import Path

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
PATIENCE = 60.0


class NotToBeHad(Exception):
    """Why there is no etcd of this kind on this machine."""


@functools.cache
def debian_etcd(suite: str) -> str:
    """The etcd of a Debian suite, from the mirror that this machine uses. Raises NotToBeHad."""
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    folder = Path(home, "elastic_etcd-tests", f"etcd-{suite}")
    program = folder / "usr/bin/etcd"
    if not program.exists():
        try:
            _fetch(suite, folder)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip()
            reason = f"no etcd of Debian {suite}: {said.splitlines()[-1]}"
            raise NotToBeHad(reason) from None
    return str(program)


def _fetch(suite: str, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
        _unpack(suite, Path(aside))
        Path(aside, "etcd").rename(folder)


def _unpack(suite: str, aside: Path) -> None:
    """Into the folder `etcd`, with lists of packages that are used for nothing else."""
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
    _run([*apt, "-qq", "download", "etcd-server"], aside)
    (package,) = aside.glob("etcd-server_*.deb")
    _run(["dpkg", "-x", str(package), "etcd"], aside)


def _mirror() -> str:
    """Where this machine has Debian's packages from."""
    given = _run(["apt-get", "indextargets", "--format", "$(REPO_URI)"], Path("/")).split()
    found = next((uri for uri in given if uri.rstrip("/").endswith("/debian")), None)
    if found is None:
        raise FileNotFoundError("this machine has no mirror of Debian's packages")
    return found


def _run(command: list[str], folder: Path) -> str:
    return subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True, timeout=PATIENCE
    ).stdout
