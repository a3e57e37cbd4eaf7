"""A job that cells of a real Jupyter kernel start, in an environment that has one."""

import json
import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.support.venv import ROOT, venv_or_skip

pytestmark = [pytest.mark.timeout(600), pytest.mark.nightly(part="packaging")]

DRIVER = Path(__file__).with_name("notebook.py")
PAGE = (ROOT / "docs" / "python.md").read_text()
CELL = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[1]
CLASS = """
class Pair:
    def __init__(self, rank):
        self.rank = rank

def waits(where):
    import os, pathlib, time
    pathlib.Path(where).write_text(str(os.getpid()))
    print("now", flush=True)
    time.sleep(600)

elastic_launch(LaunchConfig(start_method="exec"), Pair)(5)[0].rank, asyncio.get_running_loop()
"""


def test_functions_of_cells_run_and_an_interrupt_ends_them(tmp_path: Path) -> None:
    python = venv_or_skip("jupyter", "ipykernel", "jupyter_client")
    ours = os.pathsep.join([str(ROOT), sysconfig.get_paths()["purelib"]])
    env = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    pid = tmp_path / "pid"
    cells = [
        (CELL, ""),
        ("import asyncio" + CLASS, ""),
        (f"elastic_launch(LaunchConfig(), waits)({str(pid)!r})", "interrupt"),
        ("1 + 1", ""),
    ]
    done = subprocess.run(
        [str(python), str(DRIVER)],
        cwd=tmp_path,
        input=json.dumps(cells),
        env=env | {"PYTHONPATH": ours},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page, by_value, interrupted, after = json.loads(done.stdout.splitlines()[-1])
    assert page["value"] == "{0: 0, 1: 21}", page
    assert "rank 1 has 7\n" in page["printed"]
    assert re.match(r"\(5, <.*running=True", by_value["value"]), by_value
    assert interrupted["error"].startswith("KeyboardInterrupt"), interrupted
    assert not Path("/proc", pid.read_text()).exists(), "its worker is gone"
    assert after["value"] == "2", "the kernel is there"
