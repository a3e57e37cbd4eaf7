"""A forked worker and the environment: what its script sets before it imports torch counts."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.unit.prefork import BothWays, Outcome
from tests.unit.test_prefork_worker import FACTS, facts_of

pytestmark = pytest.mark.timeout(600)

# Only where it is asked: to import it costs as much as torch.
INDUCTOR = "import_module('torch._inductor.config')"
# A module as there are some: it reads a variable when it is imported, and sets another.
PRELOADED = """\
import os
home = os.environ.get("PRELOADED_HOME", "at home")
os.environ.setdefault("SET_BY_IMPORT", "FALSE")
"""


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BothWays]:
    folder = tmp_path_factory.mktemp("prefork")
    (folder / "preloaded.py").write_text(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SET_FOR_ALL", "1")
        with BothWays(folder, ["preloaded"]) as ways:
            yield ways


# As torch.jit._state: it reads a variable when it is imported.
READS_JIT = """\
import os
class _enabled:
    enabled = os.environ.get("PYTORCH_JIT", "1") == "1"
"""


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BothWays]:
    """With a stand-in for torch: for how a change is noticed, whoever reads the variable."""
    folder = tmp_path_factory.mktemp("quick")
    (folder / "preloaded.py").write_text(PRELOADED)
    ways = BothWays(folder, ["preloaded", "torch.jit._state"], torch=False)
    (folder / "torch" / "jit").mkdir()
    (folder / "torch" / "jit" / "_state.py").write_text(READS_JIT)
    with ways:
        yield ways


def forked(ways: BothWays, text: str, env: dict[str, str] | None = None) -> Outcome:
    """What becomes of the script forked: it prints the same as executed."""
    argv, env = ways.script(text), {**ways.env, **(env or {})}
    assert ways.prefork.ready
    done, executed = ways.fork(argv, env), ways.exec(argv, env)
    assert (done.code, executed.code) == (0, 0), done.err + executed.err
    assert done.out == executed.out
    return done


def nightly(*case: str) -> ParameterSet:
    """Another variable; each costs two imports of torch."""
    return pytest.param(*case, marks=pytest.mark.nightly(part="forks"))


@pytest.mark.parametrize(
    ("name", "value", "seen", "found"),
    [
        nightly("PYTORCH_JIT", "0", "torch.jit._state._enabled.enabled", "False"),
        ("OMP_NUM_THREADS", "1", "torch.get_num_threads()", "1"),
        nightly("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "dist.get_debug_level().name", "DETAIL"),
        nightly("TORCHINDUCTOR_MAX_AUTOTUNE", "1", f"{INDUCTOR}.max_autotune", "True"),
        nightly("TORCH_LOGS", "+dynamo", "logging.getLogger('torch._dynamo').level", "10"),
    ],
)
def test_t19_what_a_script_sets_before_its_import_of_torch_counts(
    ways: BothWays, name: str, value: str, seen: str, found: str
) -> None:
    text = f"""\
import logging, os
from importlib import import_module
os.environ[{name!r}] = {value!r}
import torch
import torch.distributed as dist
print({seen})
"""
    done = forked(ways, text)
    assert done.out == f"{found}\n"
    assert f"changes {name} before" in done.err


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("os.environ.update(PYTORCH_JIT='0')", "False"),
        ("os.putenv('PYTORCH_JIT', '0')", "True"),  # which os.environ does not see
    ],
)
def test_t19_also_by_a_module_that_the_script_imports(
    quick: BothWays, change: str, found: str
) -> None:
    (quick.folder / "settings.py").write_text(f"import os\n{change}\n")
    text = "import settings\nfrom torch.jit import _state\nprint(_state._enabled.enabled)"
    done = forked(quick, text)
    assert done.out == f"{found}\n"
    assert "changes PYTORCH_JIT before" in done.err


def test_t19_what_a_script_unsets_counts(quick: BothWays) -> None:
    text = "import os\ndel os.environ['PYTORCH_JIT']\nfrom torch.jit import _state\n"
    text += "print(_state._enabled.enabled)"
    # The fork server has not seen this 0, which is another matter: it comes from the shell.
    assert forked(quick, text, {"PYTORCH_JIT": "0"}).out == "True\n"


def test_t19_what_a_preloaded_module_reads_counts(quick: BothWays) -> None:
    text = "import os\nos.environ['PRELOADED_HOME'] = 'away'\nimport preloaded\n"
    assert forked(quick, f"{text}print(preloaded.home)").out == "away\n"


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("PRELOADED_HOME", "import_module('preloaded').home"),
        nightly("TORCHINDUCTOR_CPP_MARCH", f"{INDUCTOR}.cpp.march"),  # of torch's, but read later
    ],
)
def test_t19_what_is_set_after_torch_counts_for_what_torch_does_not_import(
    ways: BothWays, name: str, seen: str
) -> None:
    """As by a flag of a script that imports torch in its first line."""
    text = "import os, torch\nfrom importlib import import_module\n"
    text += f"os.environ[{name!r}] = 'away'\nprint({seen})"
    done = forked(ways, text)
    assert done.out == "away\n"
    assert f"changes {name} before" in done.err


@pytest.mark.parametrize(
    "begins",
    [
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
        "child = subprocess.Popen(['cat'], stdin=subprocess.PIPE)",
    ],
)
def test_t19_nothing_begins_anew_that_has_threads_or_children(ways: BothWays, begins: str) -> None:
    """The others would meet this rank a second time, a tracker would have two runs."""
    text = f"""\
import os, subprocess, torch.distributed as dist
{begins}
os.chdir("/")
os.environ["PRELOADED_HOME"] = "away"
os.environ["PRELOADED_HOME"] = "away again"
import preloaded
print(preloaded.home, os.getcwd())
"""
    done = ways.fork(ways.script(text))
    assert (done.code, done.out) == (0, "at home /\n"), done.err
    assert done.err.count("PRELOADED_HOME is changed too late") == 1
    assert "--start-method exec" in done.err


@pytest.mark.nightly(part="forks")
def test_t19_what_is_set_later_or_read_later_starts_nothing_anew(ways: BothWays) -> None:
    text = """\
import os
os.environ["NCCL_DEBUG"] = os.environ["CUDA_VISIBLE_DEVICES"] = "0"
os.environ["SET_FOR_ALL"] = "another"  # the fork server has it, too
os.environ["TORCH_NCCL_BLOCKING_WAIT"] = os.environ["MASTER_PORT"] = "1"
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # as Lightning
os.environ["KMP_INIT_AT_FORK"] = "FALSE"  # as scikit-learn; nobody reads it here
os.environ.setdefault("PYTORCH_JIT", "1")
import numpy, torch
os.environ["PYTORCH_JIT"] = "0"
print(torch.jit._state._enabled.enabled)
"""
    assert ways.same(ways.script(text), ways.env | {"PYTORCH_JIT": "1"}).out == "True\n"


@pytest.mark.parametrize(
    "first", ["preloaded", nightly("torch.utils.data"), nightly("elastic_etcd.train.run")]
)
def test_t19_what_has_torch_is_as_good_as_torch(ways: BothWays, first: str) -> None:
    text = f"import {first}, os\nos.environ['PYTORCH_JIT'] = '0'\nprint('once')"
    assert ways.same(ways.script(text)).out == "once\n"


def test_t19_a_child_of_the_script_does_not_begin_anew(quick: BothWays) -> None:
    text = """\
import os
child = os.fork()
if child == 0:
    os.environ["PYTORCH_JIT"] = "0"
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert quick.same(quick.script(text)).out == "7\n"


def test_t19_who_begins_anew_finds_the_process_as_it_was(ways: BothWays, tmp_path: Path) -> None:
    change = f"import os\nos.umask(0o77)\nos.chdir({str(tmp_path)!r})\n"
    text = f"{change}os.environ['PYTORCH_JIT'] = '0'\n{FACTS}"
    argv = [*ways.script(text)[:-1], os.path.relpath(ways.folder / "script.py"), "--lr", "0.1"]
    done, executed = ways.fork(argv), ways.exec(argv)
    assert done.code == executed.code == 0, done.err + executed.err
    assert facts_of(done.out) == facts_of(executed.out)


def test_a_script_finds_torch_not_imported_until_it_imports_it(ways: BothWays) -> None:
    text = """\
import importlib.util, sys
print([n for n in sys.modules if n.split(".")[0] == "torch"])
print(importlib.util.find_spec("torch").origin)
import torch.nn.functional as F
import torch
import preloaded
print(sys.modules["torch"] is torch, F is torch.nn.functional, type(torch.__spec__.loader).__name__)
print(torch.__spec__.name, sys.meta_path, [n for n in sys.modules if n == "torch.nn"])
"""
    ways.same(ways.script(text))


def test_an_error_before_the_import_shows_no_frame_of_ours(quick: BothWays) -> None:
    done = quick.fork(quick.script("import os, no_such_module\nimport torch"))
    theirs = quick.exec(quick.script("import os, no_such_module\nimport torch"))
    assert done == theirs
    assert done.code == 1


def test_t20_what_a_preloaded_module_set_in_the_environment_stays(quick: BothWays) -> None:
    text = "import os\nprint(os.environ.get('SET_BY_IMPORT'))\nimport preloaded\n"
    text += "print(os.environ['SET_BY_IMPORT'], os.popen('echo $SET_BY_IMPORT').read())"
    assert forked(quick, text).out == "None\nFALSE FALSE\n\n"
    assert forked(quick, text, {"SET_BY_IMPORT": "TRUE"}).out == "TRUE\nTRUE TRUE\n\n"
