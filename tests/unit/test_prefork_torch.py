"""What torch does in processes of its own, threads and compilers works in a forked worker."""

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.prefork import BothWays

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BothWays]:
    with BothWays(tmp_path_factory.mktemp("prefork")) as ways:
        yield ways


def printed(ways: BothWays, text: str) -> str:
    done = ways.fork(ways.script(text))
    assert done.code == 0, done.err
    return done.out


@pytest.mark.parametrize(
    "method",
    ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.nightly(part="forks"))],
)
def test_multiprocessing(ways: BothWays, method: str) -> None:
    text = f"""\
import torch.multiprocessing as mp

class Sent:
    def __init__(self, tensor):
        self.tensor = tensor

def double(queue, seen, sent):
    queue.put(Sent(sent.tensor * 2))
    seen.wait()  # its memory is the sender's

if __name__ == "__main__":
    import torch
    torch.ones(300, 300) @ torch.ones(300, 300)  # threads, where there are any
    context = mp.get_context({method!r})
    queue = context.SimpleQueue()
    seen = context.Event()
    child = context.Process(target=double, args=(queue, seen, Sent(torch.arange(3))))
    child.start()
    print(queue.get().tensor.tolist())
    seen.set()
    child.join()
    print(child.exitcode)
"""
    assert printed(ways, text) == "[0, 2, 4]\n0\n"


@pytest.mark.nightly(part="forks")
def test_spawned_processes_report_their_failure(ways: BothWays) -> None:
    text = """\
import torch.multiprocessing as mp

def fail(rank):
    if rank == 1:
        raise ValueError("of one")

if __name__ == "__main__":
    mp.spawn(fail, nprocs=2)
"""
    done = ways.fork(ways.script(text))
    assert done.code == 1
    assert "ValueError: of one" in done.err


def test_data_loader_workers(ways: BothWays) -> None:
    text = """\
import torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self): return 8
    def __getitem__(self, i): return torch.tensor(i * i), torch.initial_seed()

if __name__ == "__main__":
    for context in ("fork", "spawn"):
        found = list(DataLoader(Squares(), batch_size=2, num_workers=2,
                                multiprocessing_context=context))
        print(torch.cat([x for x, _ in found]).tolist())
        print(len({int(seed) for _, seeds in found for seed in seeds}))
"""
    assert printed(ways, text) == "[0, 1, 4, 9, 16, 25, 36, 49]\n2\n" * 2


def test_a_training_that_would_begin_once_more_in_a_process_of_its_own_is_refused(
    ways: BothWays,
) -> None:
    """A fork server of multiprocessing's would join the world: it has no parent_process()."""
    text = """
import multiprocessing
import elastic_etcd as ee

@ee.run
def train(state):
    child = multiprocessing.get_context("spawn").Process(target=print)
    child.start()
    child.join()
    print(child.exitcode)

train(ee.ElasticState(epoch=0))
"""
    done = ways.fork(ways.script(text))
    assert (done.code, done.out) == (0, "1\n"), done.err
    assert 'Put what begins the training under `if __name__ == "__main__":`' in done.err


@pytest.mark.parametrize(
    "backend",
    ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.nightly(part="forks"))],
)
def test_compile(ways: BothWays, backend: str) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    text = f"""\
import torch

@torch.compile(backend={backend!r})
def f(x):
    return torch.sin(x) + 1

x = torch.arange(8.0, requires_grad=True)
f(x).sum().backward()
print(torch.allclose(x.grad, torch.cos(x)))
"""
    assert printed(ways, text) == "True\n"


def test_distributed_training(ways: BothWays) -> None:
    text = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
model(torch.ones(2, 4)).sum().backward()
print(next(model.parameters()).grad.tolist())
dist.destroy_process_group()
"""
    assert printed(ways, text) == "[[2.0, 2.0, 2.0, 2.0]]\n"


@pytest.mark.parametrize(
    "start", ["fork", pytest.param("scripted", marks=pytest.mark.nightly(part="forks"))]
)
def test_a_module_that_outlives_its_group_frees_its_reducer_first(
    ways: BothWays, start: str
) -> None:
    """A reducer that has the last reference to a group may wait for ever for gloo's threads."""
    text = """\
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

class Watched(DistributedDataParallel):
    def __del__(self):
        super().__del__()
        print(vars(self).keys() & {"logger", "process_group", "reducer"})

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
module = Watched(torch.nn.Linear(2, 1))
dist.destroy_process_group()
del module
"""
    assert getattr(ways, start)(ways.script(text)).out == "{'process_group'}\n"


@pytest.mark.parametrize("start", ["fork", "scripted"])
def test_f8_p3_rank_0_serves_at_a_port_of_the_script_s_own(ways: BothWays, start: str) -> None:
    """The agent's store is at MASTER_PORT only, and clients look for any for half an hour."""
    with socket.create_server(("127.0.0.1", 0)) as agents, socket.create_server(("", 0)) as free:
        master, port = agents.getsockname()[1], free.getsockname()[1]
    text = f"""\
import datetime
import torch.distributed as dist

for port in ({port}, {master}):
    where, soon = f"tcp://127.0.0.1:{{port}}", datetime.timedelta(seconds=2)
    try:
        dist.init_process_group("gloo", where, rank=0, world_size=1, timeout=soon)
        print("served")
        dist.destroy_process_group()
    except dist.DistNetworkError:
        print("left to the agent")
"""
    env = ways.env | {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(master)}
    assert getattr(ways, start)(ways.script(text), env).out == "served\nleft to the agent\n"


def test_nothing_touches_cuda_before_the_worker_does(ways: BothWays) -> None:
    text = """\
import os, torch
print(torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork(),
      any(os.path.realpath(f"/proc/self/fd/{n}") == "/dev/nvidia-uvm"
          for n in os.listdir("/proc/self/fd")))
pid = os.fork()  # a question must not have broken it for a fork, either
if pid == 0:
    os._exit(torch.cuda._is_in_bad_fork())
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    ways.same(ways.script(text))


def test_cuda_begins_in_a_worker(ways: BothWays) -> None:
    if not Path("/dev/nvidiactl").exists():
        pytest.skip("no GPU")
    probe = ways.exec(ways.script("import torch; print(torch.cuda.is_available())"))
    if probe.out != "True\n":
        pytest.skip("no GPU")
    text = """\
import torch
x = torch.ones(4, device="cuda", requires_grad=True)
(x * 2).sum().backward()
print(x.grad.tolist(), torch.cuda.device_count() > 0)
"""
    assert printed(ways, text) == "[2.0, 2.0, 2.0, 2.0] True\n"
