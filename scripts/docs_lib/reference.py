"""The pages that are made from the code: what each command takes, the metrics, the Python API."""

# ruff: noqa: SLF001 - neither argparse nor prometheus-client shows what it was told in public

import argparse
import html
import re
from collections.abc import Iterator

from prometheus_client.core import Metric

import elastic_etcd
from elastic_etcd import launcher
from elastic_etcd.__main__ import command_parsers
from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.followers.metrics import Metrics
from elastic_etcd.cli import parsers
from elastic_etcd.core.schema import Limits

METRICS = """\
# Metrics

What `--metrics-addr` answers at `/metrics`, made from the program's own registry. Each has the
labels `job` and `node`. [Operating a job](../docs/operate.md#metrics) says what the values mean and
when they begin anew.

| metric | type | more labels | |
|---|---|---|---|
"""
PYTHON = """\
# Python API

Made from the docstrings. `import elastic_etcd as ee` has all of the first part, which is what a
training script uses. What it is for stands in [ElasticState](../docs/state.md),
[ElasticSampler](../docs/sampler.md), [ElasticIterable](../docs/stream.md),
[checkpoints in memory](../docs/memory.md) and [from Python](../docs/python.md).
"""


def pages() -> Iterator[tuple[str, str]]:
    """Each with its file's name."""
    for parser in command_parsers():
        yield f"{parser.prog.split()[-1]}.md", command(parser)
    yield "metrics.md", metrics()
    yield "python.md", python()


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
    homes = elastic_etcd._HOMES
    parts = {
        "elastic_etcd": [f"elastic_etcd.train.{homes[name]}.{name}" for name in sorted(homes)],
        "elastic_etcd.launcher": [f"elastic_etcd.launcher.{name}" for name in launcher.__all__],
        "elastic_etcd.errors": ["elastic_etcd.errors"],
    }
    return PYTHON + "".join(part(title, names) for title, names in parts.items())


def part(title: str, names: list[str]) -> str:
    shown = "".join(f"\n::: {name}\n" for name in names)
    return f"\n## `{title}`\n{shown}"


def block(text: str) -> str:
    return f"~~~ text\n{text.rstrip()}\n~~~"


def escaped(text: str) -> str:
    """As Markdown that shows the text as it is."""
    return re.sub(r"([*_`\[\]])", r"\\\1", html.escape(text, quote=False))
