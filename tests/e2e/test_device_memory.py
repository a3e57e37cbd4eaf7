"""A GPU's memory that somebody holds when workers begin: named in the failure, waited for after it.

There is no GPU here: `nvidia-smi` on PATH is a stand-in that prints what the driver's would, of
processes that are real. It stands in for the parsing and the waiting only; tests/gpu/test_memory.py
has the driver's own.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_etcd.agent import device_memory
from elastic_etcd.agent.device_memory import holders, wait_until_free
from elastic_etcd.agent.failures import lacks_device_memory
from tests.support.job import Job

pytestmark = pytest.mark.timeout(600)
GPU = "GPU-8f3c1c5e-0b0b-4d0e-9a51-2f0f3a1d7b11"
STAND_IN = """#!/bin/sh
echo "$*" >> {folder}/asked
cat {folder}/held
"""
# As torch says it; once, as long as somebody holds the memory.
NEEDS_MEMORY = """
import os
import sys

if os.path.getsize(sys.argv[1]):
    raise RuntimeError("CUDA out of memory. Tried to allocate 60.00 GiB. GPU 0 has a capacity of")
print("has its memory", flush=True)
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a stand-in for nvidia-smi, whose file `held` has what it prints."""
    folder = tmp_path / "driver"
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(STAND_IN.format(folder=folder))
    program.chmod(0o755)
    (folder / "held").touch()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.fixture
def other() -> Iterator[int]:
    """Somebody else's process."""
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        yield process.pid


@pytest.mark.parametrize("visible", [None, "0,2"])
async def test_who_holds_memory_is_known_by_name(
    driver: Path, other: int, monkeypatch: pytest.MonkeyPatch, visible: str | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    name = Path(f"/proc/{other}/comm").read_text().strip()
    lines = [f"{other}, 70000 MiB, {GPU}", f"4194304, [N/A], {GPU}", "no line of it", ""]
    (driver / "held").write_text("\n".join(lines))
    unknown = f"pid 4194304 (ended) holds [N/A] of {GPU}"
    assert await holders(()) == [f"pid {other} ({name}) holds 70000 MiB of {GPU}", unknown]
    assert await holders([other]) == [unknown]
    asked = (driver / "asked").read_text().splitlines()[0]
    assert asked.startswith("--id=0,2 --query" if visible else "--query-compute-apps=pid,")


@pytest.mark.parametrize("fails", ["none", "an error", "silence"])
async def test_without_an_answer_nobody_is_waited_for(
    driver: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    monkeypatch.setattr(device_memory, "_ASK", 0.5)
    program = driver / "nvidia-smi"
    words = {"an error": f"echo 1, 2 MiB, {GPU}; exit 9", "silence": "sleep 60"}
    program.write_text(f"#!/bin/sh\n{words.get(fails, '')}\n")
    if fails == "none":
        monkeypatch.setenv("PATH", str(driver / "nowhere"))
    await wait_until_free((), lambda: False)


async def test_workers_start_at_last(
    driver: Path, other: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, device_memory.log.name)
    for name, seconds in (("_LOOK", 0.01), ("_TELLS", 0.1), ("_PATIENCE", 0.5)):
        monkeypatch.setattr(device_memory, name, seconds)
    (driver / "held").write_text(f"{other}, 70000 MiB, {GPU}\n")
    await wait_until_free((), lambda: True)
    assert not caplog.messages, "a stop is not kept waiting"
    await wait_until_free((), lambda: False)
    waits, starts = caplog.messages
    assert waits.startswith("waiting for memory of a GPU for 0 s: pid ")
    assert starts.startswith("workers start after ")


@pytest.mark.parametrize(
    ("message", "lacks"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", True),
        ("RuntimeError: CUDA error: out of memory", True),
        ("ncclUnhandledCudaError: Cuda failure 2 'out of memory'", True),
        ("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY", True),
        ("MemoryError: out of memory", False),
        ("RuntimeError: CUDA error: device-side assert triggered", False),
    ],
)
def test_the_words_of_a_gpu_s_memory(message: str, lacks: bool) -> None:
    assert lacks_device_memory(message) is lacks


def test_a_start_without_memory_names_who_has_it_and_the_next_one_waits(
    job: Job, driver: Path, other: int
) -> None:
    script = job.directory / "train.py"
    script.write_text(NEEDS_MEMORY)
    (driver / "held").write_text(f"{other}, 70000 MiB, {GPU}\n")
    command = (str(script), str(driver / "held"))
    n1 = job.start("n1", nnodes="1", script=command, max_restarts=1)
    job.said(n1, "waiting for memory of a GPU for ")
    named = f"out of memory: pid {other} ("
    assert " exited 1 after " in n1.output
    assert n1.output.count(named) == 1
    assert "has its memory" not in n1.output
    (driver / "held").write_text("")
    job.exits(n1, 0)
    assert "has its memory" in n1.output
    looks = len((driver / "asked").read_text().splitlines())
    assert looks >= 3


@pytest.mark.nightly(part="jobs")
def test_a_failure_of_another_kind_asks_nobody(job: Job, driver: Path) -> None:
    script = job.directory / "train.py"
    script.write_text(
        "import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    raise ValueError\n"
    )
    n1 = job.start("n1", nnodes="1", script=(str(script),), max_restarts=1)
    job.exits(n1, 0)
    assert not (driver / "asked").exists()
