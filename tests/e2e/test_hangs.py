"""Workers that hang in a step, in scripts as users write them: it is told where they stand."""

import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support import hangs
from tests.support.disks import disk_that_may_stand_still, standing_still
from tests.support.etcd import EtcdServer
from tests.support.job import Agent, Job
from tests.support.proxy import Proxy, proxy_aside

pytestmark = pytest.mark.timeout(600)
NIGHTLY = pytest.mark.nightly(part="jobs")  # the same once more, for other scripts and starts

PLAIN = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def sleeps():
    time.sleep(1000)

def spins():
    while True:
        pass

def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 1000):
        optimizer.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        if step == 5 and dist.get_rank() == 1:
            globals()[sys.argv[1]]()

main()
"""
Flags = dict[str, Any]
STARVED: Flags = {"hang_timeout": 8}  # no step takes so long, on a busy machine either
SLOW = """
import sys, time
import torch
import elastic_etcd as ee

time.sleep(6)  # an import
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
time.sleep(6)  # the first step compiles
for _ in range(3):
    optimizer.step()
with ee.quiet("evaluation"):
    time.sleep(6)
optimizer.step()
"""


@pytest.fixture
def flags(job: Job) -> Flags:
    usual: Flags = {"nnodes": "1:1", "lease_ttl": 20}  # which a busy machine does not lose
    return usual | {"log_dir": str(job.directory), "hang_timeout": 2}


def script(job: Job, text: str, *arguments: str) -> tuple[str, ...]:
    path = job.directory / "train.py"
    path.write_text(textwrap.dedent(text))
    return str(path), *arguments


def evidence(job: Job, agent: Agent, rank: int) -> str:
    """All that was found out about this rank, one hang after the other."""
    job.said(agent, f"rank {rank}: where it stands is in ", 60)
    (path,) = {*re.findall(rf"rank {rank}: where it stands is in (\S+/hang.txt)", agent.output)}
    return Path(path).read_text()


@pytest.mark.parametrize(
    ("text", "method"),
    [
        pytest.param(hangs.PLAIN, "prefork", id="plain"),
        pytest.param(hangs.PLAIN, "exec", id="exec", marks=NIGHTLY),
        pytest.param(hangs.ELASTIC, "prefork", id="ee.run", marks=NIGHTLY),
    ],
)
def test_each_hang_is_told_with_where_it_stands(
    job: Job, flags: Flags, text: str, method: str
) -> None:
    command = hangs.script(job, text)
    more: Flags = {"start_method": method, "env": {"WORLDS": "0"}, "max_restarts": 0}
    n1 = job.start("n1", nproc=2, script=command, **flags | more)
    hangs.names_each(job, n1)
    found = evidence(job, n1, 1)
    for stands in (*(f"in {way}\n" for way in hangs.WAYS if way != "is_stopped"), r" [RS] ", " T "):
        assert re.search(stands, found), (stands, found)
    # The other one waited for it.
    assert "_engine_run_backward" in evidence(job, n1, 0)
    assert "rank 1 on n1 exited 1" in status(job)


def test_what_is_slow_is_no_hang(job: Job, flags: Flags) -> None:
    n1 = job.start("n1", script=script(job, SLOW), **flags)
    job.exits(n1, 0, 60)
    assert " is in step " not in n1.output


@NIGHTLY
def test_off_tells_nothing(job: Job, flags: Flags) -> None:
    command = script(job, PLAIN.replace("1000)", "4)"), "sleeps")
    n1 = job.start("n1", nproc=2, script=command, **flags | {"hang_timeout": "off"})
    job.exits(n1, 0, 60)
    assert " is in step " not in n1.output


# Once, and then it trains on.
ONCE = (
    PLAIN.replace("1000):", "40):")
    .replace("def main():", "def main():\n    first = not os.path.exists('hung')")
    .replace(
        "dist.get_rank() == 1:", "dist.get_rank() == 1 and first:\n            open('hung', 'w')"
    )
)
ELASTIC = """
import os, signal
import torch
import torch.distributed as dist
import elastic_etcd as ee

state = ee.ElasticState(model=torch.nn.Linear(2, 2), step=0)

@ee.run
def train(state):
    model = ee.ddp(state.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while state.step < 40:
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        state.step += 1
        state.commit(every=2)
        state.check()
        if state.step == 5 and dist.get_rank() == 1 and not os.path.exists("hung"):
            open("hung", "w").close()
            os.kill(os.getpid(), signal.SIGSTOP)

train(state)
"""
ALONE = """
import os, time
import torch
import torch.distributed as dist
import elastic_etcd as ee
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 9):
    optimizer.zero_grad()
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    if step == 5 and dist.get_rank() == 0:
        with ee.quiet("evaluation"):
            time.sleep(6)
dist.barrier()
os._exit(0)
"""


# It exports as long as there is no file; the others have ended.
EXPORTS = (
    PLAIN.replace("1000)", "8)")
    .replace("step == 5 and dist.get_rank() == 1", "step == 7 and dist.get_rank() == 0")
    .replace(
        "def main():",
        """def exports():
    while not os.path.exists("exported"):
        time.sleep(0.05)

def main():""",
    )
)


# It evaluates until the test lets it go on, and then it may hang.
GATED = ELASTIC.replace("import os, signal", "import os, signal, time").replace(
    """            open("hung", "w").close()
""",
    """            open("hung", "w").close()
            with ee.quiet("evaluation"):
                while not os.path.exists("go on"):
                    time.sleep(0.05)
""",
)


LOADER = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __init__(self, blocks):
        self.blocks = blocks

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 12 and self.blocks:
            open(sys.argv[1]).read()
        return torch.ones(2)

def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in DataLoader(Samples(dist.get_rank() == 1), batch_size=2, num_workers=1):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

if __name__ == "__main__":
    main()
"""
SAVES = """
import pathlib, sys, time
import torch
import elastic_etcd as ee

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = ee.ElasticState(model=model, optimizer=optimizer, step=0)
folder = pathlib.Path(sys.argv[2])

@ee.run
def train(state):
    while state.step < 20:
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        state.step += 1
        state.commit()
        state.check()
        if state.step == 9:
            (folder / "trains").touch()
            while not (folder / "may save").exists():
                with ee.quiet("waits for the test"):
                    time.sleep(0.1)
            state.save(sys.argv[1])
            print("has saved", flush=True)

train(state)
"""
# Rank 1 is stopped within a commit, once, before its pieces are written; rank 0 waits for them.
COMMITS = """
import os, signal
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import elastic_etcd as ee

class Stops:
    def state_dict(self):
        if state.step == 5 and dist.get_rank() == 1 and not os.path.exists("hung"):
            open("hung", "w").close()
            os.kill(os.getpid(), signal.SIGSTOP)
        return {}

    def load_state_dict(self, saved):
        pass

def build(world):
    model = torch.nn.Linear(2, 2)
    fully_shard(model, mesh=world.mesh())
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

@ee.run
def train(state):
    while state.step < 10:
        state.model(torch.ones(4, 2)).sum().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.step += 1
        state.commit()
        state.check()

state = ee.ElasticState(build=build, stops=Stops(), step=0)
train(state)
"""
# Rank 1 has a debugger from its beginning, and stands in step 6.
TRACED = (
    PLAIN.replace("1000):", "9):")
    .replace("import os,", "import ctypes, os, subprocess,")
    .replace(
        "def main():",
        """
SEIZE = '''
import ctypes, sys
assert ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), 0, 0) == 0
print("traces", flush=True)
sys.stdin.read()
'''

def is_traced():
    while not os.path.exists("go on"):
        time.sleep(0.05)

def main():
    if os.environ["RANK"] == "1":
        ctypes.CDLL(None).prctl(0x59616D61, -1, 0, 0, 0)  # its child may do that
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        debugger = subprocess.Popen([sys.executable, "-c", SEIZE, str(os.getpid())], **pipes)
        print("debugger:", debugger.stdout.readline() or "none", flush=True)""",
    )
)


def pair(job: Job, command: tuple[str, ...], **flags: Any) -> dict[str, Agent]:
    """Two nodes; the one with rank 1 is called behind."""
    folder = str(job.directory)
    usual: Flags = {"nnodes": "2", "log_dir": folder, "hang_timeout": 3, "lease_ttl": 10}
    agents = [job.start(node, script=command, **usual | flags) for node in ("n1", "n2")]
    for agent in agents:
        job.said(agent, "group rank ", 120)
    first, second = agents
    if "group rank 1 " in first.output:
        first, second = second, first
    return {"ahead": first, "behind": second}


def status(job: Job) -> str:
    command = ["-m", "elastic_etcd", "status", job.name, f"--etcd={job.endpoint}"]
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=True
    ).stdout


def test_every_node_and_the_history_say_who_is_behind(job: Job) -> None:
    nodes = pair(job, script(job, PLAIN, "sleeps"))
    behind = nodes["behind"].node
    for agent in nodes.values():
        job.said(agent, f"warning: rank 1 on {behind} is in step 6 for ", 60)
        line = re.search(r"rank 1 on .*", agent.output)
        assert line
        assert re.fullmatch(
            rf"rank 1 on {behind} is in step 6 for \d+ s, 1 other waits in 6"
            r" \(train.py:\d+ in sleeps\)",
            line[0],
        )
        assert line[0] in status(job)
    assert "generation 1: " in status(job)
    (file,) = re.findall(r"rank 1: where it stands is in (\S+)", nodes["behind"].output)
    assert f"  where rank 1 stands is in {file} on {behind}\n" in status(job)
    for agent in nodes.values():
        agent.terminate()
    for agent in nodes.values():
        job.exits(agent, 143)
        assert agent.output.count(f"rank 1 on {behind}") == 1


BEHIND = r"rank 1 on n[12] is in step 6 for \d+ s, 1 other waits in 6 "


NOBODY = r"nobody has moved for \d+ s \(storage\? network\? an evaluation outside ee.quiet\?\)"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(hangs.PLAIN, id="plain", marks=NIGHTLY),
        pytest.param(hangs.ELASTIC, id="ee.run"),
    ],
)
def test_a_world_that_hangs_is_begun_anew(job: Job, text: str) -> None:
    flags: Flags = {"hang_action": "restart", "max_restarts": 4, "env": {"WORLDS": "4"}}
    agents = pair(job, hangs.script(job, text), **flags | {"suspect_after": 0}).values()
    for agent in agents:
        job.exits(agent, 0, 240)
    said = status(job)
    for generation, where in enumerate(hangs.WAYS.values(), 2):
        line = re.search(f"generation [0-9]: ({BEHIND}{where}) \\(trained", said)
        assert line, said
        begun(agents, line[1], generation)


@pytest.mark.nightly(part="jobs")
def test_a_world_in_which_all_hang_is_begun_anew(job: Job) -> None:
    text = ONCE.replace("dist.get_rank() == 1 and ", "")
    command = script(job, text, "sleeps")
    agents = pair(job, command, hang_action="restart", max_restarts=1).values()
    for agent in agents:
        job.exits(agent, 0, 120)
    line = re.search(f"generation 1: ({NOBODY}) \\(trained", status(job))
    assert line, status(job)
    begun(agents, line[1], 2)


@NIGHTLY
def test_a_world_that_hangs_in_a_commit_is_begun_anew(job: Job) -> None:
    flags: Flags = {"hang_action": "restart", "max_restarts": 1, "suspect_after": 0}
    agents = pair(job, script(job, COMMITS), **flags).values()
    for agent in agents:
        job.exits(agent, 0, 120)
    where = r"rank 1 on n[12] is in step 5 for \d+ s, 1 other waits in 5 \(stopped\)"
    line = re.search(rf"generation 1: ({where}) \(trained", status(job))
    assert line, status(job)
    begun(agents, line[1], 2)


def begun(agents: Iterable[Agent], line: str, generation: int) -> None:
    """All have told this line, and its world was ended for that."""
    for agent in agents:
        assert f"warning: {line}\n" in agent.output
        assert f"generation {generation} ({line}): " in agent.output
        # Where it stood was found out before it was killed.
        evidence = agent.output.index(": where it stands is in ")
        assert evidence < agent.output.index(f"generation {generation} (")


@pytest.mark.nightly(part="jobs")
def test_who_waits_for_what_may_last_does_not_hang(job: Job) -> None:
    nodes = pair(job, script(job, ALONE))
    for agent in nodes.values():
        job.exits(agent, 0, 60)
        assert "rank 1 on " in agent.output, agent.output
        assert "waits in step 6 for rank 0 on " in agent.output
        assert "(quiet: evaluation, for " in agent.output
        assert "--hang-timeout" not in agent.output
    assert "waits in step 6" not in status(job)


def test_f3_an_export_after_the_others_have_ended_is_no_hang(job: Job, flags: Flags) -> None:
    more: Flags = {"hang_action": "restart", "max_restarts": 1, "nproc": 2}
    n1 = job.start("n1", script=script(job, EXPORTS, "exports"), **flags | more)
    job.said(
        n1,
        "s since the last step, rank 1 on n1 is at its end, no rank is seen in a collective",
        120,
    )
    (job.directory / "exported").touch()
    job.exits(n1, 0, 60)
    assert "generation 2" not in n1.output
    assert "at its end" not in status(job)


@NIGHTLY
def test_who_is_quiet_is_no_hang_where_its_agent_is_cut_off_from_etcd(
    job: Job, etcd: EtcdServer
) -> None:
    flags: Flags = {"nnodes": "2", "hang_action": "restart", "lease_ttl": 120} | STARVED
    command = script(job, GATED.replace("os.kill(os.getpid(), signal.SIGSTOP)", "pass"))
    with proxy_aside(etcd.endpoint) as (endpoint, proxy):
        n1 = job.start("n1", script=command, **flags)
        job.said(n1, "1 node is ready", 120)  # it coordinates
        n2 = job.start("n2", script=command, etcd=endpoint, **flags)
        job.wait("it evaluates", (job.directory / "hung").exists, 120)
        proxy(Proxy.freeze)
        job.said(n1, "rank 0 on n1 waits in step 6 for rank 1 on n2 (no answer)", 60)
        (job.directory / "go on").touch()
        proxy(Proxy.thaw)
        for agent in (n1, n2):
            job.exits(agent, 0, 120)
            assert "generation 2" not in agent.output


@pytest.mark.nightly(part="jobs")
def test_a_hang_is_found_while_newcomers_wait(job: Job) -> None:
    flags: Flags = {"nnodes": "2:3", "log_dir": str(job.directory), "settle": 1}
    flags |= {"hang_action": "restart", "lease_ttl": 20, "max_restarts": 0} | STARVED
    command = script(job, GATED)
    nodes = [job.start(node, script=command, **flags) for node in ("n1", "n2")]
    job.wait("it evaluates", (job.directory / "hung").exists, 120)
    nodes.append(job.start("n3", script=command, **flags))
    job.said(nodes[2], "says who is not: n3 joins", 120)
    (job.directory / "go on").touch()
    for agent in nodes:
        job.exits(agent, 0, 120)
    for agent in nodes[:2]:
        assert re.search(BEHIND + r"\(stopped\)", agent.output)
        assert ": where it stands is in " in agent.output


def test_a_data_loader_that_blocks_is_told(job: Job, flags: Flags) -> None:
    fifo = job.directory / "fifo"
    os.mkfifo(fifo)
    n1 = job.start("n1", nproc=2, script=script(job, LOADER, str(fifo)), **flags)
    job.said(n1, "warning: rank 1 on n1 is in step 7 for ", 120)
    assert re.search(r"rank 1 on n1 is in step 7 for \d+ s, 1 other waits in 7 \(", n1.output)
    processes = re.findall(r"^(\d+) \1 ", evidence(job, n1, 1), re.MULTILINE)
    assert len(processes) > 1  # the loader's, too
    fifo.write_text("go on")
    job.exits(n1, 0, 120)


def test_who_saves_to_a_disk_that_stands_still_does_not_hang(
    job: Job, flags: Flags, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with disk_that_may_stand_still(disk, tmp_path / "image"):
        command = script(job, SAVES, str(disk / "state.pt"), str(job.directory))
        n1 = job.start("n1", script=command, **flags)
        job.wait("it trains", (job.directory / "trains").exists, 120)
        with standing_still(disk):
            (job.directory / "may save").touch()
            time.sleep(3 * flags["hang_timeout"] + 2)
            assert "has saved" not in n1.output
        job.said(n1, "has saved", 120)
        job.exits(n1, 0, 120)
    assert "where it stands is in" not in n1.output


@NIGHTLY
def test_who_has_a_debugger_does_not_hang(job: Job, flags: Flags) -> None:
    n1 = job.start("n1", nproc=2, script=script(job, TRACED, "is_traced"), **flags | STARVED)
    job.said(n1, "debugger: ", 120)
    if "debugger: none" in n1.output:
        pytest.skip("no process may trace another here")
    job.said(n1, "rank 0 on n1 waits in step 6 for rank 1 on n1 (traced, for ", 120)
    assert "--hang-timeout" not in n1.output
    (job.directory / "go on").touch()
    job.exits(n1, 0, 120)
