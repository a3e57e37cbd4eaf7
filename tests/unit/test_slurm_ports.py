"""The ports that examples/slurm/etcd.sh takes for a job's etcd."""

import socket
import subprocess
from pathlib import Path

ETCD = Path(__file__).parents[2] / "examples" / "slurm" / "etcd.sh"


def port_of(job: int, *addresses: str) -> int:
    command = ["bash", "-euc", '. "$0"; free_port "$@"', str(ETCD), *addresses]
    env = {"SLURM_JOB_ID": str(job), "PATH": "/usr/bin:/bin", "ETCD": "etcd1:2379"}
    return int(subprocess.check_output(command, env=env, text=True))


def test_two_jobs_whose_numbers_have_the_same_end_do_not_share_ports() -> None:
    first = port_of(4711, "127.0.0.1", "127.0.0.2")
    assert first % 10 == 0
    for address, used in (("127.0.0.1", 0), ("127.0.0.2", 3)):
        with socket.create_server((address, first + used)):
            assert port_of(5711, "127.0.0.1", "127.0.0.2") > first
    assert port_of(5711, "127.0.0.1") == first
