"""Programs that are Go modules, pinned in a folder with a go.mod, and built where Go is at hand."""

import fcntl
import os
import subprocess
import tempfile
from pathlib import Path
from unittest import SkipTest

from tests.support.debian import NotToBeHad, cached

BUILD_TIMEOUT = 1800.0  # Kubernetes, on two cores that do other things, too


def built(module: Path, folder: str, packages: dict[str, str], names: str = "") -> Path:
    """A folder with the module's programs, kept from one run to the next; {program: package}.

    `names` are flags by which the linker tells them their version. Raises NotToBeHad.
    """
    root = cached(folder)
    if not root.exists():
        try:
            _build(module, root, packages, names)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip()
            reason = f"no {folder}, which is built with Go: {said.splitlines()[-1]}"
            raise NotToBeHad(reason) from None
    return root


def built_or_skip(module: Path, folder: str, packages: dict[str, str], names: str = "") -> Path:
    try:
        return built(module, folder, packages, names)
    except NotToBeHad as reason:
        raise SkipTest(str(reason)) from None


def pinned(module: Path, name: str) -> str:
    """The version of a module that this one requires."""
    words = (module / "go.mod").read_text().split()
    return words[words.index(name, words.index("require")) + 1].lstrip("v")


def _build(module: Path, root: Path, packages: dict[str, str], names: str) -> None:
    root.parent.mkdir(parents=True, exist_ok=True)
    go = ("go", "build", "-mod=readonly", "-trimpath", f"-ldflags=-s -w {names}", "-buildvcs=false")
    with (
        root.with_suffix(".lock").open("w") as lock,
        tempfile.TemporaryDirectory(dir=root.parent) as aside,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        if root.exists():  # another row of scripts/test has built it meanwhile
            return
        for program, package in packages.items():
            subprocess.run(
                [*go, "-o", f"{aside}/root/{program}", package],
                cwd=module,
                env={**os.environ, "CGO_ENABLED": "0"},
                check=True,
                capture_output=True,
                text=True,
                timeout=BUILD_TIMEOUT,
            )
        Path(aside, "root").rename(root)
