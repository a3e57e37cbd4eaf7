"""etcd of other versions than the wheel's: of a Debian suite, or the newest of a minor version.

The latter are Go modules, pinned in tests/etcd/modules, and built where Go is at hand.
`python -m tests.support.etcd_versions 3.7` prints the path of its program, without a version of the
newest. Where that is not to be had it says why, and exits with 77.
"""

import fcntl
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.debian import NotToBeHad, cached, unpacked

MODULES = Path(__file__).parents[1] / "etcd" / "modules"
MINORS = tuple(sorted(each.name for each in MODULES.iterdir()))
NEWEST = MINORS[-1]
PACKAGES = {"server": "etcd", "etcdctl": "etcdctl", "etcdutl": "etcdutl"}
BUILD_TIMEOUT = 900.0
NOT_HAD = 77  # as scripts/nightly takes it


@functools.cache
def etcd_of(source: str) -> str:
    """The program of a Debian suite or of a minor version. Raises NotToBeHad."""
    if source not in MINORS:
        return str(unpacked("etcd-server", source, f"etcd-{source}") / "usr/bin/etcd")
    root = cached(f"etcd-{pinned(source)}")
    if not root.exists():
        try:
            _build(MODULES / source, root)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip()
            reason = f"no etcd {pinned(source)}, which is built with Go: {said.splitlines()[-1]}"
            raise NotToBeHad(reason) from None
    return str(root / "etcd")


def newest_or_skip() -> str:
    """The newest, which `.ci/run` builds before the tests: that takes too long for one of them."""
    program = cached(f"etcd-{pinned(NEWEST)}") / "etcd"
    if not program.exists():
        pytest.skip(f"not built: python -m tests.support.etcd_versions {NEWEST}")
    return str(program)


def pinned(minor: str) -> str:
    """The version in its module's file."""
    words = (MODULES / minor / "go.mod").read_text().split()
    return words[words.index("go.etcd.io/etcd/server/v3", words.index("require")) + 1].lstrip("v")


def _build(module: Path, root: Path) -> None:
    """The server and its tools, into `root`."""
    root.parent.mkdir(parents=True, exist_ok=True)
    go = ("go", "build", "-mod=readonly", "-trimpath", "-ldflags=-s -w", "-buildvcs=false")
    with (
        root.with_suffix(".lock").open("w") as lock,
        tempfile.TemporaryDirectory(dir=root.parent) as aside,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        if root.exists():  # another row of scripts/test has built it meanwhile
            return
        for package, program in PACKAGES.items():
            subprocess.run(
                [*go, "-o", f"{aside}/root/{program}", f"go.etcd.io/etcd/{package}/v3"],
                cwd=module,
                env={**os.environ, "CGO_ENABLED": "0"},
                check=True,
                capture_output=True,
                text=True,
                timeout=BUILD_TIMEOUT,
            )
        Path(aside, "root").rename(root)


if __name__ == "__main__":
    try:
        print(etcd_of(*(sys.argv[1:] or [NEWEST])))
    except NotToBeHad as reason:
        print(reason, file=sys.stderr)
        sys.exit(NOT_HAD)
