"""What scripts/chaos checks finds what is wrong: logs and histories that were tampered with."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scripts.chaos_lib import checker
from scripts.chaos_lib.checker import Workload, World, replay, tracebacks
from scripts.chaos_lib.history import Recorded
from scripts.chaos_lib.workload import Small
from tests.support.digits import global_batches, undisturbed

STEPS = 30  # a whole epoch and some of the next
WORLDS = {  # generation -> the nodes, when it trains, after which step it begins, and its last one
    1: (("n1", "n2"), 100.0, 0, 10),
    2: (("n1", "n3"), 200.0, 9, STEPS),
}
Line = dict[str, Any]


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return undisturbed(STEPS, Small())


def lines() -> list[Line]:
    """Two worlds of two ranks; the second takes up one step of the first again."""
    found: list[Line] = []
    batches = [[], *global_batches(STEPS)]
    for generation, (nodes, begin, after, last) in WORLDS.items():
        for rank, node in enumerate(nodes):
            where = {"generation": generation, "rank": rank}
            place = {"node": node, "world_size": 2, "local_rank": 0, "group_rank": rank}
            process = {"pid": 1 if node == "n1" else generation * 10, "restarts": generation - 1}
            event = where | place | process | {"master": f"h:{generation}"}
            found.append(event | {"event": "start", "time": begin, "step": after})
            made = 0 if generation == 1 else 1
            found.append(where | {"what": "begin", "step": after, "made": made, "node": node})
            for step in range(after + 1, last + 1):
                own = {"indices": batches[step][rank::2], "epoch": 0, "time": begin + step}
                found.append(where | own | {"what": "use", "step": step, "node": node})
                found.append(event | {"event": "step", "time": begin + step + 0.5, "step": step})
            if generation == 2:
                saved = {"what": "saved", "step": last, "asked": begin + last}
                found.append(where | saved | {"node": node})
                found.append(where | {"what": "end", "step": last, "made": 2, "node": node})
    return found


def checked(directory: Path, logged: list[Line], weights: dict[str, torch.Tensor]) -> str:
    """What Workload finds in these lines."""
    for line in logged:
        name = line["node"] + (".uses" if "what" in line else ".jsonl")
        fields = {k: v for k, v in line.items() if k != "node" or "event" in line}
        with (directory / name).open("a") as file:
            file.write(json.dumps(fields) + "\n")
    torch.save(weights, directory / "n1.0.weights")
    worlds = {
        generation: World(generation, tuple((n, 1) for n in nodes), f"h:{generation}", begin + 90)
        for generation, (nodes, begin, _, _) in WORLDS.items()
    }
    return "\n".join(Workload(directory, worlds).check())


def test_good_logs_are_not_blamed(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    assert checked(tmp_path, lines(), weights) == ""


def use(logged: list[Line], step: int, rank: int = 0) -> Line:
    """What counts of a step: the last generation's."""
    found = [e for e in logged if (e.get("what"), e["rank"]) == ("use", rank)]
    return [e for e in found if e["step"] == step][-1]


def twice(logged: list[Line]) -> None:
    use(logged, 12)["indices"].append(use(logged, 5)["indices"][0])


def missing(logged: list[Line]) -> None:
    use(logged, 12)["indices"].pop()


def another_step(logged: list[Line]) -> None:
    one, other = use(logged, 12)["indices"], use(logged, 13)["indices"]
    one[0], other[0] = other[0], one[0]


def overlapping(logged: list[Line]) -> None:
    """The first world trains on while the second begins."""
    for line in logged:
        if line["generation"] == 1 and "time" in line and line["step"] == 10:
            line["time"] += 100


def overlapping_elsewhere(logged: list[Line]) -> None:
    """The same, and no node is in both worlds."""
    overlapping(logged)
    for line in logged:
        if line["generation"] == 2 and line["node"] == "n1":
            line["node"] = "n4"


def duplicate_rank(logged: list[Line]) -> None:
    for line in logged:
        if line["generation"] == 2 and line.get("event") == "start":
            line["rank"] = 0


def another_master(logged: list[Line]) -> None:
    for line in logged:
        if line["generation"] == 2 and "event" in line:
            line["master"] = "h:7"


def stale_file(logged: list[Line]) -> None:
    saved = next(line for line in logged if line.get("what") == "saved")
    saved["asked"] += 100


@pytest.mark.parametrize(
    ("tamper", "found"),
    [
        (twice, "epoch of step 1"),
        (missing, "epoch of step 1"),
        (another_step, "step 12"),
        (overlapping, "I3: generation 1 trained on"),
        (overlapping_elsewhere, "I3: generation 1 trained on"),
        (duplicate_rank, "ranks [0, 0]"),
        (another_master, "I8"),
        (stale_file, "a stale generation has written"),
    ],
)
def test_tampered_logs_are_found_out(
    tamper: Callable[[list[Line]], None],
    found: str,
    tmp_path: Path,
    weights: dict[str, torch.Tensor],
) -> None:
    logged = lines()
    tamper(logged)
    assert found in checked(tmp_path, logged, weights)


def test_another_bit_in_the_weights_is_found_out(
    tmp_path: Path, weights: dict[str, torch.Tensor]
) -> None:
    name, tensor = next(iter(weights.items()))
    assert "same_bits" in checked(tmp_path, lines(), weights | {name: tensor * (1 + 2**-52)})


@pytest.mark.parametrize(
    ("line", "plain", "blamed"),
    [
        ("elastic_etcd[n1]: succeeded: every participant is done", False, False),
        ("Traceback (most recent call last):", True, True),
        ("elastic_etcd[n1]: error: Task exception was never retrieved", True, True),
        ("2026-11-26T08:15:10.570Z elastic_etcd[n1]: error: Exception ignored", True, True),
        ("[n1 0]: Traceback (most recent call last):", False, False),
        ("    Traceback (most recent call last):", True, True),
        ("    root cause: rank 0\n      Traceback (most recent call last):", True, False),
        (
            '[n1 0]: File "/elastic_etcd/train/run.py"\n[n1 0]: can\'t start new thread',
            False,
            False,
        ),
        ('[n1 0]:   File "/x/elastic_etcd/train/run.py", line 7, in live', True, False),
        ('[n1 0]:   File "/x/elastic_etcd/train/run.py", line 7, in live', False, True),
    ],
)
def test_tracebacks(line: str, plain: bool, blamed: bool, tmp_path: Path) -> None:
    (tmp_path / "n1.0.agent.log").write_text(f"elastic_etcd[n1]: joinable\n{line}\n")
    assert bool(tracebacks(tmp_path, plain=plain)) == blamed


# --- what etcd has recorded


def put(revision: int, key: str, lease: int = 0, version: int = 1, **value: Any) -> Recorded:
    return Recorded(float(revision), revision, False, key, json.dumps(value), version, lease)


def round_(revision: int, version: int, generation: int, phase: str, **more: Any) -> Recorded:
    nodes = {"nodes": 2 if phase == "final" else 0}
    master = {"master": {"addr": "h", "port": 1} if phase == "final" else None}
    value = {"generation": generation, "phase": phase, "coordinator": f"{1:016x}", "node": "n1"}
    fields: dict[str, Any] = nodes | master | value | more
    return put(revision, "round", 1, version, **fields)


def page(revision: int, generation: int, *nodes: int, version: int = 1) -> Recorded:
    """The world of nodes with these leases."""
    who = [
        {"lease": f"{n:016x}", "node": f"n{n}", "nproc": 1, "group_rank": i, "first_rank": i}
        for i, n in enumerate(nodes)
    ]
    fields: dict[str, Any] = {"generation": generation, "participants": who}
    return put(revision, "world/0", 0, version, **fields)


def recorded() -> list[Recorded]:
    """A job's first generation, and the claim of the second."""
    address = {"addr": "h", "port": 1}
    return [
        *(put(n + 1, f"members/{n:016x}", n, node=f"n{n}") for n in (1, 2)),
        round_(4, 1, 1, "setup"),
        put(4, "ledger", 0, 1, generation=1),
        round_(5, 2, 1, "joinable"),
        *(put(n + 5, f"acks/1/{n:016x}", n, master=address) for n in (1, 2)),
        round_(8, 3, 1, "frozen"),
        round_(9, 4, 1, "final"),
        page(9, 1, 1, 2),
        put(9, "ledger", 0, 2, generation=1),
        round_(10, 5, 2, "setup"),
        put(10, "ledger", 0, 3, generation=2),
    ]


def test_a_good_history_is_not_blamed() -> None:
    replayed = replay(recorded(), 2, 4)
    assert replayed.wrong == []
    assert replayed.worlds() == {1: World(1, (("n1", 1), ("n2", 1)), "h:1", 10.0)}


def test_a_node_that_leaves_may_save_until_the_next_world_is_frozen() -> None:
    leaves = put(10, f"members/{2:016x}", 2, 2, node="n2", leaving=True)
    events = [*recorded()[:-2], leaves, *recorded()[-2:]]
    frozen = [round_(11, 6, 2, "joinable"), round_(12, 7, 2, "frozen")]
    replayed = replay([*events, *frozen], 2, 4)
    assert replayed.wrong == []
    world = replayed.worlds()[1]
    assert (world.may_write(0), world.may_write(1)) == (10.0, 12.0)


def taken_over(**more: Any) -> list[Recorded]:
    """n1 goes, and n2 leads its round on, until it claims."""
    two = {"coordinator": f"{2:016x}", "node": "n2"}
    events = recorded()
    events[-2:] = [round_(12, 6, 2, "setup", **two), put(12, "ledger", 0, 3, generation=2)]
    last = [deleted(10, f"members/{1:016x}"), round_(11, 5, 1, "final", **two | more)]
    return [*events[:-2], *last, *events[-2:]]


def test_a_round_that_is_taken_over_is_not_blamed() -> None:
    assert replay(taken_over(), 2, 4).wrong == []


def test_e2_a_coordinator_whose_key_is_back_may_have_lost_its_place() -> None:
    own = f"members/{1:016x}"
    back = [deleted(10, own), put(11, own, 1, node="n1")]
    late = round_(12, 5, 1, "final", coordinator=f"{2:016x}", node="n2")
    assert replay([*recorded()[:-2], *back, late], 2, 4).wrong == []


def test_a_round_that_is_taken_over_must_stay_the_same() -> None:
    live = [e for e in taken_over() if not e.deleted]
    assert "its coordinator was still there" in "\n".join(replay(live, 2, 4).wrong)
    other = taken_over(master={"addr": "h", "port": 2})
    assert "a second world" in "\n".join(replay(other, 2, 4).wrong)


def deleted(revision: int, key: str) -> Recorded:
    return Recorded(float(revision), revision, True, key, "", 0, 0)


def gone(events: list[Recorded]) -> None:
    """The coordinator's lease ends before it freezes the round."""
    events.insert(7, deleted(7, f"members/{1:016x}"))


def test_who_dies_while_the_world_is_made_final_is_not_blamed() -> None:
    """The coordinator has decided before it could know."""
    ends = [deleted(8, f"acks/1/{2:016x}"), deleted(8, f"members/{2:016x}")]
    events = [replace(e, revision=e.revision + (e.revision > 7)) for e in recorded()]
    assert replay([*events[:7], *ends, *events[7:]], 2, 4).wrong == []


def not_acked(events: list[Recorded]) -> None:
    del events[6]


def one_again(events: list[Recorded]) -> None:
    events[9] = page(9, 1, 1, 1)


def one_less(events: list[Recorded]) -> None:
    events[9] = page(9, 1, 1)


def an_old_page(events: list[Recorded]) -> None:
    events[9] = page(9, 3, 1, 2)


def outcomes(*runs: str) -> list[Recorded]:
    return [
        put(n, "outcome", 0, n - 10, run=run, state="succeeded") for n, run in enumerate(runs, 11)
    ]


def test_a_run_that_somebody_stops_is_not_blamed() -> None:
    stop = put(11, "wanted", stop={"run": "r"})
    over = [put(12, "outcome", run="r", state="stopped"), deleted(13, "outcome")]
    again = put(14, "outcome", run="s", state="succeeded")
    assert replay([*recorded(), stop, *over, again], 2, 4).wrong == []


@pytest.mark.parametrize(
    ("tamper", "found"),
    [
        (lambda e: e.append(round_(11, 6, 1, "frozen")), "a stale write"),
        (lambda e: e.insert(9, round_(9, 5, 1, "final")), "I1: a second world"),
        (lambda e: e.append(put(11, f"acks/1/{2:016x}", 2, 2)), "I5: an ack in generation 2"),
        (lambda e: e.append(put(11, "ledger", 0, 4, generation=1)), "I1: generation 2"),
        (lambda e: e.append(put(11, "outcome", run="r", state="failed")), "I7: run r has failed"),
        (lambda e: e.append(put(11, "outcome", run="r", state="stopped")), "I7: run r has stopped"),
        (lambda e: e.extend(outcomes("r", "r")), "I7: a second outcome of run r"),
        (lambda e: e.extend(outcomes("r", "s")), "I7: another run after one"),
        (lambda e: e.pop(4), "events missed"),
        (gone, "I5: its coordinator's lease was gone"),
        (not_acked, "I2"),
        (one_again, "I4"),
        (one_less, "I8: ranks"),
        (an_old_page, "I8: pages"),
    ],
)
def test_a_tampered_history_is_found_out(
    tamper: Callable[[list[Recorded]], object], found: str
) -> None:
    events = recorded()
    tamper(events)
    assert found in "\n".join(replay(events, 2, 4).wrong)


def test_shared_memory_is_known_by_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is more in that folder, with numbers in its names."""
    monkeypatch.setattr(checker, "SHARED", tmp_path)
    for name in ("torch_404_77_0", "torch_77_404_404", "sem.mp-404dk67s"):
        (tmp_path / name).touch()
    job: Any = SimpleNamespace(events=lambda _: [SimpleNamespace(pid=404)])
    assert checker._shared(job) == ["torch_404_77_0"]
