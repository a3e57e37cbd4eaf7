"""The lines of docs/frameworks.md by which the launcher runs a script of accelerate's."""

import os
import re
import subprocess
from pathlib import Path

from tests.support.job import ROOT

PAGE = (ROOT / "docs" / "frameworks.md").read_text()
(FILE,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
WRITES, LAUNCHES = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)


def run(line: str, python: Path, folder: Path, **env: str) -> str:
    """What the line prints, run with the programs that are beside this Python."""
    path = f"{python.parent}:{os.environ['PATH']}"
    known = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env=known | {"PATH": path, "PYTHONPATH": str(ROOT), "HF_HOME": str(folder)} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def variables(file: str, python: Path, folder: Path) -> dict[str, str]:
    """What the recipe takes from this file of accelerate's."""
    (folder / "accelerate.yaml").write_text(file)
    run(WRITES, python, folder)
    lines = (folder / "accelerate.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)
