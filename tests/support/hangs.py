"""The ways in which a rank may hang, one after the other in one job, for scripts of any kind."""

import os
import re
import signal
from functools import partial

from tests.support.job import Agent, Job
from tests.support.processes import send

# How it is told where the rank stands.
WAYS = {
    "sleeps": r"\(train.py:\d+ in sleeps\)",
    "spins": r"\(train.py:\d+ in spins\)",
    "blocks": r"\(train.py:\d+ in blocks\)",
    "is_stopped": r"\(stopped\)",
}
APART = 5  # steps from one hang to the next

# A script calls `hang` after each step of its world, and ends when that is true. Rank 1 hangs in
# all ways in one world, each until a signal comes; or in $WORLDS worlds in one way each, as the
# agent ends these. Afterwards the workers of its data loader die as soon as there is a file `dies`.
SCRIPT = """
import os, signal, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

class GoOn(Exception):
    pass

def go_on(*_):
    raise GoOn

def sleeps():
    time.sleep(1000)

def spins():
    while True:
        pass

def blocks():
    open("fifo").read()

def is_stopped():
    os.kill(os.getpid(), signal.SIGSTOP)

WAYS = sleeps, spins, blocks, is_stopped
WORLDS = int(os.environ["WORLDS"])

def hang(number):
    time.sleep(0.01)
    hung = os.path.getsize("hung")
    if WORLDS and hung == WORLDS:
        return number == 20
    after = 5 if WORLDS else 5 * (hung + 1)
    if dist.get_rank() == 1 and hung < len(WAYS) and number == after:
        with open("hung", "a") as file:
            file.write(".")
        with open("pid", "w") as file:
            file.write(str(os.getpid()))
        signal.signal(signal.SIGUSR1, go_on)
        try:
            WAYS[hung]()
        except GoOn:
            pass
    return False

class Samples(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        if os.environ["RANK"] == "1" and os.path.exists("dies"):
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(2)
"""
PLAIN = (
    SCRIPT
    + """
def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Samples(), batch_size=2, num_workers=1)
    for number, batch in enumerate(loader, 1):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        if hang(number):
            break
    dist.barrier()
    os._exit(0)  # the end of torch's threads takes long on a busy machine

if __name__ == "__main__":
    main()
"""
)
ELASTIC = (
    SCRIPT
    + """
import elastic_etcd as ee

state = ee.ElasticState(model=torch.nn.Linear(2, 2), step=0)

@ee.run
def train(state):
    model = ee.ddp(state.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Samples(), batch_size=2, num_workers=1)
    for number, batch in enumerate(loader, 1):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        state.step += 1
        state.commit(every=2)
        state.check()
        if hang(number):
            break

if __name__ == "__main__":
    train(state)
"""
)


def script(job: Job, text: str) -> tuple[str]:
    """The script's path, in a folder that has what its hangs need."""
    path = job.directory / "train.py"
    path.write_text(text)
    (job.directory / "hung").touch()
    os.mkfifo(job.directory / "fifo")
    return (str(path),)


def names_each(job: Job, agent: Agent) -> None:
    """Wait until each hang of rank 1 is told, with its place, and have it go on.

    At last a worker of its data loader dies, which is a failure and no hang.
    """
    for number, (way, where) in enumerate(WAYS.items(), 1):
        done = APART * number
        behind = rf"rank 1 on {agent.node} is in step {done + 1} for \d+ s"
        line = rf"warning: {behind}, 1 other waits in {done + 1} {where}\n"
        job.wait(f"it says that rank 1 {way}", partial(_says, agent, line), 120)
        by = signal.SIGCONT if way == "is_stopped" else signal.SIGUSR1
        send(by, [int((job.directory / "pid").read_text())])
        job.said(agent, f"rank 1 goes on after step {done + 1}", 120)
    (job.directory / "dies").touch()
    job.exits(agent, 1, 120)
    assert f"error: rank 1 on {agent.node} exited 1; no restart is allowed" in agent.output


def _says(agent: Agent, line: str) -> bool:
    return re.search(line, agent.output) is not None
