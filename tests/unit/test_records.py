"""Recorded runs of releases are decided as they were, or CHANGELOG.md says why not."""

import gzip
import shutil
from pathlib import Path

import pytest

from tests.support.job import ROOT
from tests.support.records import ALLOWED, LIMIT, RECORDS, unexpected

RELEASES = sorted(RECORDS.iterdir())


@pytest.mark.parametrize("release", RELEASES, ids=lambda folder: folder.name)
def test_recorded_runs_are_decided_as_they_were(release: Path) -> None:
    assert list(release.glob("*.jsonl.gz"))
    told = unexpected(release)
    assert not told, "\n\n".join(text[:2000] for text in told[:3])


@pytest.mark.parametrize("release", RELEASES, ids=lambda folder: folder.name)
def test_records_are_small_and_of_a_release(release: Path) -> None:
    assert sum(path.stat().st_size for path in release.iterdir()) < LIMIT
    assert f"\n## [{release.name}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A folder with one record of the newest release, in which one action is another one."""
    folder = tmp_path / "1.2.3"
    folder.mkdir()
    copied = folder / "restart-n1-0.jsonl.gz"
    shutil.copy(RELEASES[-1] / copied.name, copied)
    lines = gzip.decompress(copied.read_bytes()).split(b"\n")
    changed = next(n for n, line in enumerate(lines) if b'"type":"StopWorkers"' in line)
    lines[changed] = lines[changed].replace(b'{"type":"StopWorkers"', b'{"type":"Rejoin"', 1)
    copied.write_bytes(gzip.compress(b"\n".join(lines)))
    return folder


def test_another_decision_is_told_with_what_to_do(release: Path) -> None:
    (told,) = unexpected(release)
    assert told.startswith("restart-n1-0:")
    assert "of release 1.2.3: this event is decided otherwise now" in told
    assert "CHANGELOG.md has to say why" in told
    assert "recorded: [Rejoin" in told
    assert "now:      [StopWorkers" in told


def test_a_difference_may_be_allowed_with_a_reason_and_only_where_it_is(release: Path) -> None:
    (told,) = unexpected(release)
    where = told.split()[0]
    allowed = release / ALLOWED
    allowed.write_text(f"{where}\n")
    assert unexpected(release) == [told], "it has no reason"
    allowed.write_text(f"{where} since 1.3.0 workers are stopped\n")
    assert unexpected(release) == []
    allowed.write_text(f"{where} since 1.3.0 workers are stopped\nrestart-n1-0:2 why\n")
    assert unexpected(release) == [
        f"restart-n1-0:2 of release 1.2.3 is decided as it was: take it out of {ALLOWED}"
    ]


def test_a_record_that_can_t_be_read_any_more_is_told(release: Path) -> None:
    path = release / "restart-n1-0.jsonl.gz"
    lines = gzip.decompress(path.read_bytes()).replace(
        b'"event":{"type":"', b'"event":{"type":"Old'
    )
    path.write_bytes(gzip.compress(lines))
    (told,) = unexpected(release)
    assert told.startswith("restart-n1-0:0 of release 1.2.3")
    assert "it can't be read any more: " in told
