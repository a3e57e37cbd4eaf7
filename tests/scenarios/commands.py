"""The commands of a scenario: see README.md. Each is done at once and tells what happened."""

import shlex
from collections.abc import Iterator
from copy import deepcopy

from msgspec import UNSET
from msgspec.structs import replace

from elastic_etcd.cli.flag_values import in_multiples, nnodes
from elastic_etcd.core.failure_policies import (
    Suspect,
    rapid_failures,
    seconds_since_restart,
    suspects,
)
from elastic_etcd.core.lifecycle import (
    Answered,
    LeaseLost,
    PeerDead,
    Signalled,
    Silent,
    State,
    Tick,
    WorkerEnded,
    WorkersElastic,
    WorkersFinished,
    WorkersHang,
)
from elastic_etcd.core.peers import LOST
from elastic_etcd.core.rules import Local
from elastic_etcd.core.schema import (
    Drain,
    Failure,
    Halt,
    Phase,
    Requests,
    Scale,
    Sizes,
    TrainingPlace,
    encode,
)
from elastic_etcd.core.txn import Delete, Put, Txn
from elastic_etcd.core.view import View
from tests.scenarios.simulator import KEYS, Agent, Simulator

JOBS = (
    *("limits", "node", "form", "start", "wait", "etcd", "show"),
    *("drain", "undrain", "scale", "stop"),
)


class Commands(Simulator):
    """The simulated job that the commands change; each gives what happened, line by line."""

    def do(self, line: str) -> Iterator[str]:
        """Do one command; after "quietly", what happens is not told."""
        first, *rest = shlex.split(line)
        if first == "quietly":
            list(self.do(line.removeprefix("quietly ")))
        elif first in JOBS:
            yield from getattr(self, f"_{first}")(*rest)
        elif (first, *rest[:1]) == ("go", "on"):
            names, _, phase = " ".join(rest[1:]).partition("until")
            yield from self.go_on(names.split() or sorted(self.agents), phase.strip())
        else:
            agent = self.agents[first]
            yield from getattr(self, f"agent_{rest[0]}")(agent, *rest[1:])

    # --- commands about the job

    def _limits(self, *given: str) -> Iterator[str]:
        values = dict(pair.split("=") for pair in given)
        step = int(values.pop("multiple_of", "1"))
        asked = in_multiples(nnodes(values.pop("nnodes", "1:2")), step)
        nodes = {name: getattr(asked, name) for name in ("min_nodes", "max_nodes", "sizes")}
        whole = {name for name in values if isinstance(getattr(self.limits, name), int)}
        numbers = {name: int(v) if name in whole else float(v) for name, v in values.items()}
        self.limits = replace(self.limits, **nodes, multiple_of=step, **numbers)
        return iter(())

    def _node(self, name: str, *given: str) -> Iterator[str]:
        values = dict(pair.split("=") for pair in given)
        self.agents[name] = Agent(
            name,
            int(values.pop("nproc", "1")),
            label=values.pop("label", name),
            topology=values.pop("topology", ""),
            run=values.pop("run", "run1"),
            rerun=bool(values.pop("rerun", "")),
        )
        assert not values, values
        return iter(())

    def _form(self, *names: str) -> Iterator[str]:
        """All of them come and train, the settle time over; who does what is not told."""
        for name in names:
            list(self._start(name))
        list(self.go_on(list(names)))
        list(self._wait(str(self.limits.settle)))
        list(self.go_on(list(names)))
        yield from self._show("round")

    def _start(self, name: str) -> Iterator[str]:
        agent = self.agents.setdefault(name, Agent(name))
        agent.state = State(Local(run=""), agent.nproc)
        yield from self.join(agent)

    def _wait(self, seconds: str) -> Iterator[str]:
        """Time passes; timers that are due on the way ring."""
        end = self.clock + float(seconds)
        while due := sorted(
            (a.state.timer, a.name)
            for a in self.agents.values()
            if a.state and a.state.timer is not None and a.state.timer <= end
        ):
            at, name = due[0]
            self.clock = at
            agent = self.agents[name]
            assert agent.state is not None
            # A timer rings once; the state keeps when it was armed for.
            agent.state = replace(agent.state, timer=None)
            yield from self.event(agent, Tick())
        self.clock = end

    def _etcd(self, what: str, key: str = "", value: str = "") -> Iterator[str]:
        """Somebody's hand, with etcdctl."""
        if what == "save":
            self.saved = deepcopy(self.etcd)
            return iter(())
        if what == "restore":
            self.etcd = deepcopy(self.saved)
            return iter(())
        full = f"{KEYS.root}/{key}"
        prefix = key in ("", "history/", "acks/", "reports/", "members/")
        operation = Put(full, value) if what == "put" else Delete(full, prefix=prefix)
        self.etcd.txn(Txn((), (operation,)))
        return iter(())

    def _show(self, what: str) -> Iterator[str]:
        view = self.everything()
        if what == "round":
            yield _round(view)
        elif what == "ledger":
            yield _ledger(view)
        elif what == "suspects":
            assert view.spec
            yield from map(_suspect, suspects(view.ledger, view.spec.limits).values())
        elif what == "outcome":
            o = view.outcome
            code = f", exit code {o.exit_code}: {o.reason}" if o else ""
            yield f"{o.state}{code}" if o else "no outcome"
        elif what == "keys":
            for key, kv in sorted(self.etcd.kvs.items()):
                lease = f"  (lease {kv.lease:x})" if kv.lease else ""
                yield key.removeprefix(KEYS.root + "/") + lease
        elif what == "workers":
            for agent in self.agents.values():
                workers = f"workers of generation {agent.workers}"
                yield f"{agent.name}: {workers if agent.workers else 'no workers'}"
        else:
            raise ValueError(what)

    def _drain(self, node: str, deadline: str = "") -> Iterator[str]:
        """As `elastic-etcd drain`; a deadline is in seconds."""
        there = self._wanted()
        drain = Drain(node, float(deadline) if deadline else None, by="root")
        self._want(replace(there, drains=(*there.drains, drain)))
        return iter(())

    def _undrain(self, node: str) -> Iterator[str]:
        there = self._wanted()
        kept = tuple(drain for drain in there.drains if drain.node != node)
        self._want(replace(there, drains=kept))
        return iter(())

    def _stop(self, save: str = "") -> Iterator[str]:
        spec = self.everything().spec
        assert spec
        self._want(replace(self._wanted(), stop=Halt(spec.run, bool(save), by="root")))
        return iter(())

    def _scale(self, sizes_asked: str) -> Iterator[str]:
        spec = self.everything().spec
        assert spec
        asked = nnodes(sizes_asked)
        sizes = {name: getattr(asked, name) for name in Sizes.__struct_fields__}
        scale = Scale(**sizes, run=spec.run, instead_of=spec.limits.nnodes)
        self._want(replace(self._wanted(), scale=scale))
        return iter(())

    def _wanted(self) -> Requests:
        return self.everything().wanted or Requests()

    def _want(self, wanted: Requests) -> None:
        self.etcd.txn(Txn((), (Put(KEYS.wanted, encode(wanted)),)))

    # --- commands about one agent

    def agent_worker(self, agent: Agent, how: str, *given: str) -> Iterator[str]:
        values = dict(pair.split("=", 1) for pair in given)
        code, uptime = int(values.get("code", "1")), float(values.get("uptime", "100"))
        of_peer = values.get("of") == "peer"
        said, step = LOST if of_peer else values.get("says", ""), int(values.get("step", "0"))
        commit = values.get("commit")
        place = TrainingPlace(0, int(commit), 3, int(commit), (88, 12)) if commit else UNSET
        failed = Failure(
            *(agent.name, 0, 0, 1, code, uptime, said), step=step or UNSET, place=place
        )
        failure = failed if how == "fails" else None
        yield from self.event(agent, WorkerEnded(agent.workers, failure, of_peer))

    def agent_hangs(self, agent: Agent, *given: str) -> Iterator[str]:
        """The coordinator has found that a worker of it is behind, or nobody in particular is."""
        nobody = given == ("of=nobody",)
        node, line = ("", "nobody has moved") if nobody else (agent.name, "rank 0 is behind")
        failure = Failure(node, 0, 0, 0, 0, 100.0, hang=line)
        yield from self.event(agent, WorkersHang(agent.workers, failure))

    def agent_elastic(self, agent: Agent) -> Iterator[str]:
        """All of its workers recover in process."""
        yield from self.event(agent, WorkersElastic(agent.workers, True))

    def agent_finishes(self, agent: Agent) -> Iterator[str]:
        """A worker has left its worlds, and runs on."""
        left = f"rank 0 on {agent.name} left ee.run"
        yield from self.event(agent, WorkersFinished(agent.workers, True, left))

    def agent_leaves(self, agent: Agent) -> Iterator[str]:
        yield from self.event(agent, Signalled())

    def agent_dies(self, agent: Agent) -> Iterator[str]:
        """Agent and workers; the lease goes on."""
        agent.state, agent.txn, agent.workers, agent.joining = None, None, 0, False
        return iter(())

    def agent_expires(self, agent: Agent) -> Iterator[str]:
        """Its lease, in etcd; a live agent does not know it yet."""
        self.etcd.revoke(agent.lease)
        return iter(())

    def agent_proves(self, agent: Agent, dead: str) -> Iterator[str]:
        """That the agent of `dead` is gone; whoever proves it revokes the lease."""
        yield from self.event(agent, PeerDead(self.agents[dead].lease))

    def agent_learns(self, agent: Agent) -> Iterator[str]:
        """That its lease is gone."""
        yield from self.event(agent, LeaseLost("expired"))

    def agent_silent(self, agent: Agent, seconds: str = "0") -> Iterator[str]:
        """etcd has not answered it for so long."""
        yield from self.event(agent, Silent(float(seconds)))

    def agent_answered(self, agent: Agent) -> Iterator[str]:
        """etcd answers it again."""
        yield from self.event(agent, Answered())

    def agent_joins(self, agent: Agent) -> Iterator[str]:
        yield from self.join(agent)


def _round(view: View) -> str:
    now = view.round
    if now is None:
        return "no round"
    world = _world(view) if now.phase is Phase.FINAL else ""
    restarts = f", {now.restarts} restarts" if now.restarts else ""
    head = f"generation {now.generation} {now.phase}"
    return f"{head} [{world}]{restarts}, {now.cause}: {now.reason}"


def _world(view: View) -> str:
    return " ".join(f"{p.lease:x}" for p in view.world)


def _ledger(view: View) -> str:
    ledger = view.ledger
    last = f"generation {ledger.generation}, last world {ledger.final} [{_world(view)}]"
    since, rapid = seconds_since_restart(ledger), rapid_failures(ledger)
    trained = f", trained for {since:g} s" if since else ""
    return f"{last}, {ledger.restarts} restarts, {rapid} rapid failures{trained}"


def _suspect(suspect: Suspect) -> str:
    times = f"failed {suspect.failed} times, went {suspect.went} times"
    return f"{suspect.node}: {times}, the last time {suspect.since:g} s of training ago"
