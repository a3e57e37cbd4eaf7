"""What a script imports is loaded before it the next time, and the script can't tell."""

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic_etcd.agent.channel import ChannelServer
from elastic_etcd.agent.prefork import _RETIRES_AFTER, Prefork, imported
from elastic_etcd.system.process import exited
from tests.unit.prefork import DEADLINE, BothWays

pytestmark = pytest.mark.timeout(600)

# Each package remembers the process that has imported it, and does not ask for its number.
HEAD = "import os\npid = int(os.readlink('/proc/self'))\n"
HARMLESS = {
    "plain": "",
    "pack/__init__.py": "",
    "pack/deep/__init__.py": "",
    "pack/deep/leaf.py": "def name():\n    import sys\n    return sys.modules[__name__].__name__\n",
    "reads": "home = os.environ.get('READS_HOME', 'at home')\n",
    "sets": "os.environ.setdefault('SET_BY_SETS', 'FALSE')\n",
    "warns": "import warnings\nwarnings.filterwarnings('ignore', message='of warns')\n"
    "warnings.simplefilter('default', category=ImportWarning)\n",
    "warns_last": "import warnings\nwarnings.simplefilter('error', ResourceWarning, append=True)\n",
    "logs": "import logging\nlogger = logging.getLogger('logs.inner')\nlogger.setLevel(10)\n"
    "logger.addHandler(logging.NullHandler())\n",
    "logs_once": "import logging\nlogger = logging.getLogger('logs_once')\nlogger.info('unseen')\n",
    "after": "import plain, torch.nn\n",
    "all_of_pack": "from pack import *\n",
    "at_exit": "import atexit\n@atexit.register\ndef end():\n    print('end of at_exit')\n",
    "at_fork": "os.register_at_fork(after_in_child=lambda: print('fork of at_fork'))\n",
    "finds": "import sys\nclass Finds:\n    find_spec = staticmethod(lambda *_: None)\n"
    "sys.meta_path.append(Finds)\n",
    "random_once": "import numpy, random, tempfile\nrandom.Random().random()\n"
    "numpy.random.default_rng().random()\nrandom.Random(3), numpy.random.default_rng(3)\n"
    "tempfile.gettempdir()\n",
    "unique": "import uuid\nnumber = uuid.uuid4()\ntext, name = str(number), number.hex\n"
    "other = uuid.uuid4().hex\n",
    "unique_too": "from unique import text, other\n",
    "lazy": "import sys, types\nclass Lazy(types.ModuleType):\n    pid = pid\n"
    "    __file__ = __file__\nspec = __spec__\nsys.modules[__name__] = Lazy(__name__)\n"
    "sys.modules[__name__].__spec__ = spec\n",
}
HARMFUL = {
    "a_thread": "import threading as t\nt.Thread(target=t.Event().wait, daemon=True).start()",
    "printing": "print('hello')",
    "to_stderr": "import sys\nsys.stderr.write('hello')",
    "raising": "raise RuntimeError('no GPU here')",
    "exiting": "os._exit(0)",
    "killed": "os.kill(os.getpid(), 9)",
    "handling": "import signal\nsignal.signal(signal.SIGALRM, lambda *_: None)",
    "opening": "file = open('/dev/null')",
    "moving": "os.chdir('/')",
    "finding": "import sys\nsys.path.append('/nowhere')",
    "arguing": "import sys\nsys.argv.append('-v')",
    "drawing": "import random\nrandom.random()",
    "drawing_torch": "import torch\ntorch.rand(1)",
    "drawing_numpy": "import numpy\nnumpy.random.rand()",
    "logging_root": "import logging\nlogging.basicConfig()",
    "naming_main": "import __main__\n__main__.left = 1",
    "hooking": "import sys\nsys.excepthook = print",
    "a_child": "import subprocess\nsubprocess.Popen(['sleep', '1000'])",
    "of_ours": "import own",
    "with_rank": "rank = os.environ.get('RANK')",
    "unfiltering": "import warnings\nwarnings.resetwarnings()",
    "replacing": "import json\njson.dumps = print",
    "replacing_torch": "import torch\ntorch.nn.Module.train = print",
    "setting_torch": "import torch\ntorch.set_default_dtype(torch.float64)",
    "finding_first": "import sys\nclass First:\n    find_spec = staticmethod(lambda *_: None)\n"
    "sys.meta_path.insert(0, First)",
    "a_folder": "import tempfile\nfolder = tempfile.TemporaryDirectory()",
    "a_file": "import tempfile\nfd, name = tempfile.mkstemp()\nos.close(fd)",
    "a_folder_alone": "import tempfile\nfolder = tempfile.mkdtemp()",
    "numbered": "import uuid\nnumber = f'run {uuid.uuid4()}'",
    "numbered_1": "import uuid\nnumber = [uuid.uuid1()]",
    "tokens": "import secrets\ntoken = secrets.token_hex()",
    "tokens_numbers": "import secrets\ntoken = secrets.randbits(64)",
    "bytes_of": "from os import urandom\nsecret = urandom(8)",
    "generating": "import random\nclass A:\n    generator = random.Random()",
    "generating_numpy": "import numpy\nclass A:\n    generator = numpy.random.default_rng()",
    "generating_state": "import numpy\nclass A:\n    generator = numpy.random.RandomState()",
    "named_by_process": "import os\nname = f'run-{os.getpid()}'",
    "profiling": "import sys\nsys.setprofile(None)",
    "own": "",  # which is no installed one: the script's folder has it
    "not_there": None,
}

# What a worker would have that has not imported the module.
SETTINGS = {
    "torch_precision": "import torch\ntorch.set_float32_matmul_precision('high')",
    "torch_tf32": "import torch\ntorch.backends.cuda.matmul.allow_tf32 = True",
    "torch_fp32": "import torch\ntorch.backends.fp32_precision = 'tf32'",
    "torch_cudnn": "import torch\ntorch.backends.cudnn.enabled = False",
    "torch_cudnn_tf32": "import torch\ntorch.backends.cudnn.allow_tf32 = False",
    "torch_attention": "import torch\ntorch.backends.cuda.enable_flash_sdp(False)",
    "torch_threads": "import torch\ntorch.set_num_threads(torch.get_num_threads() + 1)",
    "torch_between": "import torch\ntorch.set_num_interop_threads(7)",
    "torch_device": "import torch\ntorch.set_default_device('meta')",
    "torch_anomaly": "import torch\ntorch.autograd.set_detect_anomaly(True)",
    "torch_warning": "import torch\ntorch.use_deterministic_algorithms(True, warn_only=True)",
    "torch_filling": "import torch\ntorch.utils.deterministic.fill_uninitialized_memory = False",
    "torch_printing": "import torch\ntorch.set_printoptions(precision=2)",
    "torch_inference": "import torch\nmode = torch.inference_mode()\nmode.__enter__()",
    "torch_hook": "import torch\n"
    "torch.nn.modules.module.register_module_forward_hook(lambda *_: None)",
    "torch_collate": "import torch.utils.data\n"
    "torch.utils.data._utils.collate.default_collate_fn_map[set] = print",
    "torch_compile": "import torch._dynamo\ntorch._dynamo.config.suppress_errors = True",
    "numpy_errors": "import numpy\nnumpy.seterr(all='raise')",
    "numpy_printing": "import numpy\nnumpy.set_printoptions(precision=2)",
    "children": "import multiprocessing\nmultiprocessing.set_start_method('spawn')",
    "limit": "import resource as r\nr.setrlimit(r.RLIMIT_CORE, (0, 0))\n"
    "r.setrlimit(r.RLIMIT_NOFILE, (1024, r.getrlimit(r.RLIMIT_NOFILE)[1] - 1))",
    "mask": "os.umask(0o077)",
    "digits": "import sys\nsys.set_int_max_str_digits(0)",
    "decimal": "import decimal\ndecimal.getcontext().prec = 3",
    "stack": "import threading\nthreading.stack_size(1 << 20)",
    "stream": "import sys\nsys.stdout.reconfigure(errors='replace')",
    "loop": "import asyncio\nasyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())",
    "zone": "import time\nos.putenv('TZ', 'America/Bogota')\ntime.tzset()\nos.unsetenv('TZ')",
}
HARMFUL |= {f"setting_{name}": text for name, text in SETTINGS.items()}


def write(packages: Path, modules: Mapping[str, str | None]) -> None:
    for name, text in modules.items():
        if text is not None:
            file = packages / (name if name.endswith(".py") else f"{name}.py")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(HEAD + text)


def names(modules: Mapping[str, str | None]) -> list[str]:
    return [n.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for n in modules]


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BothWays]:
    folder = tmp_path_factory.mktemp("learned")
    harmless = [*names(HARMLESS), "torch"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("RANK", "0")
        ways = BothWays(folder, learned=[*names(HARMFUL), *harmless])
        write(ways.packages, {**HARMLESS, **HARMFUL})
        (folder / "own.py").write_text(HEAD)
        del ways.env["RANK"]  # each worker has its own
        with ways:
            yield ways


def ahead(ways: BothWays, name: str, before: str = "") -> bool:
    """Whether a worker finds this module loaded already when it imports it."""
    text = f"import os\n{before}import {name} as found\nprint(found.pid != os.getpid())"
    done = ways.fork(ways.script(text))
    assert done.code == 0, done.err
    return "True" in done.out.split()  # beside what the package prints


@pytest.mark.parametrize("name", names(HARMLESS))
def test_what_is_harmless_is_loaded_ahead(ways: BothWays, name: str) -> None:
    assert ahead(ways, name)


@pytest.mark.parametrize(
    "name",
    [n for n in HARMFUL if n not in ("raising", "exiting", "killed", "not_there", "with_rank")],
)
def test_what_does_more_than_to_import_is_left_out(ways: BothWays, name: str) -> None:
    assert not ahead(ways, name)


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("runpy", "sorted(runpy.run_module('plain'))"),
        ("importlib.util", "importlib.util.find_spec('plain').loader.get_filename('plain')"),
        ("pkgutil", "pkgutil.get_data('pack', '__init__.py')"),
        ("importlib.resources", "importlib.resources.files('pack').joinpath('__init__.py')"),
    ],
)
def test_what_asks_for_the_loader_has_the_modules_own(ways: BothWays, name: str, use: str) -> None:
    assert ways.same(ways.script(f"import {name}\nprint({use})")).code == 0


def test_what_can_not_be_imported_fails_in_the_script(ways: BothWays) -> None:
    for name in ("raising", "not_there"):
        assert ways.same(ways.script(f"import {name}")).code == 1


def test_a_unique_number_is_unique_and_the_same_wherever_it_is_known(ways: BothWays) -> None:
    text = "import unique as one, unique_too as two\nprint(one.number, one.other)\n"
    text += "print(one.text == str(one.number) == two.text, one.name == one.number.hex)\n"
    text += "print(one.other == two.other != one.name)\nprint(one.number.version)"
    found = [ways.fork(ways.script(text)).out.splitlines() for _ in range(2)]
    assert found[0][1:] == found[1][1:] == ["True True", "True", "4"]
    assert len({*found[0][0].split(), *found[1][0].split()}) == 4, "each worker has its own"


SEEN = """\
import atexit, logging, os, random, signal, sys, warnings
theirs = {"plain", "pack", "reads", "sets", "warns", "logs", "after", "at_exit", "at_fork", "lazy"}
theirs |= {"finds", "all_of_pack"}
print(sorted(name for name in sys.modules if name.split(".")[0] in theirs))
print(sorted(name for name in logging.root.manager.loggerDict if name.split(".")[0] in theirs))
told = [str(each) for each in warnings.filters]  # torch's own are there from the start
print([each for each in told if "of warns" in each or "ImportWarning" in each])
print(logging.root.level, logging.root.handlers, os.environ.get("SET_BY_SETS"))
print([signal.getsignal(number) for number in sorted(signal.valid_signals())])
print(sys.argv, sys.path, os.getcwd(), sorted(vars(sys.modules["__main__"])))
print([hasattr(sys.modules[p], c) for p, c in [("pack", "deep")] if p in sys.modules])
print([getattr(each, "__name__", "") for each in sys.meta_path if "Finds" in repr(each)])
sys.stdout.flush()
if not os.fork():
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize(
    "imports",
    [
        *("", "import plain", "import pack", "import at_exit", "import at_fork", "import finds"),
        "import plain, pack.deep.leaf, reads, sets, warns, logs",
        "import atexit\natexit.register(print, 'before')\nimport at_fork, at_exit",
    ],
)
def test_a_script_sees_nothing_that_it_has_not_imported(ways: BothWays, imports: str) -> None:
    text = "import os\n" + (f"{imports}\n" if imports else "")
    argv = ways.script(f"{text}{SEEN}")
    forked, executed = ways.fork(argv), ways.exec(argv)
    assert (forked.code, forked.err) == (0, "")
    assert forked.out.splitlines() == executed.out.splitlines()


def test_a_module_is_known_by_its_name(ways: BothWays) -> None:
    text = "import pack.deep.leaf as leaf, sys\nspec = leaf.__spec__\n"
    text += "print(leaf.name(), spec.name, spec.loader, spec.parent)\n"
    text += "import pack\nprint(pack.deep.leaf is leaf, sys.modules['pack.deep.leaf'] is leaf)"
    assert ways.same(ways.script(text)).code == 0


def test_a_module_in_the_place_of_its_own_is_as_it_was(ways: BothWays) -> None:
    text = "import lazy\nprint(sorted(vars(lazy)), type(lazy.__spec__.loader).__name__)"
    assert ways.same(ways.script(text)).code == 0


def test_a_star_has_what_was_imported_of_a_package_before(ways: BothWays) -> None:
    text = "import pack.deep, all_of_pack\nprint(hasattr(all_of_pack, 'deep'))"
    assert ways.same(ways.script(text)).out == "True\n"


def test_t19_what_a_script_sets_before_it_imports_a_module_counts(ways: BothWays) -> None:
    """Also after its import of torch."""
    for first in ("", "import torch\n"):
        text = (
            f"import os\n{first}os.environ['READS_HOME'] = 'away'\nimport reads\nprint(reads.home)"
        )
        forked = ways.fork(ways.script(text))
        assert (forked.code, forked.out) == (0, "away\n"), forked.err
        assert "changes READS_HOME before it imports reads" in forked.err
    assert ahead(ways, "reads", "import reads\nos.environ['READS_HOME'] = 'away'\n"), "it is later"


def test_t19_what_only_this_worker_has_counts(ways: BothWays) -> None:
    env = {**ways.env, "READS_HOME": "of the worker"}
    done = ways.fork(ways.script("import reads\nprint(reads.home)"), env)
    assert (done.code, done.out) == (0, "of the worker\n"), done.err


@pytest.mark.parametrize("value", [None, "TRUE"])
def test_t20_what_a_module_sets_in_the_environment_stays(ways: BothWays, value: str | None) -> None:
    text = "import os\nprint(os.environ.get('SET_BY_SETS'))\nimport sets\n"
    text += "print(os.environ['SET_BY_SETS'], os.popen('echo $SET_BY_SETS').read())"
    env = {**ways.env, **({"SET_BY_SETS": value} if value else {})}
    forked, executed = ways.fork(ways.script(text), env), ways.exec(ways.script(text), env)
    assert (forked.code, forked.out) == (0, executed.out), forked.err


def test_a_logger_that_the_script_gets_first_is_the_one_of_the_module(ways: BothWays) -> None:
    text = "import logging\nlogging.getLogger('logs').setLevel(40)\nimport logs\n"
    text += "print(logs.logger.parent.level, logs.logger.level)"
    forked = ways.fork(ways.script(text))
    assert (forked.code, forked.out) == (0, "40 10\n"), forked.err


def test_a_logger_that_was_silent_at_its_import_shows_what_the_script_wants(ways: BothWays) -> None:
    text = "import logging\nlogging.basicConfig(level=10, force=True)\nimport logs_once\n"
    forked = ways.fork(ways.script(f"{text}logs_once.logger.info('seen')"))
    assert (forked.code, forked.err) == (0, "INFO:logs_once:seen\n")


def test_a_filter_that_a_module_adds_after_the_others_stays_there(ways: BothWays) -> None:
    text = "import warnings\nwarnings.simplefilter('ignore')\nimport warns_last\n"
    assert (
        ways.same(ways.script(f"{text}print(warnings.filters[0], warnings.filters[-1])")).code == 0
    )


AROUND = {
    "sys.stdout": "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)",
    "sys.argv": "import sys\nsys.argv.append('--more')",
    "working directory": "import os\nos.chdir('/')",
    "affinity to CPUs": "import os\nos.sched_setaffinity(0, {max(os.sched_getaffinity(0))})",
    "time zone": "import time\ntime.tzname = 'A', 'B'",
    "class of loggers": "import logging\nlogging.setLoggerClass(type('L', (logging.Logger,), {}))",
    "default dtype": "import torch\ntorch.set_default_dtype(torch.float64)",
    "default device": "import torch\ntorch.set_default_device('meta')",
}


@pytest.mark.parametrize("what", AROUND)
def test_what_a_script_has_otherwise_when_it_imports_a_module_counts(
    ways: BothWays, what: str
) -> None:
    forked = ways.fork(ways.script(f"{AROUND[what]}\nimport plain\nprint(plain.pid)"))
    assert forked.code == 0, forked.err
    assert f"has another {what} before it imports plain" in forked.err


def test_nobody_begins_anew_who_is_in_a_process_group(ways: BothWays) -> None:
    """The others would wait for ever: they have met this process already."""
    text = "import os, torch.distributed as dist\nstore = dist.HashStore()\n"
    text += "dist.init_process_group('gloo', store=store, rank=0, world_size=1)\n"
    text += "print('once')\nos.environ['READS_HOME'] = 'away'\nimport reads"
    forked = ways.fork(ways.script(text))
    assert (forked.code, forked.out) == (1, "once\n"), forked.err
    assert "READS_HOME before it imports reads" in forked.err
    assert "this worker ends" in forked.err


@pytest.mark.parametrize("where", ["beside the script", "on a path that it adds"])
def test_another_version_in_the_way_is_the_one(ways: BothWays, where: str) -> None:
    own = ways.folder if where.startswith("beside") else ways.folder / "vendored"
    own.mkdir(exist_ok=True)
    file = own / "plain.py"
    file.write_text("which = 'of the user'\n")
    try:
        text = (
            f"import sys\nsys.path.insert(0, {str(own)!r})\nimport after, plain\nprint(plain.which)"
        )
        forked = ways.fork(ways.script(text))
        assert (forked.code, forked.out) == (0, "of the user\n"), forked.err
    finally:
        file.unlink()


def test_a_package_that_has_been_upgraded_since_is_the_new_one(ways: BothWays) -> None:
    file = ways.packages / "pack" / "deep" / "leaf.py"
    before, times = file.read_text(), file.stat()
    file.write_text("which = 'the new one'\n")
    try:
        forked = ways.fork(ways.script("import pack.deep.leaf as leaf\nprint(leaf.which)"))
        assert (forked.code, forked.out) == (0, "the new one\n"), forked.err
    finally:
        file.write_text(before)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_learned_module_is_never_the_users_own(tmp_path: Path) -> None:
    """The user's may change, and it may do what only the script may do."""
    ways = BothWays(tmp_path, learned=["mine", "plain", "over"])
    write(ways.packages, {"plain": "", "over": ""})
    for name in ("mine", "over"):
        (tmp_path / f"{name}.py").write_text(f"{HEAD}open('imported', 'a').write(__name__)\n")
    with ways:
        assert not (tmp_path / "imported").exists()
        assert ahead(ways, "plain")
        assert not Path("imported").exists()


@pytest.mark.parametrize(
    ("url", "by", "is_ahead"),
    [
        ("file:///src/mine", "pip", False),
        ("file:///croot/mine", "conda", True),
        ("https://host/mine.whl", "pip", True),
    ],
)
def test_what_was_installed_from_a_folder_is_the_users_own(
    tmp_path: Path, url: str, by: str, is_ahead: bool
) -> None:
    """`pip install .` in an image: what it reads at its import may change between two."""
    ways = BothWays(tmp_path, learned=["mine.deep"])
    write(ways.packages, {"mine/__init__.py": "", "mine/deep.py": HEAD})
    told = ways.packages / "mine-1.dist-info"
    told.mkdir()
    (told / "direct_url.json").write_text(json.dumps({"url": url, "dir_info": {}}))
    (told / "INSTALLER").write_text(f"{by}\n")
    (told / "RECORD").write_text("mine/__init__.py,sha256=x,3\nmine/deep.py,,\n../../bin/mine,,\n")
    with ways:
        assert ahead(ways, "mine.deep") == is_ahead


def test_what_never_ends_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prefork, "patience", 1.0)
    os.mkfifo(tmp_path / "never")
    ways = BothWays(tmp_path, learned=["endless"])
    write(ways.packages, {"endless": f"open({str(tmp_path / 'never')!r}).read()\n"})
    with ways:
        assert ways.prefork.ready


def test_all_trials_together_take_so_long_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Prefork, "patience", 2.0)
    caplog.set_level("DEBUG")
    busy = "import time\nend = time.process_time() + 1.5\nwhile time.process_time() < end: pass\n"
    ways = BothWays(tmp_path, learned=["first", "second", "third", "fourth", "fifth"])
    write(ways.packages, dict.fromkeys(ways._learned, busy))
    with ways:
        assert ahead(ways, "first")
        assert not ahead(ways, "fifth")
    assert caplog.text.count("neither it nor the rest is tried") == 1


def test_who_learns_is_killed_before_its_workers_where_memory_is_short(tmp_path: Path) -> None:
    score = "oom_score_adj"
    ours = Path("/proc/self", score).read_text()
    for learned, expected in ((["plain"], "1000\n"), ([], ours)):
        ways = BothWays(tmp_path, learned=learned)
        write(ways.packages, {"plain": f"score = open('/proc/self/{score}').read()\n"})
        with ways:
            assert Path("/proc", str(ways.prefork.pid), score).read_text() == expected
            done = ways.fork(ways.script(f"print(open('/proc/self/{score}').read(), end='')"))
            assert (done.code, done.out) == (0, ours), done.err
            if learned:
                text = "import plain\nprint(plain.score, end='')"
                assert ways.fork(ways.script(text)).out == expected, "it was so when it was loaded"


STEP = """\
import plain, own, os, torch
import pack.deep.leaf
os.environ["SET_BY_SCRIPT"] = "1"
optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
import warns
optimizer.step()
import reads
optimizer.step()
"""


async def test_a_worker_tells_what_it_has_imported_by_its_first_step(tmp_path: Path) -> None:
    given = BothWays(tmp_path)
    write(given.packages, HARMLESS)
    (tmp_path / "own.py").write_text(HEAD)
    told: asyncio.Queue[int] = asyncio.Queue()
    channels = ChannelServer(lambda *_: None, told.put_nowait)
    env = {**given.env, "ELASTIC_ETCD_SOCKET": channels.open(), "RANK": "3"}
    env |= {"ELASTIC_ETCD_LOCAL_RANK": "0", "ELASTIC_ETCD_GENERATION": "1"}
    argv = given.script(STEP)
    prefork = Prefork(argv, given.env, (), 1, asyncio.create_task)
    prefork.start()
    try:
        async with asyncio.timeout(DEADLINE):
            await prefork.warm()
            for learn in (False, True):
                worker = await prefork.fork(argv, env, 1, 2, learn=learn)
                assert await exited(worker) == 0
            fd = await told.get()
            assert told.empty(), "once, and only who is asked"
    finally:
        prefork.close()
        channels.close()
    found = json.loads(os.pread(fd, 1 << 24, 0))
    os.close(fd)
    order = [
        n
        for n in found["modules"]
        if n.partition(".")[0] in ("plain", "pack", "own", "warns", "reads")
    ]
    assert order == ["plain", "pack", "pack.deep", "pack.deep.leaf"]
    assert "torch" not in found["modules"], "the fork server has that"
    assert {"RANK": "3", "SET_BY_SCRIPT": "1"}.items() <= found["changed"].items()


async def test_what_a_worker_has_told_is_had_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = BothWays(tmp_path)
    write(given.packages, HARMLESS)
    argv = given.script("import os, plain\nprint(plain.pid == os.getpid())")
    learned: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
    prefork = Prefork(argv, given.env, (), 1, asyncio.create_task, learned.put_nowait)
    prefork.start()

    async def run() -> str:
        with (tmp_path / "out").open("w+") as out:
            worker = await prefork.fork(argv, given.env, out.fileno(), 2)
            assert await exited(worker) == 0
            out.seek(0)
            return out.read()

    try:
        async with asyncio.timeout(DEADLINE):
            await prefork.warm()
            before = prefork.pid
            prefork.learn(imported(["not_there", "plain", "pack.deep.leaf"]))
            assert prefork.ready, "the old one goes on"
            assert await run() == "True\n"
            names = ("plain", "pack", "pack.deep", "pack.deep.leaf")
            assert await learned.get() == names, "a package before what is in it"
            assert prefork.pid != before
            assert await run() == "False\n"
            prefork.learn(None)
            assert await learned.get() == ()
            assert await run() == "True\n", "forgotten"
    finally:
        prefork.close()


async def test_each_fork_server_is_ended_at_its_own_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that were ordered from the newer one may be on their way yet."""
    given = BothWays(tmp_path)
    learned: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
    prefork = Prefork(given.script(""), given.env, (), 1, asyncio.create_task, learned.put_nowait)
    timers: list[Callable[[], None]] = []
    later = asyncio.get_running_loop().call_later

    def call_later(delay: float, timer: Callable[..., None], *given: Any) -> asyncio.TimerHandle:
        if delay == _RETIRES_AFTER:
            timers.append(timer)
            delay = 1e6
        return later(delay, timer, *given)

    prefork.start()
    try:
        async with asyncio.timeout(DEADLINE):
            await prefork.warm()
            monkeypatch.setattr(asyncio.get_running_loop(), "call_later", call_later)
            prefork.learn(None)
            await learned.get()
            newer = prefork.pid
            prefork.learn(None)
            await learned.get()
            timers[0]()
            assert [server.pid for server, _ in prefork._retired] == [newer]
            timers[1]()
            assert prefork._retired == []
    finally:
        prefork.close()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - nobody else has to be told
        await asyncio.sleep(0.01)


async def test_what_can_not_be_learned_leaves_the_fork_server_as_it_was(tmp_path: Path) -> None:
    given = BothWays(tmp_path)
    # Harmless in a trial, which is nicer to others, and not in the fork server.
    write(given.packages, {"plain": "if os.nice(0) < 19:\n    os._exit(3)\n"})
    prefork = Prefork(given.script(""), given.env, (), 1, asyncio.create_task)
    prefork.start()
    try:
        async with asyncio.timeout(DEADLINE):
            await prefork.warm()
            before = prefork.pid
            prefork.learn(imported(["plain"]))
            await until(lambda: prefork._next is not None)
            await until(lambda: prefork._next is None)
            assert (prefork.pid, prefork.ready) == (before, True)
    finally:
        prefork.close()
