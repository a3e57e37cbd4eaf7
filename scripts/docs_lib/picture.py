"""Draws docs/architecture.svg, with nodes, agents, workers and etcd.

`python -m scripts.docs_lib.picture` writes it.
"""

from pathlib import Path
from xml.sax.saxutils import escape

FILE = Path(__file__).parents[2] / "docs" / "architecture.svg"
WIDTH, HEIGHT = 860, 470
HEAD = f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">
<title>An agent on each node, its workers, and etcd</title>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"
 orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>
<style>text{{font:13px sans-serif;fill:#222}}.head{{font-weight:bold}}
.small{{font-size:11.5px;fill:#444}}
.arrow{{stroke:#555;stroke-width:1.5;fill:none;marker-start:url(#tip);marker-end:url(#tip)}}
.one{{stroke:#555;stroke-width:1.5;fill:none;marker-end:url(#tip)}}</style>
<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>
"""


def box(left: int, top: int, width: int, height: int, fill: str, *lines: str) -> str:
    """A rectangle with its name and what is said below it."""
    texts = [
        text(left + width // 2, top + 20 + 16 * row, line, "small" if row else "head")
        for row, line in enumerate(lines)
    ]
    shape = f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="6"'
    return "\n".join([f'{shape} fill="{fill}" stroke="#777"/>', *texts])


def text(x: int, y: int, words: str, kind: str = "small", anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def arrow(*points: tuple[int, int], kind: str = "arrow") -> str:
    path = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline points="{path}" class="{kind}"/>'


def node(left: int, name: str, ranks: tuple[int, int]) -> list[str]:
    """A node's agent with the processes that it starts."""
    return [
        box(left, 168, 350, 282, "#f6f6f6"),
        text(left + 12, 188, name, "head", "start"),
        box(left + 95, 198, 160, 78, "#cfe3f7", "agent", "core/ decides", "no torch, no GPU"),
        box(left + 12, 310, 100, 48, "#e9e9e9", "fork server", "imports torch"),
        box(left + 238, 310, 100, 48, "#e9e9e9", "guardian", "if it is killed"),
        box(left + 40, 392, 125, 46, "#d8efd3", f"worker, rank {ranks[0]}", "train.py"),
        box(left + 185, 392, 125, 46, "#d8efd3", f"worker, rank {ranks[1]}", "train.py"),
        arrow((left + 120, 276), (left + 75, 310), kind="one"),
        arrow((left + 230, 276), (left + 275, 310), kind="one"),
        arrow((left + 75, 358), (left + 90, 392), kind="one"),
        arrow((left + 135, 276), (left + 120, 392)),
        arrow((left + 215, 276), (left + 232, 392)),
        text(left + 176, 330, "start, stop,"),
        text(left + 176, 345, "snapshots"),
    ]


def picture() -> str:
    """The whole SVG, as text."""
    keys = "round: setup, joinable, frozen, final; a key with a lease for each agent; the world"
    parts = [
        box(170, 14, 520, 66, "#fdebc8", "etcd v3", keys, "readable by etcdctl"),
        *node(20, "node n1", (0, 1)),
        *node(490, "node n2", (2, 3)),
        arrow((300, 80), (200, 198)),
        arrow((560, 80), (660, 198)),
        text(225, 125, "lease, watch, Txn", "small", "end"),
        text(640, 125, "lease, watch, Txn", "small", "start"),
        arrow((275, 232), (585, 232)),
        text(430, 224, "peer link"),
        text(430, 250, "its end shows a death"),
        arrow((330, 415), (530, 415)),
        text(430, 407, "gloo, NCCL"),
        text(430, 433, "torch's own"),
    ]
    return HEAD + "\n".join(parts) + "\n</svg>\n"


if __name__ == "__main__":
    FILE.write_text(picture())
