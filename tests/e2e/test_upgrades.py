"""Agents of this version and of the next ones, which are this one with a field or a format more."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import elastic_etcd
from tests.support.etcd import EtcdServer
from tests.support.job import ROOT, Job
from tests.support.residue import keys
from tests.support.ticking import TickingJob

pytestmark = pytest.mark.timeout(600)

PACKAGE = Path(elastic_etcd.__file__).parent
FIELD = "    generation: Number = 0  # the last one handed out\n"
MINOR = '    OPTIONAL: ClassVar = ("added",)\n\n' + FIELD + '    added: Text = "as it was"\n'


def version(folder: Path, old: str, new: str) -> dict[str, str]:
    """An environment in which this package has another schema."""
    copy = folder / "elastic_etcd"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    schema = copy / "core" / "schema.py"
    text = schema.read_text()
    assert text.count(old) == 1
    schema.write_text(text.replace(old, new))
    return {"PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}


def test_o12_versions_that_differ_in_a_field_train_together_and_formats_do_not_mix(
    jobs: Callable[..., Job], etcd: EtcdServer, tmp_path: Path
) -> None:
    later = version(tmp_path / "later", FIELD, MINOR)
    job = jobs(kind=TickingJob)
    n1 = job.start("n1", env=later, settle=0)
    g = job.trains(1)
    n2 = job.start("n2", settle=0)
    g = job.trains(2, after=g)
    assert keys(etcd, job.name)["ledger"]["added"] == "as it was"
    n1.node_kill()
    g = job.trains(1, after=g)
    assert keys(etcd, job.name)["ledger"]["added"] == "as it was", "n2 knows no such field"
    n1 = job.start("n1", env=later, settle=0)
    g = job.trains(2, after=g)
    n3 = job.start("n3", env=version(tmp_path / "next", "\nVERSION = 2\n", "\nVERSION = 3\n"))
    job.exits(n3, 2)
    assert "an older elastic_etcd (format 2) runs it" in n3.output
    job.goes_on(g)
    job.finish(n1, n2)
