"""A worker's environment: every variable that torchrun gives, NODE_RANK, and some of our own."""

import os
from collections.abc import Mapping, MutableMapping

from msgspec import UnsetType

from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.core.schema import Limits, Participant, Round
from elastic_etcd.errors import UsageError
from elastic_etcd.system.leftovers import MARK

# A training script has no business with these, and prints its environment all too often.
_SECRETS = ("ELASTIC_ETCD_PASSWORD", "ETCDCTL_PASSWORD")

_OMP, _GLOO = "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"
# Those of the two that the agent has set, with their values.
_NOT_THE_USERS = "ELASTIC_ETCD_SET"
_CPUS = "ELASTIC_ETCD_CPUS"  # on which a worker runs, if not on all (system/trampoline.py)


def forget_another_agents(env: MutableMapping[str, str]) -> None:
    """Take out what another agent has set, one of whose workers has submitted this one's job."""
    env.pop(_CPUS, None)
    for item in env.pop(_NOT_THE_USERS, "").split():
        name, _, value = item.partition("=")
        if env.get(name) == value:
            del env[name]


def without_secrets(base: Mapping[str, str]) -> dict[str, str]:
    """`base` for a child process that has nothing to do with etcd."""
    env = {name: value for name, value in base.items() if name not in _SECRETS}
    if "ETCDCTL_USER" in env:  # etcdctl takes "user:password" here
        env["ETCDCTL_USER"] = env["ETCDCTL_USER"].partition(":")[0]
    return env


def common_env(base: Mapping[str, str], local_world_size: int, mark: str) -> dict[str, str]:
    """The part that all workers of a node have in common, whatever the generation."""
    env = without_secrets(base)
    env[MARK] = mark
    env.pop("ELASTIC_ETCD_WORKER_PID", None)  # of the worker that has started this agent
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if _OMP not in env and local_world_size > 1:
        env[_OMP] = "1"
    return env


def worker_env(
    base: Mapping[str, str],
    config: AgentConfig,
    now: Round,
    part: Participant,
    limits: Limits,
    local_rank: int,
    *,
    error_file: str,
    interface: str = "",  # which has this node's address for the others; "" is not known
    socket: str = "",  # at which it finds the agent (docs/contributing/channel.md)
    activity: str = "",  # where it says what it does (protocol/activity.py)
    mark: str = "",  # by which what it leaves behind is found (system/leftovers.py)
    memory: str = "",  # its node's directory for checkpoints
    timer_file: str = "",  # where it sets torch's timers, if they are served
    cpus: str = "",  # "0,1,8": on which it is to run; "": on all that its agent has
) -> dict[str, str]:
    """The whole environment of a worker of the final round `now`, made from the agent's (`base`).

    Its node is participant `part`, `limits` are the job's. Raises UsageError when
    --virtual-local-rank finds fewer visible devices than workers.
    """
    world_size = str(now.world_size)
    role_rank = part.first_rank if isinstance(part.role_rank, UnsetType) else part.role_rank
    assert now.master is not None  # it is final
    env = common_env(base, part.nproc, mark)
    env.update(
        RANK=str(part.first_rank + local_rank),
        ROLE_RANK=str(role_rank + local_rank),
        WORLD_SIZE=world_size,
        ROLE_WORLD_SIZE=str(part.role_size or world_size),
        ROLE_NAME=config.role,
        LOCAL_RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(part.nproc),
        GROUP_RANK=str(part.group_rank),
        NODE_RANK=str(part.group_rank),  # Composer reads it
        GROUP_WORLD_SIZE=str(now.nodes),
        MASTER_ADDR=now.master.addr,
        MASTER_PORT=str(now.master.port),
        TORCHELASTIC_RUN_ID=config.job,
        TORCHELASTIC_RESTART_COUNT=str(now.restarts),
        TORCHELASTIC_MAX_RESTARTS=str(limits.max_restarts),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_ERROR_FILE=error_file,
        TORCHELASTIC_SIGNALS_TO_HANDLE=",".join(number.name for number in config.signals),
        ELASTIC_ETCD_GENERATION=str(now.generation),
        ELASTIC_ETCD_NODE=config.node,
        ELASTIC_ETCD_LOCAL_RANK=str(local_rank),  # also where LOCAL_RANK is made 0
        ELASTIC_ETCD_SOCKET=socket,
        ELASTIC_ETCD_ACTIVITY=activity,
        ELASTIC_ETCD_MEMORY=memory,
        ELASTIC_ETCD_COMPARE_EVERY=limits.compare_every,
        ELASTIC_ETCD_ON_DIVERGENCE=limits.on_divergence,
        ELASTIC_ETCD_COPIES=str(limits.copies),
        ELASTIC_ETCD_TOPOLOGY_LABEL=config.topology_label,
        ELASTIC_ETCD_LEAVE_DEADLINE=f"{limits.leave_deadline:g}",
    )
    if timer_file:
        env["TORCHELASTIC_TIMER_FILE"] = timer_file
    if cpus:
        env[_CPUS] = cpus
    if interface:
        # gloo would take that of the host's name, which may be the loopback. NCCL looks for itself.
        env.setdefault(_GLOO, interface)
    ours = [name for name in (_OMP, _GLOO) if name in env and name not in base]
    if ours:
        env[_NOT_THE_USERS] = " ".join(f"{name}={env[name]}" for name in ours)
    if config.virtual_local_rank:
        env |= {"LOCAL_RANK": "0", **_own_device(env, local_rank)}
    return env


def check_devices(config: AgentConfig) -> None:
    """Raise UsageError now for what would only show when the last worker starts."""
    if config.virtual_local_rank:
        _own_device(os.environ, config.nproc - 1)


def _own_device(env: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """The variables that leave a worker one device.

    ROCm heeds that of HIP, which counts among those of ROCR, or else that of CUDA.
    """
    cuda, hip, rocr = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
    variables = [name for name in (cuda, hip) if name in env]
    own = {} if variables else {hip if rocr in env else cuda: str(local_rank)}
    for name in variables or [name for name in (rocr,) if name in env]:
        devices = env[name].split(",")
        if local_rank >= len(devices):
            raise UsageError(
                f"--virtual-local-rank gives each worker a device of its own, but "
                f"{name}={env[name]} has none for local rank {local_rank}: "
                "make it longer or --nproc-per-node smaller"
            )
        if name in variables:
            own[name] = devices[local_rank].strip()
    return own
