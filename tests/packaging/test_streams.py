"""ElasticIterable over the libraries that it is for, by the functions in docs/stream.md."""

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.support.venv import ROOT, venv_or_skip

pytestmark = [
    pytest.mark.timeout(600),  # the first time, pip has to download
    pytest.mark.nightly(part="packaging"),
]

PROGRAM = Path(__file__).with_name("streams.py")


def test_each_sample_once_from_parquet_webdataset_and_hugging_face(tmp_path: Path) -> None:
    python = venv_or_skip("streams", "webdataset>=1,<2", "pyarrow", "datasets>=4")
    torch = sysconfig.get_path("purelib")  # ours: torch is large
    done = subprocess.run(
        [python, PROGRAM, tmp_path],
        env={"PYTHONPATH": f"{ROOT}:{torch}", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "dataloader workers" not in done.stderr  # datasets says so where it splits once more
    assert done.stdout.split() == ["113"] * 4
