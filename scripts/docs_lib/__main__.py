"""`python -m scripts.docs_lib FOLDER`: all pages of the site, in a folder that is made anew.

It has the repository's tree, so that links between documents hold as they are. Links to the source
lead to pages that show it.
"""

import re
import shutil
import sys
from pathlib import Path

from . import reference

ROOT = Path(__file__).parents[2]
AT_ROOT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
ROW = re.compile(r"^\|.*$", re.MULTILINE)
LANDING = "---\ntemplate: home.html\n---\n"
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"
SOURCE = re.compile(r"\]\(((?:\.\./)+elastic_etcd/[\w/]+\.py)\)")


def main(to: Path) -> None:
    shutil.rmtree(to, ignore_errors=True)
    (to / "docs" / "contributing").mkdir(parents=True)
    shutil.copytree(Path(__file__).with_name("site"), to / "site")
    write(to / "index.md", LANDING + (ROOT / "README.md").read_text())
    for file in (*map(ROOT.joinpath, AT_ROOT), *(ROOT / "docs").rglob("*.*")):
        if file.suffix == ".md":
            document(file, to)
        else:
            shutil.copy(file, to / file.relative_to(ROOT).parent)  # a picture
    for name, text in reference.pages():
        write(to / "reference" / name, text)


def document(file: Path, to: Path) -> None:
    """A page, and one for each source file that it links to."""
    text = re.sub(r"\]\((?:\.\./)+README\.md", "](../index.md", file.read_text())
    write(to / file.relative_to(ROOT), SOURCE.sub(r"](\1.md)", ROW.sub(row, text)))
    for link in SOURCE.findall(text):
        source = (file.parent / link).resolve()
        name = source.relative_to(ROOT)
        shown = f"# {name}\n\n~~~~~ python\n{source.read_text()}~~~~~\n"
        write(to / f"{name}.md", UNSEARCHED + shown)


def row(found: re.Match[str]) -> str:
    """Of a table: GitHub wants each | in code to be escaped, and the site none."""
    return re.sub(r"`[^`]+`", lambda code: code[0].replace(r"\|", "|"), found[0])


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
