"""A real DDP worker on a tiny model that logs all it does and fails as its command line declares.

One JSONL file per process: `start` before torch is imported, `ready` when the process group
stands, `step` after each optimizer step, `end` on the way out. Rank 0 saves after each step, so
that training goes on after a restart.
"""

import argparse
import atexit
import contextlib
import gc
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

GENERATION = int(os.environ["ELASTIC_ETCD_GENERATION"])
NODE = os.environ["ELASTIC_ETCD_NODE"]
RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])


@dataclass(frozen=True)
class Fault:
    """What goes wrong, in which process, and after how many of its own steps.

    Written as `do@name=value,...`, for example `exit:7@rank=1,generation=1,step=3`; what is not
    named matches everything. `do` is one of raise, linger-raise (its connections close a while
    before it exits), exit:CODE, kill, talk (a megabyte), chatter (two megabytes a second from
    then on), or at step 0 only ignore-term, linger (a
    child in the worker's process group holds its pipes), daemon (a child in a session of its own
    does), kept (one that is to outlive the worker).
    """

    do: str
    step: int = 0
    rank: int | None = None
    generation: int | None = None
    node: str | None = None

    @staticmethod
    def parse(text: str) -> "Fault":
        do, _, where = text.partition("@")
        named = dict(re.findall(r"(\w+)=([^,]+)", where))
        node = named.pop("node", None)
        return Fault(do, node=node, **{name: int(value) for name, value in named.items()})

    def here(self, step: int) -> bool:
        return (
            self.step == step
            and self.rank in (None, RANK)
            and self.generation in (None, GENERATION)
            and self.node in (None, NODE)
        )

    def happen(self) -> None:
        match self.do.partition(":"):
            case "raise" | "linger-raise", _, _:
                if self.do == "linger-raise":
                    atexit.register(hang_up)
                raise RuntimeError(f"declared fault of rank {RANK} in generation {GENERATION}")
            case "exit", _, code:
                os._exit(int(code))
            case "kill", _, _:
                os.kill(os.getpid(), signal.SIGKILL)
            case "talk", _, _:
                print(("x" * 99 + "\n") * 10_000, flush=True)
            case "chatter", _, _:
                threading.Thread(target=chatter, daemon=True).start()
            case "ignore-term", _, _:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            case "linger" | "daemon" | "kept", _, _:
                env = os.environ | ({"ELASTIC_ETCD_AGENT": ""} if self.do == "kept" else {})
                own_session = self.do != "linger"
                subprocess.Popen(["sleep", "600"], start_new_session=own_session, env=env)
            case _:
                raise ValueError(f"no such fault: {self.do}")


def happen(faults: list[Fault], step: int) -> None:
    """What is declared for after so many steps of this process."""
    for fault in faults:
        if fault.here(step):
            fault.happen()


def chatter() -> None:
    """Print without Python's buffers, which a daemon thread must not hold at exit."""
    lines = (b"x" * 99 + b"\n") * 1000
    while True:
        os.write(1, lines)
        time.sleep(0.05)


def hang_up() -> None:
    """End every connection of this process, a while before itself."""
    for fd in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(fd.name))) as connection:
            connection.getpeername()  # gloo does not bear the end of a listener
            connection.shutdown(socket.SHUT_RDWR)
    time.sleep(1)
    os._exit(1)  # the end of the interpreter may take long on a busy machine


class Log:
    """This process's JSONL file; a line is in the file when `write` returns."""

    def __init__(self, directory: Path) -> None:
        name = f"{NODE}.g{GENERATION}.r{RANK}.{os.getpid()}.jsonl"
        self._file = (directory / name).open("a", buffering=1)

    def write(self, event: str, **more: Any) -> None:
        fields = {
            "event": event,
            "time": time.time(),
            "generation": GENERATION,
            "rank": RANK,
            "world_size": WORLD_SIZE,
            "local_rank": int(os.environ["LOCAL_RANK"]),
            "group_rank": int(os.environ["GROUP_RANK"]),
            "node": NODE,
            "pid": os.getpid(),
            "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
            "master": f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        }
        self._file.write(json.dumps(fields | more) + "\n")


def born(pid: int) -> int | None:
    """When the process started, in clock ticks; None when it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if stat[0] in "ZX" else int(stat[19])


def older_workers_alive(directory: Path) -> list[int]:
    """Workers of this node's other generations that live now: I3 says there are none."""
    alive = []
    for path in directory.glob(f"{NODE}.g*.jsonl"):
        first = path.read_text().partition("\n")[0]
        start = json.loads(first) if first else {"generation": GENERATION}
        if start["generation"] != GENERATION and born(start["pid"]) == start["born"]:
            alive.append(start["pid"])
    return alive


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True, help="of the logs and the checkpoint")
    parser.add_argument("--steps", type=int, default=10**9, help="train up to this step, exit 0")
    parser.add_argument("--step-time", type=float, default=0.03, help="what a step computes for")
    parser.add_argument("--fault", type=Fault.parse, action="append", default=[])
    return parser.parse_args()


def train(args: argparse.Namespace, log: Log) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (RANK, WORLD_SIZE)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    checkpoint, stop = args.dir / "checkpoint.pt", args.dir / "stop"
    done = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        done = saved["step"]
    # Ranks that read the file at different moments agree on what rank 0 has.
    agreed = torch.tensor([done])
    dist.broadcast(agreed, src=0)
    ddp = DistributedDataParallel(model)
    log.write("ready", step=int(agreed))

    first = int(agreed)
    for step in range(first + 1, args.steps + 1):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step * 100 + RANK))
        optimizer.zero_grad()
        loss = (ddp(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
        loss.backward()
        optimizer.step()
        time.sleep(args.step_time)
        log.write("step", step=step, loss=loss.item())
        if RANK == 0:
            save(checkpoint, {"model": model.state_dict(), "step": step})
        happen(args.fault, step - first)
        asked = torch.tensor([int(stop.exists())])
        dist.all_reduce(asked)
        if asked:
            break


def save(checkpoint: Path, values: dict[str, Any]) -> None:
    """Save it, unless a later generation has: a node that wakes may train for milliseconds."""
    import torch

    saver = checkpoint.with_suffix(".generation")
    if saver.exists() and int(saver.read_text()) > GENERATION:
        return
    for path, write in ((saver, write_generation), (checkpoint, partial(torch.save, values))):
        aside = path.with_suffix(f".{os.getpid()}")
        write(aside)
        aside.replace(path)


def write_generation(path: Path) -> None:
    path.write_text(str(GENERATION))


def finish() -> None:
    """Collect DDP's reference cycles: a gloo group that they keep aborts the process at exit."""
    import torch.distributed as dist

    gc.collect()
    dist.destroy_process_group()


def main() -> None:
    args = arguments()
    log = Log(args.dir)
    overlap = older_workers_alive(args.dir)
    log.write("start", born=born(os.getpid()), overlap=overlap, agent=os.getppid())
    happen(args.fault, step=0)
    train(args, log)
    finish()
    log.write("end")


if __name__ == "__main__":
    main()
