"""A worker's environment: every variable that torchrun gives, and five of our own."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from signal import Signals

from elastic_etcd.errors import UsageError

# A training script has no business with these, and prints its environment all too often.
_SECRETS = ("ELASTIC_ETCD_PASSWORD", "ETCDCTL_PASSWORD")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GroupRanks:
    """A node's place in the world, as torch counts it; nodes may have different sizes."""

    group_rank: int
    group_world_size: int
    first_rank: int
    local_world_size: int
    world_size: int


def without_secrets(base: Mapping[str, str]) -> dict[str, str]:
    """`base` for a child process that has nothing to do with etcd."""
    env = {name: value for name, value in base.items() if name not in _SECRETS}
    if "ETCDCTL_USER" in env:  # etcdctl takes "user:password" here
        env["ETCDCTL_USER"] = env["ETCDCTL_USER"].partition(":")[0]
    return env


def common_env(base: Mapping[str, str], local_world_size: int) -> dict[str, str]:
    """What all workers of a node have in common, whatever the generation."""
    env = without_secrets(base)
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if "OMP_NUM_THREADS" not in env and local_world_size > 1:
        _tell_omp_num_threads()
        env["OMP_NUM_THREADS"] = "1"
    return env


def worker_env(
    base: Mapping[str, str],
    *,
    job: str,
    generation: int,
    node: str,
    role: str,
    local_rank: int,
    ranks: GroupRanks,
    master: tuple[str, int],
    restarts: int,
    max_restarts: int,
    virtual_local_rank: bool,
    error_file: str,
    socket: str = "",
    signals: Sequence[Signals] = (Signals.SIGTERM, Signals.SIGINT, Signals.SIGHUP, Signals.SIGQUIT),
) -> dict[str, str]:
    """The whole environment of the worker `local_rank`, made from the agent's own, `base`.

    `socket` is where it finds the agent (docs/channel.md). There is one role, so role ranks are
    the world's. `signals` are those that the agent handles (torchrun's --signals-to-handle, which
    its workers see, too).

    Raises UsageError when `virtual_local_rank` finds fewer devices in CUDA_VISIBLE_DEVICES than
    workers.
    """
    rank = str(ranks.first_rank + local_rank)
    world_size = str(ranks.world_size)
    address, port = master
    env = common_env(base, ranks.local_world_size)
    env.update(
        RANK=rank,
        ROLE_RANK=rank,
        WORLD_SIZE=world_size,
        ROLE_WORLD_SIZE=world_size,
        ROLE_NAME=role,
        LOCAL_RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(ranks.local_world_size),
        GROUP_RANK=str(ranks.group_rank),
        GROUP_WORLD_SIZE=str(ranks.group_world_size),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID=job,
        TORCHELASTIC_RESTART_COUNT=str(restarts),
        TORCHELASTIC_MAX_RESTARTS=str(max_restarts),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_ERROR_FILE=error_file,
        TORCHELASTIC_SIGNALS_TO_HANDLE=",".join(number.name for number in signals),
        ELASTIC_ETCD_JOB=job,
        ELASTIC_ETCD_GENERATION=str(generation),
        ELASTIC_ETCD_NODE=node,
        ELASTIC_ETCD_LOCAL_RANK=str(local_rank),  # also where LOCAL_RANK is made 0
        ELASTIC_ETCD_SOCKET=socket,
    )
    if virtual_local_rank:
        env["LOCAL_RANK"] = "0"
        env["CUDA_VISIBLE_DEVICES"] = _own_device(env.get("CUDA_VISIBLE_DEVICES"), local_rank)
    return env


def _own_device(visible: str | None, local_rank: int) -> str:
    if visible is None:
        return str(local_rank)
    devices = visible.split(",")
    if local_rank >= len(devices):
        raise UsageError(
            f"--virtual-local-rank gives each worker a device of its own, but "
            f"CUDA_VISIBLE_DEVICES={visible} has none for local rank {local_rank}: "
            "make it longer or --nproc-per-node smaller"
        )
    return devices[local_rank].strip()


@cache
def _tell_omp_num_threads() -> None:
    log.warning(
        "OMP_NUM_THREADS is set to 1 for each worker, as torchrun does, so that several workers "
        "don't overload this node; set it yourself to tune it"
    )
