"""The launcher's flags, each written once, for all that have to know them.

parsers.py makes the parser and its --help of this table, launch.py the agent's configuration,
plugin/torchrun.py the keys of its --rdzv-conf, launcher.py a command line of LaunchConfig, and
tests/unit/test_flags.py the table in docs/flags.md. Two of them run in other programs: the agent is
not loaded here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elastic_etcd.cli import flag_values
from elastic_etcd.core.rules import JOIN_SETTLE
from elastic_etcd.times import GRACE_LEAVE

if TYPE_CHECKING:
    from collections.abc import Callable

_METAVARS: dict[Callable[[str], Any], str] = {
    flag_values.seconds: "SECONDS",
    flag_values.natural: "N",
    flag_values.no_progress: "N",
    flag_values.count: "N",
    flag_values.exit_code: "CODE",
}


@dataclass(frozen=True)
class Flag:
    """A flag. It has torchrun's underscore form, and the variable PET_<FLAG>, too.

    Its default is that of the field `to`, or else `default`.
    """

    names: str  # the first long one is its own; others are short or torchrun's
    text: str  # its meaning, in --help and in docs/flags.md
    kind: Callable[[str], Any] | None = flag_values.filled  # makes its value; None: it takes none
    metavar: str = ""
    choices: tuple[str, ...] | None = None
    repeated: bool = False  # it may be given again, and has a list
    to: str = ""  # a field of AgentConfig, limits.<field of Limits> or log.<field of LogConfig>
    default: Any = None
    by_default: str = ""  # the default in words; {} is its value
    more: str = ""  # the rest of its meaning, in docs/flags.md only
    rdzv_conf: tuple[str, ...] = ()  # torchrun's keys of --rdzv-conf that mean it
    in_plugin: bool = False  # whether it is a key of --rdzv-conf under torchrun itself
    in_python: str = ""  # the field of LaunchConfig that means it, if that is called otherwise
    hidden: bool = False  # whether --help leaves it out

    @property
    def long(self) -> list[str]:
        """Its names but for the short one."""
        return [name for name in self.names.split() if name.startswith("--")]

    @property
    def dest(self) -> str:
        """Its own name, as a Namespace and --rdzv-conf have it."""
        return self.long[0][2:].replace("-", "_")

    @property
    def field(self) -> tuple[str, str]:
        """The field `to`: "", limits or log, and its name; both are "" where there is none."""
        home, _, name = self.to.rpartition(".")
        return home, name

    @property
    def value_name(self) -> str | None:
        """Its value in --help; None leaves that to argparse."""
        return self.metavar or (_METAVARS.get(self.kind) if self.kind else None)


@dataclass(frozen=True)
class Section:
    """Flags under one title."""

    title: str
    flags: tuple[Flag, ...]
    more: str = ""  # beside the title, in docs/flags.md only


JOB = Section(
    "job and nodes",
    (
        Flag(
            "--job --rdzv-id",
            "the id that the nodes of one job share; up to 128 letters, digits, '.', '_', '-'",
            flag_values.job_id,
            "ID",
            by_default="random, where no other node can join",
            more="It is needed where nodes meet in your etcd.",
            in_python="run_id",
        ),
        Flag(
            "--rerun",
            "run a job once more that has succeeded",
            None,
            to="rerun",
            by_default="exit 0 at once: a supervisor may start agents again after the end",
            in_plugin=True,
        ),
        Flag(
            "--nnodes",
            "how few and how many nodes may train, or a list, 2,4,8; others wait as spares",
            flag_values.nnodes,
            "MIN[:MAX]",
            default="1:1",
            by_default="1",
            in_python="min_nodes",
        ),
        Flag(
            "--nodes-multiple-of",
            "only multiples of N nodes train; others wait as spares",
            flag_values.count,
            default=1,
            in_plugin=True,
        ),
        Flag(
            "--nproc-per-node",
            "workers on this node: a number, gpu, cpu, xpu, auto, or a backend that torch has; "
            "nodes may differ",
            metavar="N",
            default="1",
        ),
        Flag(
            "--standalone", "one node with an etcd of its own; --etcd and --job are ignored", None
        ),
        Flag(
            "--node-name",
            "this node's name in logs",
            flag_values.printable,
            "NAME",
            by_default="its name in Slurm, SLURMD_NODENAME, else its host name",
            in_plugin=True,
        ),
        Flag(
            "--advertise --local-addr",
            "address of this node for the others, its interface (eth0), or network (10.1.0.0/16)",
            flag_values.address,
            "ADDRESS",
            to="advertise",
            by_default="its address on the way to etcd, but no loopback if max > 1",
            more="Towards an etcd on the loopback (`localhost`, Debian's 127.0.1.1) that is "
            "another address of this machine.",
            in_plugin=True,
            in_python="local_addr",
        ),
        Flag(
            "--topology-label",
            "new nodes get ranks in the order of (label, name), so that a rack stays together",
            flag_values.label,
            "LABEL",
            to="topology_label",
        ),
        Flag("--role", "ROLE_NAME of the workers", to="role"),
        Flag(
            "--rdzv-conf",
            "torchrun's: join_timeout, last_call_timeout (= --settle), cacert, cert, key",
            flag_values.key_values,
            "KEY=VALUE,...",
            default={},
            in_python="rdzv_configs",
        ),
    ),
)
# Commands that read a job or steer it have these, too.
CONNECTION = (
    Flag(
        "--etcd --rdzv-endpoint",
        "etcd's endpoints, also http(s)://...; or ETCDCTL_ENDPOINTS (without either, `launch` "
        "starts an etcd for its run)",
        metavar="HOST:PORT,...",
        in_python="rdzv_endpoint",
    ),
    Flag("--prefix", "all keys are under it", flag_values.prefix, to="prefix", in_plugin=True),
    Flag(
        "--cacert",
        "CA that signed etcd's certificate; turns TLS on",
        metavar="FILE",
        more="Or `ETCDCTL_CACERT`.",
        rdzv_conf=("cacert", "ca_cert"),
        in_plugin=True,
    ),
    Flag(
        "--cert",
        "certificate of this client",
        metavar="FILE",
        more="Or `ETCDCTL_CERT`.",
        rdzv_conf=("cert", "ssl_cert"),
        in_plugin=True,
    ),
    Flag(
        "--key",
        "its key",
        metavar="FILE",
        more="Or `ETCDCTL_KEY`.",
        rdzv_conf=("key", "ssl_cert_key"),
        in_plugin=True,
    ),
    Flag(
        "--user",
        "etcd user; its password is in ELASTIC_ETCD_PASSWORD",
        metavar="NAME",
        more="Or `ETCDCTL_USER` and `ETCDCTL_PASSWORD`.",
        in_plugin=True,
    ),
    Flag("--password-file", "or in this file, read at each login", metavar="FILE", in_plugin=True),
    # It is refused, with its reason; else it would be a short form of --password-file.
    Flag("--password", "", str, hidden=True),
)
ETCD = Section(
    "etcd",
    (
        *CONNECTION,
        Flag(
            "--lease-ttl",
            "a node that is silent for so many seconds is gone",
            flag_values.count,
            "SECONDS",
            to="lease_ttl",
            in_plugin=True,
        ),
        Flag(
            "--etcd-timeout",
            "give up when etcd is away for longer in mid-run",
            flag_values.seconds,
            to="etcd_timeout",
            by_default="never; training goes on",
            in_plugin=True,
        ),
        Flag(
            "--when-cut-off",
            "workers of a node that etcd does not answer train on, or are stopped before its lease "
            "can end, so that no two worlds ever train",
            choices=("train-on", "stop"),
            default="train-on",
            more="With `stop` an outage of etcd for 2/3 of --lease-ttl stops the training.",
        ),
        Flag(
            "--proof-of-death",
            "agents keep a connection to their coordinator's, so that a node whose processes all "
            "die is missed at once and not after --lease-ttl",
            flag_values.on_or_off,
            "on|off",
            to="proof_of_death",
            more="Its port is chosen by the system. A firewall in between hides a death, which is "
            "then noticed after --lease-ttl.",
            in_plugin=True,
        ),
    ),
)
WORKERS = Section(
    "workers",
    (
        Flag("-m --module", "script is a module: python -m script", None),
        Flag(
            "--no-python",
            "script is a program of its own, not Python; its whole process group gets SIGTERM",
            None,
        ),
        Flag("--run-path", "run with this Python, whatever PYTHON_EXEC says", None),
        Flag(
            "--start-method",
            "prefork: fork Python workers from a process that has torch loaded; exec: start each "
            "as a program of its own",
            metavar="METHOD",
            choices=("prefork", "exec", "spawn", "fork", "forkserver"),
            default="prefork",
            by_default="{}, which torchrun's spawn, fork and forkserver mean, too",
            more="A forked worker whose script sets what torch reads when it is imported "
            "(`TORCH_LOGS`, `OMP_NUM_THREADS`) begins anew as a program, and says so.",
        ),
        Flag(
            "--preload",
            "modules that the fork server loads, too, so that no worker waits for them; may be "
            "repeated",
            flag_values.modules,
            "MODULE,...",
            repeated=True,
            default=[],
            more="See [performance.md](contributing/performance.md#what-a-script-imports).",
        ),
        Flag(
            "--virtual-local-rank",
            "LOCAL_RANK 0 for all, each sees its own GPU only",
            None,
            to="virtual_local_rank",
        ),
        Flag(
            "--numa-binding",
            "let each worker run only on the CPUs near its GPU, as torch finds them",
            str,  # its default is empty
            metavar="MODE",
            choices=("node", "socket", "exclusive", "core-complex"),
            to="numa_binding",
            by_default="on all",
            in_python="numa_options",
        ),
        Flag(
            "--signals-to-handle",
            "signals on which this node leaves the job; its workers get the same one",
            flag_values.signals,
            "NAMES",
            to="signals",
            more="On SIGUSR2 it leaves, too, and the next of these does not hurry it "
            "([slurm.md](slurm.md)).",
        ),
        Flag(
            "--memory-dir",
            "a tmpfs for ee.memory_checkpoint; the files that are written there go with the agent",
            metavar="DIR",
            to="memory_dir",
        ),
    ),
)
FAILURES = Section(
    "failures and times",
    (
        Flag(
            "--max-restarts",
            "failures of workers that the job survives, over all nodes; nodes that come and go do "
            "not count, and an error that would only come again is not tried so often",
            flag_values.natural,
            to="limits.max_restarts",
            by_default="{}; torchrun: 0",
        ),
        Flag(
            "--suspect-after",
            "a node whose workers failed so often right after their start (see --min-uptime), or "
            "that went so often, is left out, as long as MIN others are there; 0: never",
            flag_values.natural,
            to="limits.suspect_after",
        ),
        Flag(
            "--stop-after-no-progress",
            "so many restarts in a row that come no further than before end the job, if its "
            "workers tell how far they are; at most 20, 0: off",
            flag_values.no_progress,
            to="limits.stop_after_no_progress",
            more="[health.md](health.md#no-progress) says which failures count.",
        ),
        Flag(
            "--restart-window",
            "failures before so long a time of training, over all worlds since, are forgiven",
            flag_values.seconds,
            to="limits.restart_window",
        ),
        Flag(
            "--min-uptime",
            "a worker that fails sooner, again and again, is restarted later",
            flag_values.seconds,
            to="limits.min_uptime",
        ),
        Flag(
            "--settle",
            "the first formation waits so long after the last node joined; --join-timeout at most",
            flag_values.seconds,
            to="limits.settle",
            rdzv_conf=("last_call_timeout",),
            in_plugin=True,
        ),
        Flag(
            "--join-settle",
            "nodes that come later are taken in together, so long after the last one",
            flag_values.seconds,
            to="limits.join_settle",
            by_default=f"{JOIN_SETTLE:g}, 0 where all workers are in ee.run",
            in_plugin=True,
        ),
        Flag(
            "--join-interval",
            "a world that trains is ended for them after so long at the soonest",
            flag_values.seconds,
            to="limits.join_interval",
            in_plugin=True,
        ),
        Flag(
            "--join-timeout",
            "give up when fewer than MIN nodes were there for so long, while etcd answered",
            flag_values.seconds,
            to="limits.join_timeout",
            rdzv_conf=("timeout", "join_timeout"),
            in_plugin=True,
            in_python="rdzv_timeout",
        ),
        Flag(
            "--leave-exit-code",
            "exit code of a node that left an unfinished job on a signal",
            flag_values.exit_code,
            to="leave_exit_code",
            by_default="128 + signal, so that Kubernetes and Slurm do not take it for done",
        ),
        Flag(
            "--stop-exit-code",
            "exit code after `elastic-etcd stop`, for a scheduler that then is to start no node "
            "again",
            flag_values.exit_code,
            to="stop_exit_code",
            by_default="that of a node that left, 143",
        ),
        Flag(
            "--leave-deadline",
            "from the signal on which this node leaves to SIGKILL of its workers; until they have "
            "ended, or this is over, no next world begins. The same on every node",
            flag_values.seconds,
            by_default=f"--shutdown-timeout if that is given, else {GRACE_LEAVE:g}",
        ),
        Flag(
            "--preemption-watch",
            "leave, as on a signal, when this file appears, since this machine will be taken away; "
            "it may hold seconds, which workers have, but no more than --leave-deadline",
            flag_values.notices,
            "file:PATH",
            to="preemption_watch",
            by_default="none",
            more="See [operate.md](operate.md).",
        ),
        Flag(
            "--health-check",
            "shell command that exits 0 where this node is fit to train, such as `elastic-etcd "
            "check` or dcgmi diag -r 1. It runs before the node joins, which else exits 8, then "
            "every --health-interval, and when the node is left out (--suspect-after): a node that "
            "is not fit leaves, and nothing is lost. It has 60 s",
            metavar="COMMAND",
            to="health_check",
            by_default="none",
            more="See [health.md](health.md).",
        ),
        Flag(
            "--health-interval",
            "between two runs of the command of --health-check",
            flag_values.count,
            to="health_interval",
        ),
        Flag(
            "--shutdown-timeout",
            "from SIGTERM to SIGKILL of a worker, but see --leave-deadline; also "
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
            flag_values.seconds,
            to="shutdown_timeout",
            by_default="by reason, see docs/failures.md",
            more="For newcomers no worker in ee.run is killed.",
        ),
        Flag(
            "--park-timeout",
            "time of a worker in ee.run after a failure, instead of --shutdown-timeout, to come "
            "out of its step and to let go of NCCL; one that has not is killed and started anew",
            flag_values.seconds,
            to="park_timeout",
        ),
        Flag(
            "--kill-timeout",
            "from SIGKILL of a worker until this node gives up on it and leaves the job; many "
            "devices or much pinned memory may take long",
            flag_values.seconds,
            to="kill_timeout",
        ),
        Flag(
            "--hang-timeout",
            "a worker that has not ended its step for so long is reported, with its stack; not in "
            "the first step of a world, in a commit, or where the script says ee.quiet",
            flag_values.hang_timeout,
            "auto|SECONDS|off",
            to="hang_timeout",
            by_default="auto, ten times the slowest of the recent steps, but a minute at least",
            more="See [hangs.md](hangs.md).",
        ),
        Flag(
            "--hang-action",
            "a hang is only reported, or its world ends as by a failure of the worker that hangs; "
            "a script that evaluates for longer has to say so by ee.quiet",
            choices=("report", "restart"),
            to="limits.hang_action",
        ),
        Flag(
            "--start-timeout",
            "a worker that has not ended its first step in so many seconds from the start of its "
            "world fails as one that hangs. Only for scripts that tell steps: an optimizer's of "
            "torch, ee.heartbeat; ee.quiet excuses. The same on every node",
            flag_values.count,
            "SECONDS",
            to="start_timeout",
            by_default="off",
            more="See [health.md](health.md#starts).",
        ),
        Flag(
            "--compare-every",
            "at the first commit of each world, and then each N, workers with an ElasticState are "
            "asked whether their weights and moments are still the same",
            flag_values.compare_every,
            "auto|N|off",
            to="limits.compare_every",
            by_default="auto, as often as takes a two-hundredth of the time",
            more="See [state.md](state.md#replicas-are-compared).",
        ),
        Flag(
            "--on-divergence",
            "a worker whose values are not those of most others is only reported, or is a failure, "
            "after which it gets theirs, or its node is drained",
            choices=("report", "restart", "drain"),
            to="limits.on_divergence",
        ),
        Flag(
            "--copies",
            "how many nodes have each piece of a sharded state, of different --topology-label if "
            "possible; all but one of them may be lost at once",
            flag_values.count,
            to="limits.copies",
            more="See [state.md](state.md#sharded-values).",
        ),
        Flag(
            "--straggler-factor",
            "a node is reported as slow if a step takes it, outside of collectives, so many times "
            "as long as the median of all nodes, over 50 steps; of scripts that train with "
            "DistributedDataParallel",
            flag_values.straggler_factor,
            "FACTOR|off",
            to="limits.straggler_factor",
            more="See [hangs.md](hangs.md).",
        ),
    ),
    "those of the job's first node count for all, but --leave-exit-code, --stop-exit-code, "
    "--shutdown-timeout, --park-timeout and --kill-timeout are each node's own",
)
OUTPUT = Section(
    "output",
    (
        Flag(
            "--log-dir",
            "a file per generation, rank and stream",
            metavar="DIR",
            to="log.log_dir",
        ),
        Flag(
            "-r --redirects",
            "streams that go to a file only: 0 none, 1 stdout, 2 stderr, 3 both, or per local rank "
            "0:3,1:2",
            flag_values.streams,
            "STREAMS",
            to="log.redirects",
            by_default="0",
        ),
        Flag(
            "-t --tee",
            "streams that go to a file and the console: 0 none, 1 stdout, 2 stderr, 3 both, or per "
            "local rank 0:3,1:2",
            flag_values.streams,
            "STREAMS",
            to="log.tee",
            by_default="0",
        ),
        Flag(
            "--local-ranks-filter",
            "local ranks whose output the console shows, like 0,1",
            flag_values.ranks,
            "RANKS",
            to="log.local_ranks_filter",
            by_default="all",
        ),
        Flag(
            "--log-level",
            "level of the agent's own lines: debug, info, warning, error; also LOGLEVEL",
            flag_values.log_level,
            "LEVEL",
            by_default="info",
            in_plugin=True,
        ),
        Flag(
            "--log-format",
            "form of the agent's own lines: text, which has the time where stderr is no terminal, "
            "or json, an object a line",
            choices=("text", "json"),
            to="log_format",
            more="In a systemd unit text has the journal's priorities instead (`JOURNAL_STREAM`).",
            in_plugin=True,
        ),
        Flag(
            "--metrics-addr",
            "answer /metrics for Prometheus, /healthz and /readyz there; without a host on the "
            "loopback only",
            flag_values.listening,
            "[HOST:]PORT",
            to="metrics_addr",
            by_default="nowhere; extra [metrics]",
            more="See [prometheus.md](prometheus.md).",
        ),
    ),
)
WITHOUT_MEANING = Section(
    "accepted from torchrun, without a meaning here",
    tuple(
        Flag(name, text, str, metavar="X")
        for name, text in (
            ("--rdzv-backend", "nodes always meet through etcd v3, at --etcd"),
            ("--monitor-interval", "the exit of a worker is an event here, not polled"),
            ("--event-log-handler", "use elastic-etcd events --follow --json"),
            ("--logs-specs", "use --log-dir, --redirects and --tee"),
            ("--duplicate-stdout-filters", "filter the files under --log-dir"),
            ("--duplicate-stderr-filters", "filter the files under --log-dir"),
            ("--node-rank", "ranks are given at the rendezvous; a survivor keeps its rank"),
            ("--master-addr", "each generation has a store of its own on group rank 0's node"),
            ("--master-port", "each generation has a store of its own on a free port"),
        )
    ),
)
SECTIONS = (JOB, ETCD, WORKERS, FAILURES, OUTPUT, WITHOUT_MEANING)
FLAGS = tuple(flag for section in SECTIONS for flag in section.flags)

# What the release before had, and what does the same now; refused with that for one release.
# docs/migration.md has these tables, too.
GONE = {
    "--preflight": "give --health-check 'elastic-etcd check'; docs/health.md",
    "--traces": "make spans of `elastic-etcd events --json`; docs/prometheus.md has the program",
}
GONE_COMMANDS = {
    "accelerate": "use `accelerate launch --rdzv_backend etcd-v3`, or `python -m "
    "elastic_etcd.launch` with accelerate's variables; docs/frameworks.md has both",
    "timeline": "use `elastic-etcd events` or `elastic-etcd report`, both with --json",
}
