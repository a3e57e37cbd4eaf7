"""The command line means what torchrun's means, compared with torchrun's own parser."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
from argparse import Action, ArgumentParser
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from elastic_etcd import launch
from elastic_etcd.agent.config import AgentConfig, StreamChoice, Streams, substitute
from elastic_etcd.cli.flags import FLAGS, WITHOUT_MEANING, Flag
from elastic_etcd.core.schema import Limits
from elastic_etcd.errors import UsageError
from elastic_etcd.times import STOP_PATIENCE

# A value for each of torchrun's flags, where "1" is none.
VALUES = {
    "nnodes": "1:4",
    "start_method": "fork",
    "numa_binding": "node",
    "signals_to_handle": "SIGTERM,SIGUSR1",
    "rdzv_conf": "join_timeout=30,last_call_timeout=5,read_timeout=60",
    "rdzv_id": "a-job",
    "rdzv_endpoint": "etcd1:2379",
    "rdzv_backend": "c10d",
}

Parse = Callable[..., AgentConfig]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return "train.py"


@pytest.fixture
def parse(script: str) -> Parse:
    """Parses flags for an existing script, in an environment of the test's own."""

    def run(*argv: str, **env: str) -> AgentConfig:
        env.setdefault("PATH", "/usr/bin:/bin")
        return launch.parse([*argv, script], env)

    return run


@pytest.fixture(scope="session")
def torchrun() -> ArgumentParser:
    from torch.distributed.run import get_args_parser

    parser: ArgumentParser = get_args_parser()
    return parser


def torchrun_options(torchrun: ArgumentParser) -> list[tuple[str, Action]]:
    actions = [a for a in torchrun._actions if a.option_strings and a.dest != "help"]
    return [(name, action) for action in actions for name in action.option_strings]


def given(name: str, action: Action) -> list[str]:
    return [name] if action.nargs == 0 else [name, VALUES.get(action.dest, "1")]


def test_no_log_files_are_kept_at_dev_null(parse: Parse) -> None:
    config = parse("--log-dir", os.devnull)
    assert config.log.log_dir == os.devnull


@pytest.mark.timeout(600)
def test_every_flag_of_torchrun_is_accepted(torchrun: ArgumentParser, parse: Parse) -> None:
    options = torchrun_options(torchrun)
    assert len(options) > 50
    for name, action in options:
        more = ["--no-python"] if action.dest == "no_python" else []
        if more or action.dest == "module":
            continue  # they change what the script is: see the commands below
        config = parse(*given(name, action))
        assert config.argv == (sys.executable, "-u", "train.py"), name


def test_flags_of_the_same_meaning_give_what_torchrun_gives(
    torchrun: ArgumentParser, parse: Parse
) -> None:
    argv = ["--nnodes=2:4", "--nproc_per_node", "2", "--max-restarts=7", "--role", "trainer"]
    argv += ["--rdzv-id=j", "--local_addr=10.0.0.7", "--shutdown-timeout=9", "--rdzv-endpoint=e:1"]
    argv += ["--virtual-local-rank", "--log-dir", "logs"]
    theirs, ours = torchrun.parse_args([*argv, "train.py"]), parse(*argv)
    assert (ours.limits.min_nodes, ours.limits.max_nodes, ours.nproc) == (
        2,
        4,
        int(theirs.nproc_per_node),
    )
    assert (ours.job, ours.role, ours.advertise) == (theirs.rdzv_id, theirs.role, theirs.local_addr)
    assert ours.limits.max_restarts == theirs.max_restarts
    assert ours.shutdown_timeout == theirs.shutdown_timeout
    assert ours.virtual_local_rank is theirs.virtual_local_rank is True
    assert ours.log.log_dir == theirs.log_dir
    assert ours.etcd is not None
    assert ours.etcd.endpoints == ("e:1",)


@pytest.mark.parametrize(
    "argv",
    [
        ["train.py", "--nnodes", "3", "--job", "x", "-m", "--", "-h"],
        ["-m", "package.module", "--standalone"],
        ["--no-python", "bash", "-c", "true"],
        ["--module", "train", "a", "--b=c"],
    ],
)
@pytest.mark.parametrize("python", [None, "/bin/sh"])
def test_the_workers_command_is_torchruns(
    torchrun: ArgumentParser,
    script: str,
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    python: str | None,
) -> None:
    from torch.distributed.run import config_from_args

    env = {"PATH": "/usr/bin:/bin"}
    if python:
        env["PYTHON_EXEC"] = python
        monkeypatch.setenv("PYTHON_EXEC", python)
    _, command, arguments = config_from_args(torchrun.parse_args(argv))
    assert launch.parse(argv, env).argv == (command, *arguments)


def test_local_rank_is_filled_in_as_by_torchrun() -> None:
    from torch.distributed.elastic.utils import macros

    arguments = ["--rank=${local_rank}", "$local_rank", "$other ${x} $$", "${"]
    expected = macros.substitute(arguments, "3")
    assert substitute(("${local_rank}", *arguments), 3) == ["${local_rank}", *expected]


@pytest.mark.parametrize("text", ["0", "1", "2", "3", "0:3", "0:3,1:2"])
def test_streams_are_torchruns(parse: Parse, text: str) -> None:
    from torch.distributed.elastic.multiprocessing.api import Std, to_map

    config = parse("-r", text, f"--tee={text}")
    expected = {rank: int(std) for rank, std in to_map(Std.from_str(text), 3).items()}
    assert {rank: int(config.log.redirects[rank]) for rank in range(3)} == expected
    assert config.log.tee == config.log.redirects


def test_every_pet_variable_of_torchrun_is_read(torchrun: ArgumentParser, parse: Parse) -> None:
    switches = {"module", "no_python", "run_path", "standalone", "virtual_local_rank"}
    for _, action in torchrun_options(torchrun):
        if action.dest in switches - {"standalone", "virtual_local_rank"}:
            continue
        value = "1" if action.dest in switches else VALUES.get(action.dest, "1")
        args = launch._arguments(["x"], {f"PET_{action.dest.upper()}": value}, "x")
        plain = launch._arguments(["x"], {}, "x")
        same = {"role": "1", "nproc_per_node": "1", "redirects": "1", "tee": "1"}
        assert vars(args) != vars(plain) or value == same.get(action.dest), action.dest


RUN_PATH = ("--run-path", "--no-python")
RDZV_CONF = ("--rdzv-conf", "join_timeout=30, last_call_timeout=5,is_host=1")
TIMERS = {"TORCHELASTIC_TIMER_FILE": "/tmp/timers"}
SLURM = {"SLURMD_NODENAME": "gpu7"}
STOP_TIME = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "12"}


@pytest.mark.parametrize(
    ("argv", "env", "field", "value"),
    [
        # Whoever is cut off has the lease's time to stop.
        ((), {}, "limits.cut_off", None),
        (("--when-cut-off=train-on",), {}, "limits.cut_off", None),
        (("--when-cut-off=stop", "--lease-ttl=9"), {}, "limits.cut_off", 9),
        ((), {"PET_WHEN_CUT_OFF": "stop"}, "limits.cut_off", AgentConfig.lease_ttl),
        # A job that is over is run again when that is said.
        ((), {}, "rerun", False),
        (("--rerun",), {}, "rerun", True),
        ((), {"PET_RERUN": "1"}, "rerun", True),
        (("--start-method=prefork",), {}, "prefork", True),
        (("--start-method=forkserver",), {}, "prefork", True),
        (("--start-method=exec",), {}, "prefork", False),
        (RUN_PATH, {}, "prefork", True),
        (RUN_PATH, {"PYTHON_EXEC": "/bin/sh"}, "argv", (sys.executable, "-u", "train.py")),
        ((), {}, "preload", ()),
        (("--preload=a,b.c", "--preload", "d"), {}, "preload", ("a", "b.c", "d")),
        (
            ("--signals-to-handle", "SIGTERM, SIGUSR1,SIGTERM"),
            {},
            "signals",
            (signal.SIGTERM, signal.SIGUSR1),
        ),
        # A node has peers where there are others, or they know its job.
        (("--etcd=e:1", "--job=j"), {}, "has_peers", True),
        (("--nnodes=1:2",), {}, "has_peers", True),
        (("--etcd=e:1",), {}, "has_peers", False),
        (("--standalone", "--job=j"), {}, "has_peers", False),
        (RDZV_CONF, {}, "limits.join_timeout", 30),
        (RDZV_CONF, {}, "limits.settle", 5),
        (("--rdzv-conf", "timeout=30", "--join-timeout=8"), {}, "limits.join_timeout", 8),
        ((), STOP_TIME, "shutdown_timeout", 12),
        (("--shutdown-timeout=3",), STOP_TIME, "shutdown_timeout", 3),
        # torch's file timers are served where its variable says so.
        ((), {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}, "timer_file", ""),
        ((), {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"} | TIMERS, "timer_file", "/tmp/timers"),
        ((), {"TORCHELASTIC_ENABLE_FILE_TIMER": "0"} | TIMERS, "timer_file", None),
        ((), TIMERS, "timer_file", None),
        ((), {"LOGLEVEL": "warning"}, "log_level", "WARNING"),
        ((), {"LOGLEVEL": "chatty"}, "log_level", "INFO"),
        (("--log-level=error",), {"LOGLEVEL": "debug"}, "log_level", "ERROR"),
        # A node is called as in Slurm.
        ((), {}, "node", os.uname().nodename),
        ((), SLURM, "node", "gpu7"),
        ((), SLURM | {"PET_NODE_NAME": "a"}, "node", "a"),
        (("--node-name", "b"), SLURM, "node", "b"),
    ],
)
def test_what_flags_and_variables_give(
    parse: Parse, argv: tuple[str, ...], env: dict[str, str], field: str, value: object
) -> None:
    assert attrgetter(field)(parse(*argv, **env)) == value


def test_pet_variables(parse: Parse) -> None:
    env = {
        "PET_NNODES": "2:3",
        "PET_RDZV_ID": "j",
        "PET_RDZV_ENDPOINT": "e:1",
        "PET_LEASE_TTL": "9",
    }
    config = parse(**env)
    assert (config.limits.min_nodes, config.limits.max_nodes) == (2, 3)
    assert (config.job, config.lease_ttl) == ("j", 9)
    assert parse("--nnodes=1", "--job=k", **env).job == "k"
    assert parse(PET_VIRTUAL_LOCAL_RANK="1").virtual_local_rank
    assert not parse(PET_VIRTUAL_LOCAL_RANK="0").virtual_local_rank
    with pytest.raises(UsageError, match="PET_STANDALONE=yes in the environment: give 1 or 0"):
        parse(PET_STANDALONE="yes")
    with pytest.raises(UsageError, match=r"PET_NNODES=4:2 in the environment: .* 2:4"):
        parse(PET_NNODES="4:2")
    for flag in (flag for flag in FLAGS if flag.choices):
        variable = f"PET_{flag.dest.upper()}"
        with pytest.raises(UsageError, match=f"{variable}=STOP in the environment: give one of "):
            parse(**{variable: "STOP"})


def test_an_empty_variable_is_what_an_empty_flag_is(parse: Parse) -> None:
    """As compose makes of `${NNODES}`: each node would have trained alone."""

    def refused(*argv: str, **env: str) -> str:
        try:
            parse(*argv, **env)
        except UsageError as error:
            return str(error)
        return ""

    taken = set()
    for flag in (each for each in FLAGS if each.kind):
        variable = f"PET_{flag.dest.upper()}"
        told = refused(**{variable: ""})
        assert bool(told) == bool(refused(f"{flag.long[0]}=")), flag.dest
        assert not told or variable in told or flag.dest == "password"
        taken |= set() if told else {flag.dest}
    assert {"topology_label", "local_ranks_filter", "rdzv_conf"} <= taken
    assert not {"nnodes", "job", "prefix", "lease_ttl", "max_restarts"} & taken
    assert "PET_VIRTUAL_LOCAL_RANK is in" in refused(PET_VIRTUAL_LOCAL_RANK="")


@pytest.mark.parametrize(
    "short", ["--nnode=1:3", "--nproc-per=1", "--rdzv-e=e", "--stand", "--tee=0"]
)
def test_torchruns_abbreviations_work(parse: Parse, short: str) -> None:
    parse(short, "--rdzv-id", "j")


@pytest.mark.parametrize(
    "argument", ["--kill=1:41", "--log=x", "--join", "--node=3", "--max=5", "-l", "--no-such"]
)
def test_a_scripts_argument_is_no_abbreviation_of_ours(script: str, argument: str) -> None:
    config = launch.parse(["--standalone", script, argument, "x"], {"PATH": "/usr/bin:/bin"})
    assert config.argv[-3:] == (script, argument, "x")


def test_our_flags(parse: Parse) -> None:
    argv = "--etcd e:1,f:2 --job j --lease-ttl 7 --settle 1.5 --join_timeout 20 --restart-window 60"
    argv += " --min-uptime 2 --prefix /a/b --topology-label rack1 --etcd-timeout 30 --node-name n1"
    argv += " --advertise 10.0.0.1 --log-level debug --local-ranks-filter 0,2"
    argv += " --suspect-after 3 --join-settle 0.5"
    argv += " --proof-of-death off"
    config = parse(*argv.split())
    assert config.etcd is not None
    assert not config.proof_of_death
    assert config.etcd.endpoints == ("e:1", "f:2")
    limits = config.limits
    assert (config.job, config.lease_ttl, config.prefix) == ("j", 7, "/a/b")
    assert (limits.settle, limits.join_timeout) == (1.5, 20)
    assert (limits.restart_window, limits.min_uptime) == (60, 2)
    assert (limits.suspect_after, limits.join_settle) == (3, 0.5)
    assert (config.topology_label, config.etcd_timeout, config.node) == ("rack1", 30, "n1")
    assert (config.advertise, config.log_level) == ("10.0.0.1", "DEBUG")
    assert config.log.local_ranks_filter == frozenset({0, 2})


@pytest.mark.parametrize(
    ("argv", "worlds"),
    [
        ("--nnodes 4", [4]),
        ("--nnodes 1:4", [1, 2, 3, 4]),
        ("--nnodes 2,4,8", [2, 4, 8]),
        ("--nnodes=1,9", [1, 9]),
        ("--nnodes 2:13 --nodes-multiple-of 4", [4, 8, 12]),
        ("--nnodes 4:4 --nodes_multiple_of=2", [4]),
        ("--nnodes 3:10000 --nodes-multiple-of 5000", [5000, 10000]),
    ],
)
def test_the_sizes_that_a_world_may_have(parse: Parse, argv: str, worlds: list[int]) -> None:
    limits = parse(*argv.split()).limits
    assert (limits.min_nodes, limits.max_nodes) == (worlds[0], worlds[-1])
    for nodes in range(12_000):
        assert limits.largest(nodes) == max((w for w in worlds if w <= nodes), default=0)
        assert limits.larger(nodes) == min((w for w in worlds if w > nodes), default=0)


def test_defaults(parse: Parse) -> None:
    config = parse()
    assert config.etcd is None
    assert re.fullmatch("run-[0-9a-f]{8}", config.job)
    assert (config.limits.min_nodes, config.limits.max_nodes, config.nproc) == (1, 1, 1)
    # The data class and the flags agree on every default.
    of = None, config.job, config.argv, config.node, 1, Limits(1, 1)
    assert config == AgentConfig(*of, command=config.command, has_peers=False)
    assert config.log.redirects == StreamChoice(Streams.NONE)


def test_a_program_that_is_not_python_is_not_preforked(script: str) -> None:
    assert not launch.parse(["--no-python", "true"], {"PATH": "/usr/bin:/bin"}).prefork


@pytest.mark.parametrize("endpoint", ["localhost:0", "127.0.0.1:0", "[::1]:0"])
def test_p4_port_0_of_this_machine_is_an_etcd_of_the_job_s_own(parse: Parse, endpoint: str) -> None:
    """A line of torchrun's documentation, for several jobs of one node on a machine."""
    config = parse("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=7")
    assert config.etcd is None
    assert config.job == "7"
    with pytest.raises(UsageError, match=r"port 0 is a free port of this machine"):
        parse(f"--rdzv-endpoint={endpoint}", "--nnodes=2", "--rdzv-id=7")
    with pytest.raises(UsageError, match=r"etcd endpoint 'h:0'"):
        parse("--rdzv-endpoint=h:0", "--rdzv-id=7")


def test_standalone_is_one_node_with_its_own_etcd(parse: Parse) -> None:
    config = parse("--standalone", "--etcd=e:1", "--job=j", "--nnodes=1:4")
    assert (config.etcd, config.limits.min_nodes, config.limits.max_nodes) == (None, 1, 1)
    assert config.job != "j"


def test_job_id_is_needed_where_others_must_know_it(parse: Parse) -> None:
    assert parse("--etcd=e:1").job.startswith("run-")
    assert parse("--nnodes=2").job.startswith("run-")  # an embedded etcd prints it
    with pytest.raises(UsageError, match="Add --job ID"):
        parse("--nnodes=2", ETCDCTL_ENDPOINTS="e:1")


@pytest.mark.parametrize(
    ("argv", "deadline"),
    [
        ([], 30),
        (["--shutdown-timeout=9"], 9),
        (["--shutdown-timeout=9", "--leave-deadline=120"], 120),
        (["--leave-deadline=0"], 0),
    ],
)
def test_r5_the_leave_deadline_is_the_shutdown_timeout_unless_it_is_given(
    parse: Parse, argv: list[str], deadline: float
) -> None:
    config = parse(*argv)
    assert config.limits.leave_deadline == deadline
    assert parse(*argv, PET_LEAVE_DEADLINE="45").limits.leave_deadline == (
        deadline if "--leave-deadline" in " ".join(argv) else 45
    )


@pytest.mark.parametrize(
    ("argv", "park", "longest"),
    [([], 20, 30), (["--park-timeout=45"], 45, 45), (["--shutdown-timeout=9"], 20, 30)],
)
def test_g3_the_others_wait_for_who_has_to_park(
    parse: Parse, argv: list[str], park: float, longest: float
) -> None:
    config = parse(*argv)
    assert config.park_timeout == park
    assert config.limits.patience == longest + config.kill_timeout + STOP_PATIENCE


def test_health_checks_port_from_torchs_variable(
    parse: Parse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks is not on this machine; it is where --metrics-addr would be."""
    port = {"TORCHELASTIC_HEALTH_CHECK_PORT": "8080"}
    assert parse(**port).metrics_addr == ("0.0.0.0", 8080)
    assert parse("--metrics-addr=9464", **port).metrics_addr == ("127.0.0.1", 9464)
    assert remarks(**port) == []
    with pytest.raises(UsageError, match="TORCHELASTIC_HEALTH_CHECK_PORT=http: http is not"):
        parse(TORCHELASTIC_HEALTH_CHECK_PORT="http")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert parse(**port).metrics_addr is None, "a platform may set it for jobs that have no extra"
    assert [line for line in remarks(**port) if "elastic_etcd[metrics]" in line]


def remarks(*argv: str, **env: str) -> list[str]:
    return list(launch._remarks(launch._arguments([*argv, "train.py"], env, "x"), env))


@pytest.mark.parametrize("flag", WITHOUT_MEANING.flags, ids=lambda flag: flag.dest)
def test_a_flag_without_meaning_is_remarked_on_when_given(flag: Flag) -> None:
    assert remarks() == []
    for said in (remarks(flag.names, "1"), remarks(**{f"PET_{flag.dest.upper()}": "1"})):
        assert said == [f"{flag.names} has no meaning here: {flag.text}"]


def test_keys_of_rdzv_conf_without_meaning_are_remarked_on() -> None:
    conf = "join_timeout=3,read_timeout=60"
    assert remarks("--rdzv-conf", conf) == ["--rdzv-conf read_timeout has no meaning here"]


def test_torchruns_default_event_handler_needs_no_remark() -> None:
    assert remarks("--event-log-handler", "null") == []


def test_lines_of_the_agent() -> None:
    def line(level: int, text: str, *args: Any) -> str:
        record = logging.LogRecord("elastic_etcd", level, "", 0, text, args, None)
        config = launch.parse(["--no-python", "--node-name=node%1", "true"], {})
        return launch._Lines(config).format(record)

    assert line(logging.INFO, "%d nodes", 3) == "elastic_etcd[node%1]: 3 nodes"
    assert line(logging.INFO, "a\tb\n\x1b[2J") == "elastic_etcd[node%1]: a\tb\n    \\x1b[2J"
    forged = line(logging.INFO, "%s: leaving", "n1\nelastic_etcd[node%1]: o8")
    assert forged == "elastic_etcd[node%1]: n1\n    elastic_etcd[node%1]: o8: leaving"
    assert line(logging.WARNING, "slow") == "elastic_etcd[node%1]: warning: slow"


LOGS = """
import sys
from elastic_etcd import launch
launch.set_up_logging(launch.parse(sys.argv[1:], {}))
launch.log.info("1 node")
launch.log.warning("it\\nburns %s", "\x1b[2J")
"""
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


def logged(stderr: int, *flags: str, before: str = "") -> subprocess.CompletedProcess[bytes]:
    """What a program logs there, in which `before` is run first."""
    flags = ("--no-python", "--node-name=n1", "--job=j", "--etcd=e:1", *flags, "true")
    command = [sys.executable, "-c", before + LOGS, *flags]
    return subprocess.run(command, stderr=stderr, check=True, timeout=60)


def test_o2_lines_have_a_time_off_a_terminal() -> None:
    said = logged(subprocess.PIPE).stderr.decode()
    first, second, third = said.splitlines()
    assert re.fullmatch(rf"{TIME} elastic_etcd\[n1\]: 1 node", first)
    assert re.fullmatch(rf"{TIME} elastic_etcd\[n1\]: warning: it", second)
    assert third == "    burns \\x1b[2J"
    ours, theirs = os.openpty()
    logged(theirs)
    os.close(theirs)
    assert os.read(ours, 1 << 16).startswith(b"elastic_etcd[n1]: 1 node\r\n")
    os.close(ours)


def test_o2_the_journal_gets_priorities_where_stderr_leads_there() -> None:
    own = "import os\nseen = os.fstat(2)\n"
    own += "os.environ['JOURNAL_STREAM'] = f'{seen.st_dev}:{seen.st_ino}'\n"
    assert logged(subprocess.PIPE, before=own).stderr.decode().splitlines() == [
        "<6>elastic_etcd[n1]: 1 node",
        "<4>elastic_etcd[n1]: warning: it",
        "<4>    burns \\x1b[2J",
    ]
    others = own.replace("2)", "0)", 1)  # inherited, and led elsewhere
    assert re.match(TIME, logged(subprocess.PIPE, before=others).stderr.decode())


def test_o2_json_is_an_object_a_line() -> None:
    said = logged(subprocess.PIPE, "--log-format=json").stderr.decode()
    found = [json.loads(line) for line in said.splitlines()]
    assert all(re.fullmatch(TIME, each.pop("time")) for each in found)
    names = {"job": "j", "node": "n1"}
    assert found == [
        {"level": "info", **names, "message": "1 node"},
        {"level": "warning", **names, "message": "it\nburns \x1b[2J"},
    ]
