"""What a user can get wrong: at most three lines that say what to do, and exit code 2."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

LAUNCH = [sys.executable, "-m", "elastic_etcd.launch"]


def run(
    argv: list[str],
    cwd: Path,
    command: list[str] = LAUNCH,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "ETCDCTL_"))}
    return subprocess.run(
        [*command, *argv],
        cwd=cwd,
        env=kept
        | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
        | dict(env or {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("raise SystemExit('started')")
    (tmp_path / "folder").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--nnodes 4:2 train.py", "--nnodes: 4:2: MIN is above MAX; did you mean 2:4?"),
        ("--nnodes 0 train.py", "--nnodes: 0: at least 1 node is needed to train"),
        ("--nnodes 0:2 train.py", "--nnodes: 0:2: at least 1 node is needed to train"),
        ("--nnodes abc train.py", "--nnodes: abc is neither a number nor MIN:MAX; for example"),
        ("--nnodes -1 train.py", "--nnodes: -1 is neither a number nor MIN:MAX"),
        ("--nnodes 2,4:8 train.py", "or the list 2,4,8"),
        ("--nnodes 2,4, train.py", "or the list 2,4,8"),
        ("--nnodes 0,2 train.py", "--nnodes: 0,2: at least 1 node is needed to train"),
        ("--nnodes 2,2,4 train.py", "2,2,4: each size once, from small to large: 2,4"),
        ("--nnodes 8,2,4 train.py", "8,2,4: each size once, from small to large: 2,4,8"),
        ("--nnodes 3:3 --nodes-multiple-of 2 train.py", "no multiple of 2 is from 3 to 3"),
        ("--nnodes 2,4 --nodes-multiple-of 2 train.py", "--nnodes lists all sizes"),
        ("--nodes-multiple-of 0 train.py", "--nodes-multiple-of: 0 is below 1"),
        ("--standalone --nodes-multiple-of 2 --nnodes 4 train.py", "--standalone is one node"),
        ("--nproc-per-node 0 train.py", "--nproc-per-node 0: give a number of workers"),
        ("--nproc-per-node many train.py", "--nproc-per-node many: give a number of workers"),
        ("--nproc-per-node gpu train.py", "--nproc-per-node gpu: no GPU found on this machine"),
        ("--proof-of-death no train.py", "--proof-of-death: no is neither on nor off"),
        ("--metrics-addr :9464 train.py", "--metrics-addr: :9464: say 0.0.0.0:9464 for all"),
        ("--metrics-addr a/b:1 train.py", "--metrics-addr: a/b:1 is neither PORT nor HOST:PORT"),
        ("--metrics-addr 65536 train.py", "--metrics-addr: 65536 is neither PORT nor HOST:PORT"),
        ("--advertise 0..ddp train.py", "'0..ddp': a part of the host name is empty or longer"),
        (f"--advertise {'x' * 64}.ddp train.py", "a part of the host name is empty or longer"),
        ("--metrics-addr a..b:0 train.py", "a part of the host name is empty or longer than 63"),
        ("--etcd e:1,a..b:1 train.py", "'a..b:1': a part of the host name is empty or longer"),
        ("--preemption-watch ibm train.py", "ibm is not file:PATH"),
        ("--preemption-watch file: train.py", "file: is not file:PATH"),
        ("--preemption-watch aws train.py", "aws is gone: run examples/spot/aws.py"),
        ("--job a/b train.py", "--job/--rdzv-id: 'a/b': a job id is 1 to 128 letters, digits"),
        (f"--job {'j' * 129} train.py", "a job id is 1 to 128 letters"),
        ("--job .. train.py", "a job id is 1 to 128 letters"),
        ("--prefix jobs train.py", "--prefix: 'jobs': a prefix is '/' and letters"),
        ("--prefix /jobs/ train.py", "without a '/' at its end"),
        ("--prefix /a//b train.py", "for example /elastic_etcd"),
        ("--max-restarts=-1 train.py", "--max-restarts: -1 is not a whole number of at least 0"),
        ("--max-restarts 1.5 train.py", "--max-restarts: 1.5 is not a whole number"),
        ("--lease-ttl 0 train.py", "--lease-ttl: 0 is below 1"),
        ("--settle=-2 train.py", "--settle: -2 is not a number of seconds of at least 0"),
        ("--settle 1e12 train.py", "--settle: 1e12 is not a number of seconds of at least 0"),
        ("--max-restarts 9223372036854775808 train.py", "is not a whole number of at least 0"),
        ("--join-timeout inf train.py", "--join-timeout: inf is not a number of seconds"),
        ("--rdzv-conf join_timeout=x train.py", "--join-timeout: x is not a number of seconds"),
        ("--rdzv-conf join_timeout train.py", "--rdzv-conf: join_timeout is not KEY=VALUE"),
        ("--redirects 4 train.py", "--redirects: 4: give 0 none, 1 stdout, 2 stderr or 3 both"),
        ("-t 0:9 train.py", "--tee: 0:9: give 0 none"),
        ("--local-ranks-filter a train.py", "a is not a list of local ranks like 0,1,2"),
        ("--signals-to-handle SIGHI train.py", "SIGHI: not all are names of signals"),
        (
            "--hang-timeout 5x train.py",
            "5x is neither a number of seconds, such as 60, nor auto or",
        ),
        ("--etcd= train.py", "--etcd/--rdzv-endpoint: its value is empty"),
        ("--role= train.py", "--role: its value is empty"),
        ("--log-dir= train.py", "--log-dir: its value is empty"),
        ("--log-level loud train.py", "give one of debug, info, warning"),
        ("--etcd e:1 --nnodes 2 train.py", "Add --job ID, the same on every node"),
        ("--standalone --nnodes 2 train.py", "--standalone is one node"),
        ("--nnodes 2 --master-addr h train.py", "--master-addr h: nodes meet through etcd here"),
        ("--etcd e:notaport train.py", "notaport"),
        ("", "no script given"),
        ("nothere.py", "nothere.py: no such training script (looked from "),
        (f"{'x' * 300}.py", ".py: the training script cannot be read: File name too long"),
        ("folder", "folder: is a directory, not a training script"),
        ("--no-python nothere", "nothere: no such program, or not executable (--no-python)"),
        ("--no-python -m train", "--no-python and --module exclude each other"),
        ("--log-dir train.py/logs train.py", "--log-dir train.py/logs: cannot be written to: Not"),
        ("--log-dir /proc/logs train.py", "--log-dir /proc/logs: cannot be written to: "),
        ("--leese-ttl 5 train.py", "unrecognized arguments: --leese-ttl (did you mean --lease-"),
        ("--nprocs 5 train.py", "--nprocs (did you mean --nproc-per-node?)"),
        ("--nproc_per_nod=2 --max_restart 2 --xyzzy train.py", "--xyzzy"),
        ("--node 1 train.py", "ambiguous option: --node could match"),
    ],
)
def test_user_error(directory: Path, argv: str, message: str) -> None:
    done = run(argv.split(), directory)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) <= 3
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write and read everywhere")
def test_permission_denied(directory: Path) -> None:
    (directory / "folder").chmod(0o500)
    (directory / "train.py").chmod(0o000)
    assert "Permission denied" in run(["--log-dir", "folder/x", "train.py"], directory).stderr
    assert "cannot be read" in run(["train.py"], directory).stderr


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"PET_NNODES": "2:1"}, "PET_NNODES=2:1 in the environment: 2:1: MIN is above MAX"),
        ({"PYTHON_EXEC": "/no/python"}, "PYTHON_EXEC=/no/python: no such program"),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "x"}, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT: x is not"),
    ],
)
def test_error_in_the_environment(directory: Path, env: dict[str, str], message: str) -> None:
    done = run(["train.py"], directory, env=env)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert len(done.stderr.splitlines()) <= 3


def test_no_descriptor_is_left_for_the_agent(directory: Path) -> None:
    limited = ["sh", "-c", 'ulimit -n 32; exec "$@"', "sh", *LAUNCH]
    done = run(["--no-python", "true"], directory, limited)
    assert done.returncode == 2, done.stderr
    assert "]: error: Too many open files: an agent needs more than 64, this " in done.stderr
    assert "process may have 32 (ulimit -Hn).\n" in done.stderr
    assert len(done.stderr.splitlines()) <= 3


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a mount namespace")
def test_no_proc(directory: Path) -> None:
    hidden = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc; exec "$@"', "sh"]
    done = run(["--no-python", "true"], directory, [*hidden, *LAUNCH])
    assert done.returncode == 2, done.stderr
    assert "]: error: no /proc, " in done.stderr
    assert len(done.stderr.splitlines()) <= 3


def test_help_teaches(directory: Path) -> None:
    done = run(["--help"], directory, env={"COLUMNS": "100"})
    assert done.returncode == 0
    for word in (
        "--nnodes MIN[:MAX]",
        "(default: 5)",
        "examples:",
        "exit codes:",
        "budget used up",
    ):
        assert word in done.stdout
    assert not re.search(r"--[a-z]+_[a-z]", done.stdout)  # the underscore forms are not shown


def test_console_script(directory: Path) -> None:
    cli = [sys.executable, "-m", "elastic_etcd"]
    assert re.fullmatch(r"elastic-etcd \d+\.\d+.*\n", run(["--version"], directory, cli).stdout)
    assert "elastic-etcd status" in run([], directory, cli).stdout
    assert "elastic-etcd launch [options]" in run(["launch", "-h"], directory, cli).stdout
    wrong = run(["lunch"], directory, cli)
    assert (wrong.returncode, wrong.stderr.startswith("error: lunch: no such")) == (2, True)
