"""A forked worker is to its script what `python -u script.py` is: each test runs it both ways."""

import json
import os
import py_compile
import signal
import textwrap
import threading
import time
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elastic_etcd.protocol.activity import DUMP_STACKS
from tests.unit.prefork import DEADLINE, BothWays, Outcome, python

pytestmark = pytest.mark.timeout(600)
NIGHTLY = pytest.mark.nightly(part="forks")  # each costs ends or imports of torch

# Everything about a process that a script can see, but for numbers of its own.
FACTS = '''\
"""Facts."""
import ctypes, gc, json, locale, multiprocessing, os, pickle, resource, signal, sys, threading

class Local: pass

def environment():
    environ = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found = []
    while environ[len(found)] is not None:
        found.append(environ[len(found)].decode("latin-1"))
    return sorted(found)

def stream(it):
    raw = getattr(it.buffer, "raw", it.buffer)
    return [repr(type(it.buffer)), it.name, it.mode, it.encoding, it.errors, it.line_buffering,
            it.write_through, it.fileno(), raw.closefd, it is getattr(sys, f"__{it.name[1:-1]}__")]

def status(*names):
    with open("/proc/self/status") as file:
        return [line for line in file.read().splitlines() if line.split(":")[0] in names]

def signal_of_parent():
    found = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(found))
    return found.value

main = sys.modules["__main__"]
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": repr(sys.flags),
    "warnoptions": sys.warnoptions, "executable": sys.executable,
    "name": __name__, "file": __file__, "doc": __doc__, "cached": __cached__,
    "package": __package__, "spec": repr(__spec__), "loader": type(__loader__).__name__,
    "globals": [*globals()], "main": vars(main) is globals(), "builtins": repr(__builtins__),
    "pickle": pickle.loads(pickle.dumps(Local())).__class__ is Local, "module": Local.__module__,
    "streams": [stream(sys.stdin), stream(sys.stdout), stream(sys.stderr)],
    "stdin": sys.stdin.read(), "environ": dict(os.environ), "libc": environment(),
    "cwd": os.getcwd(), "umask": os.umask(0), "fds": sorted(os.listdir("/proc/self/fd")),
    "leads": os.getpgrp() == os.getpid(), "session": os.getsid(0) == os.getpid(),
    "parent": os.getppid(), "of parent": signal_of_parent(),
    "signals": status("SigBlk", "SigIgn", "ShdPnd"),
    "handlers": {n: repr(signal.getsignal(n)) for n in signal.valid_signals()},
    "limits": [resource.getrlimit(getattr(resource, n)) for n in dir(resource)
               if n.startswith("RLIMIT_")],
    "nice": os.nice(0), "cpus": sorted(os.sched_getaffinity(0)), "locale": locale.setlocale(0),
    "gc": [gc.isenabled(), gc.get_threshold()], "limit": sys.getrecursionlimit(),
    "thread": [threading.current_thread() is threading.main_thread(), threading.active_count(),
               threading.main_thread().native_id == os.getpid()],
    "process": [multiprocessing.current_process().name, repr(multiprocessing.parent_process())],
}))
'''
# Of those that have imported torch, and computed something.
TORCH_FACTS = """\
import json, os, sys, torch, warnings
import numpy
numpy.ones((600, 600)) @ numpy.ones((600, 600))
with open("/proc/self/status") as file:
    status = [line for line in file if line.startswith(("Threads", "SigCgt", "SigIgn"))]
print(json.dumps({
    "threads": torch.get_num_threads(), "interop": torch.get_num_interop_threads(),
    "cuda": [torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()], "status": status,
    "fds": sorted(os.listdir("/proc/self/fd")), "path": sys.path, "hook": repr(sys.excepthook),
}))
"""


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BothWays]:
    with BothWays(tmp_path_factory.mktemp("prefork")) as ways:
        yield ways


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BothWays]:
    """Without torch: for what is a matter of how a script is found, read and run."""
    with BothWays(tmp_path_factory.mktemp("quick"), torch=False) as ways:
        yield ways


def facts_of(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    return found


def check_facts(ways: BothWays, argv: list[str], env: dict[str, str] | None = None) -> None:
    env = ways.env | {"RANK": "3", "EMPTY": "", "BYTES": "\udcff"} | (env or {})
    forked, executed = ways.fork(argv, env), ways.exec(argv, env)
    assert forked.code == executed.code == 0, forked.err + executed.err
    ours, theirs = facts_of(forked.out), facts_of(executed.out)
    assert ours.keys() == theirs.keys()
    if ".zip" in argv[-2]:  # Python itself leaves an archive open that it runs
        theirs["fds"] = ours["fds"]
    if "status" in theirs:
        theirs["status"] = [with_ours(line) for line in theirs["status"]]
    assert {k: v for k, v in ours.items() if v != theirs[k]} == {}, theirs
    assert forked.err == executed.err == ""


def with_ours(line: str) -> str:
    """The signals that are caught, with the one on which a worker says where it stands."""
    name, value = line.split()
    if name != "SigCgt:":
        return line
    return f"{name}\t{int(value, 16) | 1 << (DUMP_STACKS - 1):016x}\n"


def test_a_script_finds_the_same_process(ways: BothWays) -> None:
    check_facts(ways, [*ways.script(FACTS), "--lr", "0.1", "", "-m", "\udcff"])


TITLE = """
import os, sys
from elastic_etcd.system.process_title import show_rank
def told():
    with open("/proc/self/cmdline", "rb") as shown, open("/proc/self/environ", "rb") as environ:
        print(ascii(os.fsdecode(shown.read().rstrip(b"\\0"))), hash(environ.read()), sys.argv[1:])
told()
show_rank("12")
told()
"""


def test_n8_a_forked_worker_is_shown_by_its_script_rank_and_job(quick: BothWays) -> None:
    """And a rank that changes; what it was started with, and the mark of leftovers, stay."""
    env = quick.env | {"RANK": "3", "TORCHELASTIC_RUN_ID": "resnet-7"}
    forked = quick.fork([*quick.script(TITLE, "a rank 1 (b).py"), "--lr", "0.1"], env)
    assert forked.code == 0, forked.err
    ours, changed = (line.split("' ") for line in forked.out.splitlines())
    assert ours[0] == "'elastic_etcd: a rank 1 (b).py rank 3 (resnet-7)"
    assert changed[0] == "'elastic_etcd: a rank 1 (b).py rank 12 (resnet-7)"
    assert ours[1] == changed[1]
    assert ours[1].endswith("['--lr', '0.1']")
    executed = quick.exec([*quick.script(TITLE), "--lr", "0.1"], env)
    one, other = executed.out.splitlines()
    assert one == other, "only what has a title gets another one"


def test_a_store_server_has_no_title_though_its_agent_is_in_another_job(quick: BothWays) -> None:
    """That has descriptors, and its agent's environment: here one without the outer job's rank."""
    env = {k: v for k, v in quick.env.items() if k != "RANK"} | {"TORCHELASTIC_RUN_ID": "outer"}
    served = quick.run(partial(quick.prefork.fork, given=[1]), quick.script(TITLE), env)
    assert served.code == 0, served.err
    assert "outer" not in served.out


@pytest.mark.parametrize("spelling", ["{}", "./{}", ".//{}", "tests/../{}"])
def test_a_script_by_a_relative_path(quick: BothWays, spelling: str) -> None:
    there = os.path.relpath(quick.script(FACTS)[-1])
    check_facts(quick, python(spelling.format(there)))


def test_a_link_to_a_script_in_another_folder(quick: BothWays, tmp_path: Path) -> None:
    target = Path(quick.script(FACTS, "facts.py")[-1])
    (tmp_path / "link.py").symlink_to(os.path.relpath(target, tmp_path))
    check_facts(quick, python(tmp_path / "link.py"))


def test_a_working_directory_that_is_gone(
    quick: BothWays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = quick.script("print('trains')")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert quick.same(script).out == "trains\n"


def test_a_folder_an_archive_and_compiled_code(quick: BothWays, tmp_path: Path) -> None:
    (tmp_path / "__main__.py").write_text(FACTS)
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.write(tmp_path / "__main__.py", "__main__.py")
    py_compile.compile(str(tmp_path / "__main__.py"), str(tmp_path / "facts.pyc"))
    for entry in (tmp_path, tmp_path / "all.zip", tmp_path / "facts.pyc"):
        check_facts(quick, python(entry, "a"))


@pytest.mark.parametrize("name", ["of_facts", "of_facts.more", "alone"])
def test_modules_and_packages(quick: BothWays, name: str) -> None:
    (quick.folder / "of_facts").mkdir(exist_ok=True)
    for file in ("of_facts/__main__.py", "of_facts/more.py", "alone.py"):
        (quick.folder / file).write_text(FACTS)
    (quick.folder / "of_facts" / "__init__.py").write_text("")
    check_facts(quick, python("-m", name, "-m", "--", "a"))


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, marks=NIGHTLY),
        {"OMP_NUM_THREADS": "1"},
        pytest.param({"OPENBLAS_NUM_THREADS": "1"}, marks=NIGHTLY),
        pytest.param({"OMP_NUM_THREADS": "2,1"}, marks=NIGHTLY),
        pytest.param({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "2"}, marks=NIGHTLY),
    ],
    ids=lambda more: ",".join(more) or "none",
)
def test_numbers_of_threads_are_honoured(ways: BothWays, more: dict[str, str]) -> None:
    check_facts(ways, ways.script(TORCH_FACTS), more)


ENDS = {
    "end": "",
    "exit": "import sys; sys.exit()",
    "3": "import sys; sys.exit(3)",
    "130": "import sys; sys.exit(128 + 2)",
    "137": "import sys; sys.exit(128 + 9)",
    "-1": "import sys; sys.exit(-1)",
    "text": "import sys; sys.exit('bad \\u20ac')",
    "object": "raise SystemExit([1, 2])",
    "_exit": "import os; print('lost?', end=''); os._exit(7)",
    "kill": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "term": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "int": "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)",
    "interrupt": "def f():\n    raise KeyboardInterrupt\nf()",
    "usr1": "import os, signal; os.kill(os.getpid(), signal.SIGUSR1)",
    "pipe": "import os\nr, w = os.pipe()\nos.close(r)\nos.write(w, b'x')",
    "segv": "import os, signal, resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
    "os.kill(os.getpid(), signal.SIGSEGV)",
    "raise": "def f(x):\n    return 1 / x\n\nf(0)",
    "chain": "try:\n    {}['k']\nexcept KeyError as e:\n    raise ValueError('two\\nlines') from e",
    "group": "raise ExceptionGroup('g', [ValueError(1), TypeError(2)])",
    "note": "e = ValueError('x'); e.add_note('noted'); raise e",
    "syntax": "x = 1\nif x\n    y",
    "indent": "if 1:\nx = 2",
    "tab": "if 1:\n\tx = 1\n        y = 2",
    "future": "from __future__ import braces",
    "hook": "import sys\nsys.excepthook = lambda k, e, t: print(k, e, t.tb_lineno, t.tb_next)\n1/0",
    "atexit": "import atexit\natexit.register(print, 'bye')\nprint('unfinished', end='')\n1/0",
    "atexit raises": "import atexit\natexit.register(lambda: 1 / 0)",
    "exit in thread": "import threading\nthreading.Thread(target=lambda: exit(3)).start()",
    "raise in thread": "import threading\nthreading.Thread(target=lambda: 1/0).start()",
    "thread goes on": "import threading\ngo = threading.Event()\n"
    "def late():\n  threading.main_thread().join()\n  print('late')\n"
    "threading.Thread(target=late).start()",
    "daemon": "import threading as t\nt.Thread(target=t.Event().wait, daemon=True).start()",
    "del": "class A:\n    def __del__(self): print('deleted')\na = A()",
    "buffer": "import sys\nsys.stdout.reconfigure(write_through=False)\n"
    "sys.stdout.buffer.write(b'raw')\nprint('text', end='')",
    "closed": "import sys\nsys.stdout.close()",
    "name": "if __name__ == '__main__':\n    print('main')",
    "import main": "import __main__\nx = 1\nprint(__main__.x)",
    "warn": "import warnings\ndef f(): warnings.warn('old', DeprecationWarning)\nf()",
    "exc": "import sys, traceback\ntry:\n    1/0\nexcept ZeroDivisionError: traceback.print_exc()",
    "pdb": "import sys\ntry:\n    1/0\nfinally: print(hasattr(sys, 'last_traceback'))",
}
# Those by which a process ends with all that torch has put into it: hooks, threads, objects.
WITH_TORCH = {
    *("end", "_exit", "kill", "term", "int", "usr1", "segv", "raise", "hook", "atexit raises"),
    *("raise in thread", "thread goes on", "daemon", "del", "warn"),
}


@pytest.mark.parametrize("end", ENDS)
def test_it_ends_alike(quick: BothWays, end: str) -> None:
    quick.same(quick.script(ENDS[end]))


@pytest.mark.parametrize(
    "end", [end if end in WITH_TORCH else pytest.param(end, marks=NIGHTLY) for end in ENDS]
)
def test_it_ends_alike_with_torch(ways: BothWays, end: str) -> None:
    ways.same(ways.script(ENDS[end]))


def test_exit_codes_and_signals_are_what_they_were(quick: BothWays) -> None:
    def code(end: str) -> int:
        return quick.fork(quick.script(ENDS[end])).code

    assert code("137") == 137
    assert code("kill") == -signal.SIGKILL
    assert code("interrupt") == -signal.SIGINT
    assert code("_exit") == 7


@pytest.mark.parametrize("arguments", [["/nowhere/at_all.py"], ["-m", "no_such_module"]])
def test_what_is_not_there(quick: BothWays, arguments: list[str]) -> None:
    assert quick.same(python(*arguments)).code


def test_sources_in_other_encodings(quick: BothWays) -> None:
    script = quick.folder / "latin.py"
    script.write_bytes("# -*- coding: latin-1 -*-\nprint(ascii('\xe9'))\n".encode("latin-1"))
    assert quick.same(python(script)).out == "'\\xe9'\n"
    script.write_bytes(b"\xef\xbb\xbfprint(1)\r\n")
    assert quick.same(python(script)).out == "1\n"


@pytest.mark.parametrize("first", ["print('first')", "print('' is '')", "print('"])
def test_a_script_that_was_compiled_ahead_may_be_edited(tmp_path: Path, first: str) -> None:
    (tmp_path / "script.py").write_text(f"{first}\n")
    with BothWays(tmp_path, torch=False) as ways:
        for text in (first, "print('second'), 1/0", 'print("', "'' is ''", first):
            ways.same(ways.script(f"{text}\n"))
        (tmp_path / "script.py").unlink()
        ways.same(python(tmp_path / "script.py"))


def test_a_script_may_be_a_pipe(quick: BothWays, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    write = partial((tmp_path / "pipe").write_text, "print(1)\n")
    for run in (quick.exec, quick.fork):
        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        assert run(python(tmp_path / "pipe")) == Outcome(0, "1\n", "")
        writer.join()


# A module that says what is compiled from its import on.
SAYS_COMPILED = """\
import sys
def say(event, what):
    if event == "compile":
        print("compiled", what[1], file=sys.stderr)
sys.addaudithook(say)
"""


def test_a_script_is_compiled_before_its_workers_are_forked(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print(1)\n")
    (tmp_path / "says.py").write_text(SAYS_COMPILED)
    with BothWays(tmp_path, preload=["says"], torch=False) as ways:
        assert ways.fork(python(script)) == Outcome(0, "1\n", "")
        script.write_text("print(2)\n")
        assert ways.fork(python(script)) == Outcome(0, "2\n", f"compiled {script}\n")


@pytest.mark.parametrize("maker", ["nanobind", "others"])
def test_what_was_loaded_ahead_is_finalised_at_exit(tmp_path: Path, maker: str) -> None:
    """As in a program: nanobind, which triton is made with, complains of what is left over.

    Otherwise a worker that fails ends at once, and is seen before the peers that fail for it.
    """
    (tmp_path / "circle.py").write_text(
        textwrap.dedent(f"""
            import os

            class Made(type):
                pass

            Made.__module__ = {maker!r}

            class Circle(metaclass=Made):
                def __init__(self):
                    self.itself = self

                def __del__(self, write=os.write):
                    write(1, b"finalised\\n")

            circle = Circle()
        """)
    )
    with BothWays(tmp_path, preload=["circle"], torch=False) as ways:
        told = "finalised\n" if maker == "nanobind" else ""
        assert ways.fork(ways.script("import circle")) == Outcome(0, told, "")


def test_chance_is_fresh_in_each_worker(ways: BothWays) -> None:
    script = ways.script(
        textwrap.dedent("""
            import random, sys, multiprocessing
            import numpy, torch
            print(random.random(), numpy.random.rand(), numpy.random.default_rng().random(),
                  torch.initial_seed(), torch.rand(1).item(),
                  multiprocessing.current_process().authkey)
        """)
    )
    first, second = (ways.fork(script).out.split(maxsplit=5) for _ in range(2))
    assert len(first) == 6
    assert all(a != b for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("start", ["fork", "scripted"])
def test_f1_shared_memory_goes_although_the_whole_group_is_killed(
    quick: BothWays, start: str
) -> None:
    text = """\
import os, time
from multiprocessing.resource_tracker import _resource_tracker
from multiprocessing.shared_memory import SharedMemory
print(SharedMemory(create=True, size=64).name, flush=True)
while os.getsid(_resource_tracker._pid) == os.getsid(0):
    time.sleep(0.01)
os.killpg(0, 9)  # as its agent does at its end
"""
    done = getattr(quick, start)(quick.script(text))
    name = Path("/dev/shm", done.out.strip())
    deadline = time.monotonic() + DEADLINE
    while name.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert done.code == -9
    assert not name.exists()
