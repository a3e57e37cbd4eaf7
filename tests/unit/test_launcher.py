"""The Python API without workers: flags, what can be pickled, and errors before anything starts."""

import os
import pickle
import re
import resource
import shutil
import sys
import threading
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher import api as torchs
from torch.numa.binding import AffinityMode, NumaOptions

from elastic_etcd import launch
from elastic_etcd.agent.config import StreamChoice, Streams
from elastic_etcd.api import functions, run_function
from elastic_etcd.api.child import RunWriter
from elastic_etcd.api.child_failed import child_failed
from elastic_etcd.core.lifecycle import JobEnded, State, Tick
from elastic_etcd.core.rules import Local
from elastic_etcd.core.schema import Failure, Ledger, Outcome
from elastic_etcd.core.view import Everything, View
from elastic_etcd.errors import ElasticEtcdError, UsageError
from elastic_etcd.launcher import LaunchConfig, RunResult, elastic_launch
from elastic_etcd.protocol.run_record import RunRecord, WorkerFailure


def add(a: int, b: int) -> int:
    return a + b


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run, in a process that looks like its rank 1."""
    monkeypatch.setenv("ELASTIC_ETCD_GENERATION", "3")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(sys, "path", sys.path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    return tmp_path


# --- the configuration


def test_all_of_torchs_fields_are_there_in_its_order() -> None:
    """As far as torch's are given without their names."""
    ours, torch = ([field.name for field in fields(c)] for c in (LaunchConfig, torchs.LaunchConfig))
    assert set(torch) <= set(ours)
    assert ours[:8] == torch[:8]


def test_a_field_without_meaning_says_why(tmp_path: Path) -> None:
    config = LaunchConfig(
        monitor_interval=0.1,
        rdzv_backend="c10d",
        event_log_handler="console",
        duplicate_stdout_filters=["loss"],
        duplicate_stderr_filters=["error"],
    )
    args = launch._arguments([*config.command_line(), "train.py"], {}, "x")
    said = " ".join(launch._remarks(args, {}))
    for flag in ("monitor-interval", "rdzv-backend", "event-log-handler"):
        assert f"--{flag} has no meaning here" in said
    assert said.count("filter the files under --log-dir") == 2


def test_torchs_fields_are_the_launchers_flags(tmp_path: Path) -> None:
    torchs_logs = DefaultLogsSpecs(str(tmp_path), {0: Std.ALL}, Std.ALL, {1, 0})
    config = LaunchConfig(
        2,
        4,
        3,
        torchs_logs,
        "job-1",
        "trainer",
        "a:2379,b:2379",
        "etcd",
        {"join_timeout": 7, "last_call_timeout": 2},
        max_restarts=5,
        start_method="spawn",
        local_addr="10.0.0.1",
        shutdown_timeout=9,
        virtual_local_rank=True,
        numa_options=NumaOptions(AffinityMode.CORE_COMPLEX),
        signals_to_handle="SIGTERM",
        flags=["--hang-timeout", "off"],
    )
    told = launch.parse([*config.command_line(), "--no-python", "true"], {"PATH": os.defpath})
    assert (told.limits.min_nodes, told.limits.max_nodes, told.nproc) == (2, 4, 3)
    assert told.etcd
    assert told.etcd.endpoints == ("a:2379", "b:2379")
    assert (told.job, told.role, told.advertise) == ("job-1", "trainer", "10.0.0.1")
    assert (told.limits.join_timeout, told.limits.settle, told.limits.max_restarts) == (7, 2, 5)
    assert (told.shutdown_timeout, told.virtual_local_rank) == (9, True)
    assert told.numa_binding == "core-complex"
    assert [number.name for number in told.signals] == ["SIGTERM"]
    assert told.hang_timeout == float("inf")
    assert told.log.log_dir == str(tmp_path)
    assert told.log.tee == StreamChoice(Streams.BOTH)
    assert told.log.redirects == StreamChoice(by_local_rank=((0, Streams.BOTH),))
    assert told.log.local_ranks_filter == frozenset({0, 1})


def test_what_is_not_given_is_the_launchers_default() -> None:
    env = {"PATH": os.defpath}
    told = launch.parse([*LaunchConfig().command_line(), "--no-python", "true"], env)
    default = launch.parse(["--no-python", "true"], env)
    assert told.job != default.job, "it is random"
    assert told.limits == default.limits
    assert (told.log, told.signals, told.etcd) == (default.log, default.signals, None)


def test_fields_of_ours_say_where_output_goes(tmp_path: Path) -> None:
    config = LaunchConfig(log_dir=tmp_path, tee="0:3", redirects=Std.ALL, local_ranks_filter=[0])
    told = launch.parse([*config.command_line(), "--no-python", "true"], {"PATH": os.defpath})
    assert told.log.log_dir == str(tmp_path)
    assert told.log.tee == StreamChoice(by_local_rank=((0, Streams.BOTH),))
    assert told.log.redirects == StreamChoice(Streams.BOTH)
    assert told.log.local_ranks_filter == frozenset({0})


def test_a_filter_may_be_text_as_on_the_command_line() -> None:
    config = LaunchConfig(
        local_ranks_filter="2,0",
        duplicate_stdout_filters="loss,acc",
        duplicate_stderr_filters="error",
    )
    flags = config.command_line()
    assert "--local-ranks-filter=2,0" in flags
    assert "--duplicate-stdout-filters=loss,acc" in flags
    assert "--duplicate-stderr-filters=error" in flags


# --- functions


def test_a_function_goes_by_its_name_and_comes_back(worker: Path) -> None:
    file = functions.save_function(worker, add, (1, 2))
    assert b"cloudpickle" not in file.read_bytes()
    run_function.main(file)
    assert functions.load_values(worker, 3) == {1: 3}
    assert functions.load_values(worker, 2) == {}, "of another generation"


def test_m7_a_folder_that_somebody_has_removed_costs_nothing(
    worker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = functions.save_function(worker, add, (1, 2))
    with file.open("rb") as held:
        monkeypatch.setenv("ELASTIC_ETCD_HELD_FUNCTION", f"/proc/self/fd/{held.fileno()}")
        shutil.rmtree(worker)
        run_function.main(file)
    assert functions.load_values(worker, 3) == {1: 3}
    assert worker.stat().st_mode & 0o777 == 0o700


def test_what_has_no_name_goes_by_value(worker: Path) -> None:
    much = list(range(1000))
    run_function.main(functions.save_function(worker, lambda n: sum(much) + n, (1,)))
    assert functions.load_values(worker, 3) == {1: 499501}


def test_without_cloudpickle_it_is_said_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(UsageError, match=r"lambda.*(?s:.)*module that workers can import"):
        functions.save_function(tmp_path, lambda: 0, ())
    with pytest.raises(UsageError, match=r"pip install 'elastic_etcd\[notebook\]'"):
        elastic_launch(LaunchConfig(), lambda: 0)()


@pytest.mark.parametrize(
    "main",
    [
        SimpleNamespace(__spec__=None, get_ipython=None, __file__=__file__),  # a notebook
        SimpleNamespace(__spec__=SimpleNamespace(name="package.__main__")),  # python -m package
    ],
)
def test_a_main_that_workers_can_not_import_goes_by_value(
    worker: Path, monkeypatch: pytest.MonkeyPatch, main: SimpleNamespace
) -> None:
    main.add = add
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(add, "__module__", "__main__")
    file = functions.save_function(worker, add, (2, 2))
    monkeypatch.undo()
    assert b"cloudpickle" in file.read_bytes()


def test_the_main_file_is_imported_again_only_where_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = SimpleNamespace(__spec__=None, add=add, __file__=__file__)
    monkeypatch.setitem(sys.modules, "__main__", main)

    def prepared() -> Any:
        file = functions.save_function(tmp_path, add, (2, 2))
        return pickle.loads(file.read_bytes()).get("init_main_from_path")

    assert prepared() is None
    monkeypatch.setattr(add, "__module__", "__main__")
    assert prepared() == __file__


def test_an_argument_that_cant_be_pickled_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"add and its arguments.*lock(?s:.)*in the worker"):
        functions.save_function(tmp_path, add, (1, threading.Lock()))
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_launches_itself_is_told_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from multiprocessing import current_process

    monkeypatch.setattr(current_process(), "_inheriting", True, raising=False)
    with pytest.raises(UsageError, match='if __name__ == "__main__"'):
        functions.save_function(tmp_path, add, ())


# --- values and exceptions


def test_a_value_that_cant_be_pickled_names_its_rank(worker: Path) -> None:
    run_function.main(functions.save_function(worker, threading.Lock, ()))
    with pytest.raises(
        UsageError, match=r"rank 1 returned what can't be written .*TypeError.*lock"
    ):
        functions.load_values(worker, 3)


@pytest.mark.parametrize(
    ("room", "why"), [(1000, "OSError: .*File too large"), (0, "No space left on device")]
)
def test_a_value_for_which_there_is_no_room_costs_no_training(
    room: int, why: str, worker: Path
) -> None:
    """And the room that it took is given back, for the others' values."""
    file = functions.save_function(worker, bytes, (1 << 20,))
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        run_function.main(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sum(each.stat().st_size for each in worker.iterdir() if each != file) <= room
    with pytest.raises(UsageError, match=rf"rank 1 .*{re.escape(str(worker))}: {why}(?s:.*)TMPDIR"):
        functions.load_values(worker, 3)


def test_a_value_that_cant_be_loaded_names_its_rank(worker: Path) -> None:
    run_function.main(functions.save_function(worker, add, (1, 2)))
    (worker / "3.1.pickle").write_bytes(b"cut off")
    with pytest.raises(UsageError, match="what rank 1 returned can't be loaded here"):
        functions.load_values(worker, 3)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to somebody else")
def test_values_are_read_from_a_folder_of_this_user_s_only(worker: Path) -> None:
    run_function.main(functions.save_function(worker, add, (1, 2)))
    os.chown(worker, 1, -1)
    with pytest.raises(UsageError, match=r"was removed, and is another user's now"):
        functions.load_values(worker, 3)


def test_a_rank_that_exits_0_has_returned_nothing(worker: Path) -> None:
    with pytest.raises(SystemExit):
        run_function.main(functions.save_function(worker, sys.exit, (0,)))
    assert functions.load_values(worker, 3) == {1: None}


def test_a_rank_that_exits_otherwise_has_no_value(worker: Path) -> None:
    with pytest.raises(SystemExit):
        run_function.main(functions.save_function(worker, sys.exit, (4,)))
    assert functions.load_values(worker, 3) == {}


def failure(rank: int, second: int, error_file: Path, **more: Any) -> WorkerFailure:
    fields: dict[str, Any] = {"generation": 3, "node": "n1", "exitcode": 1, "message": ""} | more
    at = f"2026-01-01T00:00:{second:02}.000+00:00"
    return WorkerFailure(
        rank=rank, local_rank=0, pid=7, error_file=str(error_file), at=at, **fields
    )


def test_torchs_error_has_each_failure_and_its_error_file(worker: Path) -> None:
    with pytest.raises(TypeError):
        run_function.main(functions.save_function(worker, add, (1, "a")))
    torn = worker / "torn.json"
    torn.write_text('{"message":')
    first = failure(2, 1, torn, exitcode=-9, message="line\nlast")
    raised = failure(1, 0, worker / "error.json")
    before = failure(0, 0, worker / "none", generation=2)
    result = RunResult("failed", "why", 1, (2, 3), 1, (before, raised, first), first, {})
    error = child_failed("add", result)
    assert isinstance(error, ElasticEtcdError)
    assert list(error.failures) == [2, 1], "the cause first, and only of the last generation"
    assert error.failures[1].error_file == str(worker / "error.json")
    assert "run_function" in error.failures[1].message["extraInfo"]["py_callstack"]
    assert error.failures[2].message["message"] == "last"
    assert "unsupported operand" in str(error)
    assert "add FAILED" in str(error)
    assert error.result is result


def seen(final: int, claimed: int, outcome: Outcome) -> RunRecord:
    """What is recorded of a run that ends when a generation is claimed after the final one."""
    writer = RunWriter()
    view = View(1, Everything(), ledger=Ledger(generation=claimed, final=final))
    state = State(Local(run="run"), 1, view=view)
    writer.see(state, Tick(), state)
    writer.see(state, JobEnded(outcome), state)
    return writer.record


def test_values_are_of_the_last_world_whatever_was_claimed_after_it() -> None:
    """All were done when a join had claimed the next generation."""
    outcome = Outcome("succeeded", "every participant is done", "run", 5, 0)
    assert seen(final=4, claimed=5, outcome=outcome).generation == 4
    of_another = "what another run has begun is not this one's"
    assert seen(final=7, claimed=7, outcome=outcome).generation == 5, of_another


def test_the_cause_may_be_another_nodes() -> None:
    """This node was a spare in the last world."""
    cause = Failure("n2", 1, 0, 7, 1, 2.0, "ValueError: theirs", "2026-01-01T00:00:00+00:00")
    record = seen(final=4, claimed=5, outcome=Outcome("failed", "why", "run", 5, 1, cause))
    (told,) = record.failures
    assert (told.node, told.rank, told.generation, record.cause) == ("n2", 1, 4, 0)
    result = RunResult("failed", "why", 1, (1, 4), 0, (told,), told, {})
    failure = child_failed("add", result).failures[1]
    assert failure.message["extraInfo"]["py_callstack"] == "ValueError: theirs"


# --- the agent


def test_what_the_launcher_refuses_is_raised() -> None:
    with pytest.raises(UsageError, match="--nonsense"):
        elastic_launch(LaunchConfig(flags=["--nonsense"]), add)(1, 2)
    with pytest.raises(UsageError, match="no-such-program: no such program"):
        elastic_launch(LaunchConfig(), "no-such-program")()
