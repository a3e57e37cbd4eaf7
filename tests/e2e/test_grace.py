"""What a script can do between SIGTERM and its end, with scripts as users write them."""

import json
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.job import Job
from tests.support.processes import command, send
from tests.support.ticking import TickingJob

pytestmark = pytest.mark.timeout(600)

SAVES = """
import signal, sys, time
import torch
from torch.utils.data import DataLoader, Dataset

stop = False


def on_sigterm(*_):
    global stop
    stop = True


class Numbers(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, i):
        return torch.tensor(float(i))


def main():
    signal.signal(signal.SIGTERM, on_sigterm)
    weight = torch.zeros(1)
    for step, batch in enumerate(DataLoader(Numbers(), batch_size=4, num_workers=2)):
        time.sleep(0.5)  # forward and backward
        weight += batch.mean()
        print("step", step, flush=True)
        if stop:
            torch.save({"step": step, "weight": weight}, sys.argv[1])
            print("saved at step", step, flush=True)
            return


if __name__ == "__main__":
    main()
"""

SAVES_SLOWLY = """
import signal, sys, time


def on_sigterm(*_):
    print("saving", flush=True)
    time.sleep(12)  # a large checkpoint
    print("saved", flush=True)
    sys.exit()


signal.signal(signal.SIGTERM, on_sigterm)
print("training", flush=True)
while True:
    time.sleep(0.1)
"""

# Rank 0 keeps the one checkpoint of the job; to write it takes a while.
KEEPS_LATEST = """
import json, os, pathlib, signal, sys, time
from torch.utils.data import DataLoader, Dataset
import elastic_etcd as ee

generation, rank = int(os.environ["ELASTIC_ETCD_GENERATION"]), int(os.environ["RANK"])
directory = pathlib.Path(sys.argv[1])
latest = directory / "latest"
stop = False


class Numbers(Dataset):
    def __len__(self):
        return 10**6

    def __getitem__(self, i):
        return float(i)


def save(step):
    partial = directory / "latest.part"
    with partial.open("w") as file:
        for piece in json.dumps({"generation": generation, "step": step}):
            file.write(piece)
            file.flush()
            time.sleep(0.12)
    partial.replace(latest)


def on_sigterm(*_):
    global stop
    if not ee.leaving():
        sys.exit()  # a new world goes on from the latest
    print("leaving within", os.environ["ELASTIC_ETCD_LEAVE_DEADLINE"], "s", flush=True)
    stop = True


def main():
    signal.signal(signal.SIGTERM, on_sigterm)
    found = json.loads(latest.read_text()) if latest.exists() else None
    with (directory / "begun").open("a") as file:
        file.write(json.dumps({"generation": generation, "rank": rank, "found": found}) + "\\n")
    assert not ee.leaving()
    step = found["step"] if found else 0
    for batch in DataLoader(Numbers(), batch_size=4, num_workers=2):
        time.sleep(0.2)  # forward and backward
        step += 1
        print("step", step, flush=True)
        if stop:
            if rank == 0:
                save(step)
                print("saved at step", step, flush=True)
            return


if __name__ == "__main__":
    main()
"""

# The same in process: what is around the loop saves when the node leaves.
KEEPS_LATEST_IN_PROCESS = """
import json, os, pathlib, sys, time
import torch
import elastic_etcd as ee

directory = pathlib.Path(sys.argv[1])
latest = directory / "latest"
state = ee.ElasticState(step=0)


def rank():
    return int(os.environ["RANK"])


@ee.run
def train(state):
    generation = int(os.environ["ELASTIC_ETCD_GENERATION"])
    found = json.loads(latest.read_text()) if latest.exists() else None
    with (directory / "begun").open("a") as file:
        line = {"generation": generation, "rank": rank(), "found": found, "step": state.step}
        file.write(json.dumps(line) + "\\n")
    assert not ee.leaving()
    while True:
        time.sleep(0.1)
        torch.distributed.all_reduce(torch.ones(1))
        state.step += 1
        state.commit()
        print("step", state.step, flush=True)
        state.check()


try:
    train(state)
finally:
    if ee.leaving() and rank() == 0:
        time.sleep(4)  # it is large
        state.save(directory / "state")  # this is fenced
        saved = {"generation": int(os.environ["ELASTIC_ETCD_GENERATION"]), "step": state.step}
        latest.write_text(json.dumps(saved))
        print("saved at step", state.step, flush=True)
"""

FORWARDS_NOTHING = """\
#!/bin/sh
trap 'wait $child; exit 0' TERM
sh -c 'trap "echo the child has it; exit" TERM; echo begun; while :; do sleep 0.1; done' &
child=$!
wait $child
"""


@pytest.mark.parametrize(
    "method", ["prefork", pytest.param("exec", marks=pytest.mark.nightly(part="jobs"))]
)
def test_r22_a_script_with_a_data_loader_saves_on_sigterm(
    job: Job, tmp_path: Path, method: str
) -> None:
    script, saved = tmp_path / "train.py", tmp_path / "checkpoint.pt"
    script.write_text(SAVES)
    n1 = job.start("n1", nnodes="1", script=(str(script), str(saved)), start_method=method)
    job.said(n1, "step 1", seconds=90)
    n1.terminate()
    job.wait("the node ends", lambda: not n1.running(), seconds=60)
    assert "saved at step" in n1.output, n1.output
    assert "is killed by signal" not in n1.output
    assert saved.exists()


def test_r22_a_program_of_its_own_has_sigterm_in_its_whole_group(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(FORWARDS_NOTHING)
    script.chmod(0o755)
    n1 = job.start("n1", nnodes="1", script=("--no-python", str(script)))
    job.said(n1, "begun", seconds=60)
    n1.terminate()
    job.wait("the node ends", lambda: not n1.running(), seconds=60)
    assert "the child has it" in n1.output, n1.output


def test_r23_a_script_has_time_to_save_when_a_node_joins(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SAVES_SLOWLY)
    n1 = job.start("n1", script=(str(script),), settle=0, start_method="exec")
    job.said(n1, "training", seconds=60)
    n2 = job.start("n2", script=(str(script),), start_method="exec")
    job.said(n1, "saving", seconds=60)
    job.said(n2, "training", seconds=60)
    assert "saved" in n1.output
    for agent in (n1, n2):
        agent.terminate()
        job.said(agent, "once more to leave at once")
        agent.terminate()
        job.exits(agent, 143, seconds=60)
    job.abandoned = True


def begun(directory: Path) -> dict[int, dict[str, Any]]:
    """What rank 0 of each generation has found when it began."""
    path = directory / "begun"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    return {line["generation"]: line for line in lines if line["rank"] == 0}


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(KEEPS_LATEST, id="plain", marks=pytest.mark.nightly(part="jobs")),
        pytest.param(KEEPS_LATEST_IN_PROCESS, id="ee.run"),
    ],
)
def test_r5_the_next_world_begins_after_what_a_leaving_node_saves(
    job: Job, tmp_path: Path, source: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    given = (str(script), str(tmp_path))
    flags: dict[str, Any] = {"leave_deadline": 50, "log_level": "debug"}
    n1, n2 = (job.start(n, script=given, **flags) for n in ("n1", "n2"))
    for agent in (n1, n2):
        job.said(agent, "step 3", seconds=90)
    (first,) = begun(tmp_path)
    n1.terminate()  # it has rank 0
    job.exits(n1, 143, seconds=60)
    assert "saved at step" in n1.output, n1.output
    job.wait("the others go on", lambda: max(begun(tmp_path)) > first, seconds=60)
    saved = json.loads((tmp_path / "latest").read_text())
    assert begun(tmp_path)[first + 1]["found"] == saved, job.account()
    assert saved["generation"] == first
    assert "n1 is leaving and may still save" in n2.output
    if source is KEEPS_LATEST:
        assert "leaving within 50 s" in n1.output
        assert "leaving within" not in n2.output
    else:
        assert begun(tmp_path)[first + 1]["step"] == saved["step"], "nothing is trained again"
        assert (tmp_path / "state").exists()
    n2.terminate()
    job.exits(n2, 143, seconds=60)


def test_r12_an_agent_that_stood_still_in_the_grace_takes_nobody_for_unkillable(
    jobs: Callable[..., TickingJob],
) -> None:
    job = jobs(kind=TickingJob)
    stubborn = ("--fault", "ignore-term@generation=1")
    n1 = job.start("n1", *stubborn, settle=0, shutdown_timeout=2, kill_timeout=3, lease_ttl=60)
    g = job.trains(1)
    pid = job.worker(g, rank=0).pid
    n2 = job.start("n2", lease_ttl=60)
    job.said(n1, "n2 joins", seconds=60)
    send(signal.SIGSTOP, [n1.pid])
    select.poll().poll(7000)  # until the grace and the time after it are over
    send(signal.SIGCONT, [n1.pid])
    job.trains(2, after=g, seconds=60)
    assert command(pid) == "gone"
    assert "long after SIGKILL" not in n1.output
    job.finish(n1, n2)
