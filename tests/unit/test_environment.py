"""What a worker finds in its environment, compared with what a real torchrun gives."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from elastic_etcd.agent import environment
from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.environment import forget_another_agents, without_secrets, worker_env
from elastic_etcd.core.schema import Limits, Master, Participant, Phase, Round
from elastic_etcd.errors import UsageError

PART = Participant(0xB, "host-1", 2, 1, 4)  # beside two nodes with 4 and 3 workers
NOW = Round(7, Phase.FINAL, 0xA, "why", "run", "host-0", 3, 9, Master("10.0.0.1", 1234), restarts=2)
CONFIG = AgentConfig(None, "j", ("train",), "host-a", 2, Limits(1, 3), role="trainer")


def env(
    base: dict[str, str] | None = None,
    *,
    local_rank: int = 1,
    virtual: bool = False,
    timer_file: str = "",
    interface: str = "",
    cpus: str = "",
) -> dict[str, str]:
    return worker_env(
        base or {},
        replace(CONFIG, virtual_local_rank=virtual),
        NOW,
        PART,
        CONFIG.limits,
        local_rank,
        error_file="/tmp/error.json",
        socket="@agent",
        activity="/proc/1/fd/9",
        mark="1:2:host-a@j",
        memory="/dev/shm/memory",
        timer_file=timer_file,
        interface=interface,
        cpus=cpus,
    )


def test_where_torchs_timers_are_served() -> None:
    assert env({"TORCHELASTIC_TIMER_FILE": "/own"})["TORCHELASTIC_TIMER_FILE"] == "/own"
    served = env({"TORCHELASTIC_TIMER_FILE": "/own"}, timer_file="/served")
    assert served["TORCHELASTIC_TIMER_FILE"] == "/served"


def test_every_variable() -> None:
    assert env({"HOME": "/root", "RANK": "77", "LOCAL_RANK": "78"}) == {
        "HOME": "/root",
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "9",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "NODE_RANK": "1",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_RANK": "5",
        "ROLE_WORLD_SIZE": "9",
        "ROLE_NAME": "trainer",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
        "OMP_NUM_THREADS": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "j",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/tmp/error.json",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "ELASTIC_ETCD_GENERATION": "7",
        "ELASTIC_ETCD_NODE": "host-a",
        "ELASTIC_ETCD_LOCAL_RANK": "1",
        "ELASTIC_ETCD_SOCKET": "@agent",
        "ELASTIC_ETCD_ACTIVITY": "/proc/1/fd/9",
        "ELASTIC_ETCD_COMPARE_EVERY": "auto",
        "ELASTIC_ETCD_ON_DIVERGENCE": "report",
        "ELASTIC_ETCD_COPIES": "2",
        "ELASTIC_ETCD_TOPOLOGY_LABEL": "",
        "ELASTIC_ETCD_LEAVE_DEADLINE": "30",
        "ELASTIC_ETCD_MEMORY": "/dev/shm/memory",
        "ELASTIC_ETCD_AGENT": "1:2:host-a@j",
        "ELASTIC_ETCD_SET": "OMP_NUM_THREADS=1",
    }


def test_p1_where_nodes_have_several_roles_each_has_ranks_of_its_own() -> None:
    part = structs.replace(PART, role_rank=3, role_size=5)
    found = worker_env({}, CONFIG, NOW, part, CONFIG.limits, 1, error_file="")
    told = [found[f"{name}{what}"] for name in ("", "ROLE_") for what in ("RANK", "WORLD_SIZE")]
    assert told == ["5", "9", "4", "5"]


@pytest.mark.nightly(part="jobs")
def test_torchrun_sets_nothing_else(tmp_path: Path) -> None:
    script = tmp_path / "dump.py"
    script.write_text("import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))")
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCH", "PET_", "ELASTIC_ETCD_"))
    }
    plain.pop("OMP_NUM_THREADS", None)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node=2", "--log-dir", str(tmp_path), str(script)]

    def dump(*command: str) -> dict[str, str]:
        out = tmp_path / "environment.json"
        subprocess.run([*command, str(out)], env=plain, check=True, capture_output=True)
        found: dict[str, str] = json.loads(out.read_text())
        return found

    ours = env(plain, local_rank=0)
    # What importing torch in torchrun's own process leaves behind is not torchrun's to give.
    imported = dump(sys.executable, "-c", f"import torch; exec(open({str(script)!r}).read())")
    theirs = dump(*torchrun)
    assert set(theirs) - set(imported) <= set(ours)  # an older torch gives fewer
    for same in (
        "OMP_NUM_THREADS",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "TORCHELASTIC_SIGNALS_TO_HANDLE",
        "TORCHELASTIC_USE_AGENT_STORE",
    ):
        assert theirs[same] == ours[same]


def test_m19_what_an_agent_has_set_is_not_the_users_in_a_job_that_its_worker_submits() -> None:
    other = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    submitted = env(interface="eth0")
    assert submitted | other == submitted
    environment.forget_another_agents(submitted)
    assert not submitted.keys() & {*other, "ELASTIC_ETCD_SET"}
    assert env(submitted, interface="ib0")["GLOO_SOCKET_IFNAME"] == "ib0"
    users = {"OMP_NUM_THREADS": "8", "GLOO_SOCKET_IFNAME": "ib1"}
    for its in (env(users, interface="eth0"), env(interface="eth0") | users):
        environment.forget_another_agents(its)
        assert its | users == its, "given to the agent, or set by what its worker submits"


def test_what_the_user_set_stays() -> None:
    mine = env({"OMP_NUM_THREADS": "8", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"})
    assert (mine["OMP_NUM_THREADS"], mine["TORCH_NCCL_ASYNC_ERROR_HANDLING"]) == ("8", "3")


def test_one_worker_may_use_every_core() -> None:
    found = worker_env(
        {}, CONFIG, NOW, Participant(1, "n", 1, 0, 0), CONFIG.limits, 0, error_file=""
    )
    assert "OMP_NUM_THREADS" not in found


def test_secrets_stay_with_the_agent() -> None:
    base = {
        "ELASTIC_ETCD_PASSWORD": "s3cret",
        "ETCDCTL_PASSWORD": "s3cret",
        "ETCDCTL_USER": "root:s3cret",
        "ETCDCTL_ENDPOINTS": "a:1",
    }
    assert "s3cret" not in str(env(base))
    assert without_secrets(base) == {"ETCDCTL_USER": "root", "ETCDCTL_ENDPOINTS": "a:1"}
    assert base["ETCDCTL_USER"] == "root:s3cret"


@pytest.mark.parametrize(
    ("visible", "device"), [(None, "1"), ("4,6", "6"), ("GPU-a, GPU-b,GPU-c", "GPU-b")]
)
def test_a_virtual_local_rank_sees_one_device(visible: str | None, device: str) -> None:
    base = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = env(base, virtual=True)
    assert (found["LOCAL_RANK"], found["CUDA_VISIBLE_DEVICES"]) == ("0", device)
    assert found["RANK"] == "5"
    assert env(base).get("CUDA_VISIBLE_DEVICES") == visible


@pytest.mark.parametrize(
    ("base", "own"),
    [
        ({"HIP_VISIBLE_DEVICES": "4,6"}, {"HIP_VISIBLE_DEVICES": "6"}),
        ({"ROCR_VISIBLE_DEVICES": "4,6"}, {"HIP_VISIBLE_DEVICES": "1"}),
        (
            {"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "2,3"},
            {"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "3"},
        ),
    ],
)
def test_f11_a_virtual_local_rank_sees_one_device_of_rocm(
    base: dict[str, str], own: dict[str, str]
) -> None:
    """HIP's variable counts before CUDA's: all workers would share its first device."""
    found = env(base, virtual=True)
    named = {name: found[name] for name in found if "_VISIBLE_" in name}
    assert named == base | own


def test_f11_the_cpus_of_a_worker_are_not_those_of_a_job_that_it_submits() -> None:
    given = env(cpus="0,1")
    assert given["ELASTIC_ETCD_CPUS"] == "0,1"
    forget_another_agents(given)
    assert "ELASTIC_ETCD_CPUS" not in env(given)


@pytest.mark.parametrize("name", ["CUDA", "HIP", "ROCR"])
def test_more_workers_than_visible_devices_is_told(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}_VISIBLE_DEVICES=4 "):
        env({f"{name}_VISIBLE_DEVICES": "4"}, virtual=True)


def test_g4_gloo_uses_the_interface_that_has_this_node_s_address() -> None:
    """Else that of the host's name, which is 127.0.1.1 on a Debian: no other node reaches it."""

    def given(base: dict[str, str], interface: str) -> str | None:
        found = worker_env(
            base, CONFIG, NOW, PART, CONFIG.limits, 0, error_file="", interface=interface
        )
        return found.get("GLOO_SOCKET_IFNAME")

    assert given({}, "eth7") == "eth7"
    assert given({"GLOO_SOCKET_IFNAME": "ib0"}, "eth7") == "ib0"
    assert given({}, "") is None
