"""The programs that users run first: the demo, and small scripts at a terminal."""

import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from tests.support.etcd import EtcdServer
from tests.support.job import ROOT

pytestmark = pytest.mark.timeout(600)


def run(*argv: str) -> str:
    """What a Python program prints; it must exit 0."""
    done = subprocess.run(
        [sys.executable, *argv],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.nightly(part="jobs")
def test_demo() -> None:
    told = run(str(ROOT / "scripts" / "demo.py"))
    assert "green is killed" in told
    assert "the agents exited 0 and 0" in told


@pytest.mark.parametrize("disposition", ["SIG_DFL", "SIG_IGN"])
def test_the_terminal_s_end(disposition: str) -> None:
    """SIGHUP makes a node leave, but not under nohup, which has it ignored."""
    begin = f"import os, signal, sys; signal.signal(signal.SIGHUP, signal.{disposition})"
    begin += "; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    agent = ("-m", "elastic_etcd.launch", "--no-python", "sh", "-c", "kill -HUP $PPID")
    done = subprocess.run(
        [sys.executable, "-c", begin, *agent],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    left = disposition == "SIG_DFL"
    assert ("SIGHUP: leaving" in done.stderr) == left, done.stderr
    assert done.returncode == (128 + signal.SIGHUP if left else 0)


LEAVES = """
import os, signal, time
if {number}: signal.signal({number}, lambda *_: print("got", {number}, flush=True) or os._exit(0))
try:
    os.kill(os.getppid(), {number} or signal.SIGINT)
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize(("number", "told"), [(0, "interrupted"), (signal.SIGUSR1, "got 10")])
def test_f4_a_worker_gets_the_signal_on_which_its_node_leaves(number: int, told: str) -> None:
    agent = ("-m", "elastic_etcd.launch", "--signals-to-handle", "SIGINT,SIGUSR1", "--no-python")
    done = subprocess.run(
        [sys.executable, *agent, sys.executable, "-c", LEAVES.format(number=int(number))],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert told in done.stdout, done.stderr
    assert done.returncode == 128 + (number or signal.SIGINT)


@pytest.mark.parametrize("method", ["prefork", "exec"])
def test_m5_a_failure_is_one_although_sigchld_was_ignored(tmp_path: Path, method: str) -> None:
    """By `trap '' CHLD`, or an old daemon, that has started the agent: exit codes are lost then."""
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(7)")
    begin = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    begin += "; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    agent = ("-m", "elastic_etcd.launch", "--start-method", method, "--max-restarts", "0")
    done = subprocess.run(
        [sys.executable, "-c", begin, *agent, str(script)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode != 0
    assert "rank 0 on" in done.stderr
    assert "exited 7" in done.stderr or "exit code 7" in done.stderr, done.stderr


def test_m5_an_agent_whose_starter_has_blocked_signals_leaves_by_sigterm(tmp_path: Path) -> None:
    """Its worker has none blocked either."""
    blocked = tmp_path / "blocked"
    worker = f"grep SigBlk /proc/self/status > {blocked}.new; mv {blocked}.new {blocked}; sleep 60"
    begin = "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])"
    begin += "; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    agent = ("-m", "elastic_etcd.launch", "--no-python", "sh", "-c", worker)
    command = [sys.executable, "-c", begin, *agent]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}) as launched:
        try:
            deadline = time.monotonic() + 60
            while not blocked.exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            assert int(blocked.read_text().split()[1], 16) == 0
            launched.terminate()
            assert launched.wait(60) == 128 + signal.SIGTERM
        finally:
            launched.kill()


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "<&- >&-"])
def test_closed_standard_streams(closed: str) -> None:
    """Nothing else may get their numbers, or a worker's output goes there and is stuck."""
    worker = "import sys; [print('x' * 4000, file=f) for f in (sys.stdout, sys.stderr) * 500]"
    agent = (sys.executable, "-m", "elastic_etcd.launch", "--no-python", sys.executable)
    shell = f'exec {closed}; exec "$@"'
    subprocess.run(
        ["sh", "-c", shell, "sh", *agent, "-c", worker],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
        timeout=60,
    )


AS_PID_1 = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable)
as_pid_1 = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs a PID namespace"
)
ORPHANS = """
import pathlib, subprocess, sys, time
for _ in range(5):
    subprocess.run(["sh", "-c", "(exec sleep 0.3 &)"], check=True)

def zombies():
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        found += [stat] if (state, parent) == ("Z", "1") else []
    return found

time.sleep(2)
deadline = time.monotonic() + 20
while zombies() and time.monotonic() < deadline:
    time.sleep(0.1)
print("zombies left:", len(zombies()), flush=True)
sys.exit(7)
"""


@as_pid_1
def test_r17_no_zombies_are_left_where_the_agent_is_the_first_process(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ORPHANS)
    agent = ("-m", "elastic_etcd.launch", "--start-method=exec", "--max-restarts=0", str(script))
    done = subprocess.run(
        [*AS_PID_1, *agent],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "zombies left: 0" in done.stdout, done.stdout + done.stderr
    assert "exited 7" in done.stderr, "the agent has the exit codes of its own children"
    assert done.returncode == 1


@as_pid_1
def test_r17_the_first_process_hands_signals_on() -> None:
    agent = ("-m", "elastic_etcd.launch", "--no-python", "sh", "-c", "kill -TERM 1; sleep 1000")
    done = subprocess.run(
        [*AS_PID_1, *agent],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.count("SIGTERM: leaving") == 1, done.stderr
    assert done.returncode == 143


@as_pid_1
def test_the_first_process_may_have_no_stdout() -> None:
    agent = (*AS_PID_1, "-m", "elastic_etcd.launch", "--no-python", "true")
    subprocess.run(
        ["bash", "-c", 'exec "$@" >&-', "bash", *agent],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
        timeout=60,
    )


def test_a_folder_of_our_name(tmp_path: Path) -> None:
    """`python -m` puts the working directory first: a clone's parent, say."""
    (tmp_path / "elastic_etcd").mkdir()
    agent = ("-m", "elastic_etcd.launch", "--no-python", "true")
    subprocess.run([sys.executable, *agent], cwd=tmp_path, check=True, timeout=60)


class Terminal:
    """A terminal, as a user has it, and what stands on it."""

    def __init__(self) -> None:
        self._own, self.theirs = os.openpty()
        self._shown = ""

    def shows(self, text: str, seconds: float = 60) -> None:
        """Wait until it does, after what was waited for before."""
        deadline = time.monotonic() + seconds
        while text not in self._shown:
            ready, _, _ = select.select([self._own], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{text!r} is not among {self._shown!r}"
            self._shown += os.read(self._own, 65536).decode(errors="replace")
        self._shown = self._shown.partition(text)[2]

    def type(self, line: str) -> None:
        os.write(self._own, f"{line}\n".encode())

    def close(self) -> None:
        os.close(self._own)
        os.close(self.theirs)


@pytest.mark.parametrize("method", ["prefork", "exec"])
def test_r24_the_only_worker_of_a_job_is_debugged_at_the_terminal(
    tmp_path: Path, method: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text("loss = 41\nprint('before', end='')\nbreakpoint()\nprint('loss is', loss)\n")
    terminal = Terminal()
    command = (sys.executable, "-m", "elastic_etcd.launch", "--start-method", method, str(script))
    agent = subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=terminal.theirs,
        stdout=terminal.theirs,
        stderr=terminal.theirs,
        start_new_session=True,
    )
    try:
        terminal.shows("before")  # though its line has no end yet
        terminal.shows("(Pdb) ")
        terminal.type("loss += 1")
        terminal.shows("(Pdb) ")
        terminal.type("continue")
        terminal.shows("loss is 42")
        terminal.shows("succeeded")
        assert agent.wait(60) == 0
    finally:
        agent.kill()
        agent.wait()
        terminal.close()


def test_torchrun_s_prefix_of_lines() -> None:
    agent = ("-m", "elastic_etcd.launch", "--role", "trainer", "--no-python", "echo", "hello")
    template = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name}/${rank}> "}
    done = subprocess.run(
        [sys.executable, *agent],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | template,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "<trainer/0> hello\n"


@pytest.mark.parametrize(
    ("nodes", "told"),
    [
        (["--nnodes=1"], {"got a", "got b"}),
        (["--nnodes=1:2"], {"got nothing"}),
        (["--standalone", "--nnodes=1:2"], {"got a", "got b"}),
    ],
    ids=" ".join,
)
def test_f6_stdin_is_handed_on_with_one_node(nodes: list[str], told: set[str]) -> None:
    agent = ("-m", "elastic_etcd.launch", *nodes, "--settle=0", "--nproc-per-node=2")
    done = subprocess.run(
        [sys.executable, *agent, "--no-python", "sh", "-c", "read x || x=nothing; echo got $x"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        input="a\nb\n",
        timeout=60,
    )
    assert {line.partition(": ")[2] for line in done.stdout.splitlines()} == told
    assert ("stdin is not handed on" in done.stderr) == ("nothing" in str(told))


def test_r24_the_root_cause_is_in_the_agent_s_own_error_file(tmp_path: Path) -> None:
    """As torchrun does it for who has started it (TorchX), and as torch reads it."""
    script, file = tmp_path / "train.py", tmp_path / "error.json"
    script.write_text("raise ValueError('a mistake')")
    agent = ("-m", "elastic_etcd.launch", "--start-method=exec", "--max-restarts=0", str(script))
    done = subprocess.run(
        [sys.executable, *agent],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TORCHELASTIC_ERROR_FILE": str(file)},
        check=False,
    )
    assert done.returncode == 1
    failure = ProcessFailure(0, 1, 1, str(file))
    assert failure.timestamp > 0
    told = failure.message
    assert isinstance(told, dict)
    assert (told["message"], told["errorCode"]) == ("ValueError: a mistake", 1)  # P8
    assert told["extraInfo"]["py_callstack"].startswith("Traceback (most recent call last):")


@pytest.mark.nightly(part="jobs")
def test_t19_what_a_script_sets_before_it_imports_torch_counts_as_under_torchrun(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os\n"
        "os.environ['TORCH_DISTRIBUTED_DEBUG'] = 'DETAIL'\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print('level', dist.get_debug_level().name, 'of rank', os.environ['RANK'])\n"
        "dist.destroy_process_group()\n"
    )
    told = run("-m", "elastic_etcd.launch", "--nproc-per-node", "2", str(script))
    assert "level DETAIL of rank 0" in told
    assert "level DETAIL of rank 1" in told
    assert "changes TORCH_DISTRIBUTED_DEBUG before" in told


def test_g4_workers_are_told_the_interface_of_the_advertised_address() -> None:
    command = ("--no-python", "sh", "-c", "echo gloo uses $GLOO_SOCKET_IFNAME.")
    assert "gloo uses lo." in run("-m", "elastic_etcd.launch", "--advertise", "127.0.0.1", *command)


# The repository may lie in a place that a test hides: it is seen here, too.
HELD = Path("/mnt")
OWN_PYTHON = Path(sys.executable)
HELD_PYTHON = HELD / OWN_PYTHON.relative_to(ROOT) if OWN_PYTHON.is_relative_to(ROOT) else OWN_PYTHON
HOLD = f"mount --bind {shlex.quote(str(ROOT))} {HELD}"
READ_ONLY = f"""
{HOLD}
for place do shift; [ "$place" != -- ] || break; mount -t tmpfs -o ro none "$place"; done
cd /proc
exec "$@"
"""
may_mount = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs a mount namespace"
)


FROM_PYTHON = """
import sys
from elastic_etcd.launcher import LaunchConfig, elastic_launch
elastic_launch(LaunchConfig(), sys.argv[1])(*sys.argv[2:])
"""


@may_mount
@pytest.mark.parametrize(
    ("program", "has_memory"),
    [
        (("-m", "elastic_etcd.launch", "--no-python"), True),
        (("-m", "elastic_etcd.launch", "--no-python"), False),
        (("-c", FROM_PYTHON), True),
    ],
    ids=["memory", "none", "from-python"],
)
def test_m16_no_usual_directory_for_temporary_files(
    program: tuple[str, ...], *, has_memory: bool
) -> None:
    """As in a container whose root is read-only, with the 64 MiB that Docker gives to /dev/shm."""
    places = ["/tmp", "/var/tmp", *([] if has_memory else ["/dev/shm"])]
    mounts = f"mount -t tmpfs -o size=64m none /dev/shm\n{READ_ONLY}"
    agent = (str(HELD_PYTHON), *program)
    worker = (str(HELD_PYTHON), "-c", "import tempfile; tempfile.TemporaryFile()")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-euc", mounts, "sh", *places, "--", *agent, *worker],
        env={k: v for k, v in os.environ.items() if k not in ("TMPDIR", "XDG_RUNTIME_DIR")}
        | {"PYTHONPATH": str(HELD)},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == (0 if has_memory else 2), done.stderr
    assert ("Set TMPDIR to one that this user may write to" in done.stderr) != has_memory
    little = r"etcd needs 128 MB in /dev/shm/\S+, and 6\d MB are left there: set TMPDIR"
    assert bool(re.search(little, done.stderr)) == has_memory, done.stderr
    assert "Traceback" not in done.stderr


FULL = """
import sys
from elastic_etcd.launcher import LaunchConfig, elastic_launch

def train():
    print("trained once", flush=True)
    return bytes(30 << 20)

if __name__ == "__main__":
    _, etcd, prefix = sys.argv
    job = LaunchConfig(run_id="full", rdzv_endpoint=etcd, flags=["--prefix", prefix])
    elastic_launch(job, train)()
"""


@may_mount
@pytest.mark.nightly(part="jobs")
def test_a_full_disk_costs_a_value_and_no_training(
    tmp_path: Path, etcd: EtcdServer, prefix: str
) -> None:
    (tmp_path / "full.py").write_text(FULL)
    small = tmp_path / "small"
    small.mkdir()
    mounted = 'mount -t tmpfs -o size=24M none "$TMPDIR"; exec "$@"'
    program = (sys.executable, tmp_path / "full.py", etcd.endpoint, prefix)
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-euc", mounted, "sh", *program],
        env=os.environ | {"TMPDIR": str(small), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.stdout.count("trained once") == 1, done.stderr
    assert f"rank 0 returned what can't be written into {small}" in done.stderr
    assert "No space left on device" in done.stderr


@may_mount
def test_localhost_is_the_address_of_ipv4_where_it_is_both(tmp_path: Path) -> None:
    """As most machines have it: a scraper is told 127.0.0.1."""
    (tmp_path / "hosts").write_text("::1 localhost\n127.0.0.1 localhost\n")
    text = "from elastic_etcd.system.sockets import listen; print(listen('localhost', 0))"
    shell = 'mount --bind "$1" /etc/hosts; shift; exec "$@"'
    python = (str(tmp_path / "hosts"), sys.executable, "-c", text)
    command = ["unshare", "--mount", "sh", "-euc", shell, "sh", *python]
    assert "laddr=('127.0.0.1'" in subprocess.check_output(command, cwd=ROOT, text=True)


SERVICE = """
import os, sys, time
worker, folder = int(sys.argv[1]), sys.argv[2]
os.read(worker, 1)  # until it is dead
time.sleep(1)
if "begun" in os.listdir(folder):
    open(folder + "/begun").read()  # until the next one is there
with open(folder + "/records", "w") as file:
    file.write("all of them")
"""
TRACKED = """
import os, signal, subprocess, sys
folder = sys.argv[1]
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    ours, workers = os.pipe()
    command = [sys.executable, "-S", "-c", sys.argv[2], str(ours), folder]
    subprocess.Popen(command, pass_fds=[ours], start_new_session=True)
    if "begun" in os.listdir(folder):
        os.kill(os.getpid(), signal.SIGKILL)
else:
    open(folder + "/begun", "w").close()  # when the service reads it
    print("the records:", open(folder + "/records").read())
"""


@pytest.mark.parametrize(
    ("method", "fails"),
    [
        ("prefork", True),
        ("exec", False),
        pytest.param("exec", True, marks=pytest.mark.nightly(part="jobs")),
        pytest.param("prefork", False, marks=pytest.mark.nightly(part="jobs")),
    ],
)
def test_f2_a_tracker_s_service_may_write_the_rest(
    method: str, tmp_path: Path, *, fails: bool
) -> None:
    """It ends by itself when its worker has ended. The next generation does not wait for it."""
    (tmp_path / "train.py").write_text(TRACKED)
    if fails:
        os.mkfifo(tmp_path / "begun")
        os.mkfifo(tmp_path / "records")
    begin = "from elastic_etcd import times; times.LEFTOVERS = 60\n"  # so that no load matters
    begin += "import sys; from elastic_etcd.launch import main; sys.exit(main())"
    command = ("--start-method", method, "--max-restarts=1", str(tmp_path / "train.py"))
    told = run("-c", begin, *command, str(tmp_path), SERVICE)
    if fails:
        assert "the records: all of them" in told
    else:
        assert (tmp_path / "records").read_text() == "all of them"
    assert "in sessions of their own" not in told


HIDE = f'{HOLD}; mount -t tmpfs -o noexec none /tmp; exec "$@"'
NO_EXEC = ("unshare", "--mount", "sh", "-ec", HIDE, "sh")
NAMELESS = (
    *(
        "setpriv",
        "--reuid=54321",
        "--regid=54321",
        "--clear-groups",
        "--securebits=+no_setuid_fixup",
    ),
    # so that it may read this user's Python
    *("--inh-caps=+dac_read_search,+dac_override", "--ambient-caps=+dac_read_search,+dac_override"),
)


@may_mount
@pytest.mark.parametrize("starter", [NO_EXEC, NAMELESS], ids=["noexec", "a user without a name"])
def test_m16_workers_run_in_places_that_are_not_usual(starter: tuple[str, ...]) -> None:
    python, root = (HELD_PYTHON, HELD) if starter is NO_EXEC else (OWN_PYTHON, ROOT)
    agent = (str(python), "-m", "elastic_etcd.launch", "--no-python")
    hidden = ("TMPDIR", "XDG_RUNTIME_DIR", "HOME", "USER", "LOGNAME")
    done = subprocess.run(
        [*starter, *agent, "sh", "-c", "echo trained"],
        cwd="/",
        env={k: v for k, v in os.environ.items() if k not in hidden} | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout


def test_m16_a_small_address_space_is_told_in_a_line() -> None:
    agent = (sys.executable, "-m", "elastic_etcd.launch", "--no-python", "true")
    done = subprocess.run(
        ["sh", "-c", 'ulimit -v 400000; exec "$@"', "sh", *agent],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    assert "]: error: can't start new thread: an agent and its first processes" in done.stderr
