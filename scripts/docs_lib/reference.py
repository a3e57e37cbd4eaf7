"""The pages that are made from the code: what each command takes, the metrics, the Python API."""

# ruff: noqa: SLF001 - neither argparse nor prometheus-client shows what it was told in public

import argparse
import html
import re
import textwrap
from collections.abc import Iterator

from prometheus_client.core import Metric

import elastic_etcd
from elastic_etcd import errors, launcher
from elastic_etcd.__main__ import command_parsers
from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.followers.metrics import Metrics
from elastic_etcd.cli import parsers
from elastic_etcd.core.schema import Limits

METRICS = """\
# Metrics

What `--metrics-addr` answers at `/metrics`, made from the program's own registry. Each has the
labels `training_job` and `node`. [Prometheus](../docs/prometheus.md#metrics) says what the values
mean and when they begin anew.

| metric | type | more labels | |
|---|---|---|---|
"""
PYTHON = """\
# Python API

`import elastic_etcd as ee` has every name of a training script, here by task. This page is made
from the docstrings. A program that starts jobs imports `elastic_etcd.launcher`.
[Exceptions](exceptions.md) have a page of their own.
"""
TASKS = {
    "Train on in the process": ("run", "ElasticState", "BuildWorld", "WorldChanged", "ddp"),
    "Use each sample once": ("ElasticSampler", "ElasticBatchSampler", "ElasticIterable"),
    "Keep the batch, the rate and the seeds in any world": (
        *("accumulation_steps", "steps_per_epoch", "scale_lr", "seed_all"),
    ),
    "Keep checkpoints in memory": ("memory_checkpoint", "latest_checkpoint"),
    "Ask and tell the agent": ("leaving", "raise_if_stale", "heartbeat", "quiet", "store"),
}
EXCEPTIONS = """\
# Exceptions

`ee.` has those that a script's calls raise: `AgentGone`, `EtcdUnreachable`, `MalformedState`,
`StaleGeneration`, `UsageError`. The others belong to the launcher, and are in
`elastic_etcd.errors`. [WorldChanged](python.md#elastic_etcd.train.sync_point.WorldChanged) is no
error, nor is `WorldBroken`, by which `state.check` and `state.commit` end a world that has lost a
rank: leave both to `ee.run`.

| raised | by | to do |
|---|---|---|
| `UsageError` | any call | mend what it names; the job ends with exit code 2 |
| `StaleGeneration` | `raise_if_stale`, `state.save` | write nothing: the others go on without it |
| `EtcdUnreachable` | `raise_if_stale`, `state.save` | write later, or under another name |
| `AgentGone` | any call that asks the agent | end: the guardian ends this worker, too |
| `MalformedState` | `state.load`, `state.sync`, `latest_checkpoint` | take an older file |
"""


def pages() -> Iterator[tuple[str, str]]:
    """Each with its file's name."""
    for parser in command_parsers():
        yield f"{parser.prog.split()[-1]}.md", command(parser)
    yield "metrics.md", metrics()
    yield "python.md", python()
    yield "exceptions.md", exceptions()


def command(parser: parsers.Parser) -> str:
    """What its --help says, with a heading for each flag."""
    parts = [f"# {parser.prog}", escaped(parser.description or ""), block(parser.usage or "")]
    for group in parser._action_groups:
        shown = [
            a for a in group._group_actions if a.help != argparse.SUPPRESS and a.dest != "help"
        ]
        if shown:
            title = (group.title or "").removeprefix("positional ")
            parts += [f"## {escaped(title)}", *(flag(parser, action) for action in shown)]
    return "\n\n".join([*parts, "## Examples and exit codes", block(parser.epilog or "")]) + "\n"


def flag(parser: parsers.Parser, action: argparse.Action) -> str:
    formatter = parser._get_formatter()
    spelt = formatter._format_action_invocation(action)
    return f"### `{spelt}`\n\n{escaped(formatter._expand_help(action))}"


def metrics() -> str:
    """A row for each that an agent shows."""
    config = AgentConfig(None, "job", ("train.py",), "node", 1, Limits(1, 1))
    return METRICS + "".join(map(row, Metrics(config).collect()))


def row(family: Metric) -> str:
    """With the name and the type as they are scraped."""
    suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
    kind = "gauge" if family.type == "info" else family.type
    own = [f"`{name}`" for name in vars(family)["_labelnames"] if name not in ("job", "node")]
    return f"| `{family.name}{suffix}` | {kind} | {' '.join(own)} | {family.documentation} |\n"


def python() -> str:
    """What mkdocstrings makes pages of: all that scripts and programs may import."""
    shown = {
        title: [getattr(elastic_etcd, name) for name in names] for title, names in TASKS.items()
    }
    shown["Start jobs"] = [getattr(launcher, name) for name in launcher.__all__]
    return PYTHON + "".join(
        f"\n## {title}\n" + "".join(map(described, made)) for title, made in shown.items()
    )


def exceptions() -> str:
    """The tree of errors, and each of them."""
    tree = block(textwrap.dedent((errors.__doc__ or "").split("\n\n")[1]))
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    return f"{EXCEPTIONS}\n{tree}\n" + "".join(map(described, kinds))


def described(made: type) -> str:
    return f"\n::: {made.__module__}.{made.__qualname__}\n"


def block(text: str) -> str:
    return f"~~~ text\n{text.rstrip()}\n~~~"


def escaped(text: str) -> str:
    """As Markdown that shows the text as it is."""
    return re.sub(r"([*_`\[\]])", r"\\\1", html.escape(text, quote=False))
