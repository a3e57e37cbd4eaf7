"""What a script can do between SIGTERM and its end, with scripts as users write them."""

import select
import signal
from pathlib import Path

import pytest

from tests.support.job import Job
from tests.support.processes import command, send

pytestmark = pytest.mark.timeout(180)

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

FORWARDS_NOTHING = """\
#!/bin/sh
trap 'wait $child; exit 0' TERM
sh -c 'trap "echo the child has it; exit" TERM; echo begun; while :; do sleep 0.1; done' &
child=$!
wait $child
"""


@pytest.mark.parametrize("method", ["prefork", "exec"])
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
    for agent in (n1, n2):
        job.exits(agent, 143, seconds=60)


def test_r12_an_agent_that_stood_still_in_the_grace_takes_nobody_for_unkillable(job: Job) -> None:
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
