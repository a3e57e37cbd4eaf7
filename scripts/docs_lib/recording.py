"""Draws docs/demo.svg, a terminal in which scripts/demo runs, from a real run of it.

`python -m scripts.docs_lib.recording` runs the demo, which takes a minute or two, and writes the
file. The lines and their times stand in it, so that a test can draw it again.
"""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "demo.svg"
COLUMNS, ROWS = 112, 26
WIDTH, HEIGHT = 860, 446
ROW, TOP = 15.5, 32.0  # pixels
LONGEST_PAUSE, END = 1.2, 8.0  # seconds; what takes longer is shortened
COLOURS = {"blue": "#8fc3f5", "green": "#9ad68a", "": "#e8e8e8"}

Line = tuple[float, str]  # the seconds since the beginning, and the text


def run() -> list[Line]:
    """The lines of a demo, as they come."""
    command = [sys.executable, str(ROOT / "scripts" / "demo.py")]
    lines: list[Line] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as demo:
        assert demo.stdout
        before, shown = time.monotonic(), 0.0
        for text in demo.stdout:
            now = time.monotonic()
            shown, before = shown + min(now - before, LONGEST_PAUSE), now
            lines.append((round(shown, 2), text.rstrip()))
    if demo.returncode:
        sys.exit("the demo has failed: " + "".join(f"\n{text}" for _, text in lines))
    return lines


def rows(lines: list[Line]) -> list[tuple[float, str, str]]:
    """Wrapped as a terminal of so many columns shows them, each with its colour."""
    return [
        (when, part, colour(text))
        for when, text in lines
        for part in (re.findall(f".{{1,{COLUMNS}}}", text) or [""])
    ]


def colour(text: str) -> str:
    """That of the node that says it."""
    found = re.match(r"  (?:elastic_etcd)?\[(blue|green)[ \]]", text)
    return COLOURS[found[1] if found else ""]


def frames(name: str, times: list[float], offset: int, sign: int) -> str:
    """Keyframes that move something by a row with each row from `offset` on."""
    length = times[-1] + END
    steps = ["0%{transform:none}"]
    for number, when in enumerate(times, 1):
        down = sign * ROW * max(0, number - offset)
        steps.append(f"{100 * when / length:.2f}%{{transform:translateY({down:.1f}px)}}")
    moves = f"@keyframes {name}{{{''.join(steps)}}}"
    return f"{moves}.{name}{{animation:{name} {length:.1f}s step-end infinite}}"


def drawn(lines: list[Line]) -> str:
    """The whole SVG, as text."""
    shown = rows(lines)
    times = [when for when, _, _ in shown]
    style = f"text{{font:12px monospace;white-space:pre}}{frames('scroll', times, ROWS, -1)}"
    still = "@media(prefers-reduced-motion){.scroll,.cover{animation:none}.cover{display:none}}"
    texts = "\n".join(
        f'<text x="14" y="{TOP + ROW * n + 12:.1f}" fill="{fill}">{escape(text)}</text>'
        for n, (_, text, fill) in enumerate(shown)
        if text
    )
    last, all_rows = ROW * max(0, len(shown) - ROWS), ROW * (len(shown) + ROWS)
    ground = 'fill="#1b2430"'
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">
<title>scripts/demo: two nodes train, one is killed, and one is added again</title>
<metadata>{escape(json.dumps(lines))}</metadata>
<style>{style}{frames("cover", times, 0, 1)}{still}</style>
<rect width="{WIDTH}" height="{HEIGHT}" rx="8" {ground}/>
<svg y="26" height="{HEIGHT - 34}" width="{WIDTH}" viewBox="0 {TOP - 6:.0f} {WIDTH} {HEIGHT - 34}">
<g class="scroll" transform="translate(0 {-last:.1f})">
{texts}
<rect class="cover" y="{TOP:.1f}" width="{WIDTH}" height="{all_rows:.0f}" {ground}/>
</g>
</svg>
<circle cx="18" cy="14" r="5" fill="#f0a43c"/><circle cx="36" cy="14" r="5" fill="#8fc3f5"/>
<text x="{WIDTH // 2}" y="18" fill="#9aa7b5" text-anchor="middle">$ scripts/demo</text>
</svg>
"""


if __name__ == "__main__":
    FILE.write_text(drawn(run()))
