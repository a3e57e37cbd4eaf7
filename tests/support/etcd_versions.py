"""etcd of other versions than the wheel's: of a Debian suite, or the newest of a minor version.

The latter are Go modules, pinned in tests/etcd/modules, and built where Go is at hand.
`python -m tests.support.etcd_versions 3.7` prints the path of its program, without a version of the
newest. Where that is not to be had it says why, and exits with 77.
"""

import functools
import sys
from pathlib import Path
from unittest import SkipTest

from tests.support import go_programs
from tests.support.debian import NotToBeHad, cached, unpacked
from tests.support.go_programs import built

MODULES = Path(__file__).parents[1] / "etcd" / "modules"
MINORS = tuple(sorted(each.name for each in MODULES.iterdir()))
NEWEST = MINORS[-1]
PACKAGES = {
    program: f"go.etcd.io/etcd/{package}/v3"
    for program, package in (("etcd", "server"), ("etcdctl", "etcdctl"), ("etcdutl", "etcdutl"))
}
NOT_HAD = 77  # as scripts/nightly takes it


@functools.cache
def etcd_of(source: str) -> str:
    """The program of a Debian suite or of a minor version. Raises NotToBeHad."""
    if source not in MINORS:
        return str(unpacked("etcd-server", source, f"etcd-{source}") / "usr/bin/etcd")
    return str(built(MODULES / source, f"etcd-{pinned(source)}", PACKAGES) / "etcd")


def newest_or_skip() -> str:
    """The newest, which `.ci/run` builds before the tests: that takes too long for one of them."""
    program = cached(f"etcd-{pinned(NEWEST)}") / "etcd"
    if not program.exists():
        raise SkipTest(f"not built: python -m tests.support.etcd_versions {NEWEST}")
    return str(program)


def pinned(minor: str) -> str:
    """The version in its module's file."""
    return go_programs.pinned(MODULES / minor, "go.etcd.io/etcd/server/v3")


if __name__ == "__main__":
    try:
        print(etcd_of(*(sys.argv[1:] or [NEWEST])))
    except NotToBeHad as reason:
        print(reason, file=sys.stderr)
        sys.exit(NOT_HAD)
