"""The commands of a scenario: see README.md. Each is done at once and tells what happened."""

import shlex
from collections.abc import Iterator

from msgspec.structs import replace

from elastic_etcd.core.lifecycle import (
    Answered,
    LeaseLost,
    Signalled,
    Silent,
    State,
    Tick,
    WorkerEnded,
)
from elastic_etcd.core.rules import Local
from elastic_etcd.core.schema import Failure, Ledger, Round
from elastic_etcd.core.txn import Delete, Put, Txn
from tests.scenarios.simulator import KEYS, Agent, Simulator


class Commands(Simulator):
    """The simulated job that the commands change; each gives what happened, line by line."""

    def do(self, line: str) -> Iterator[str]:
        """Do one command; after "quietly", what happens is not told."""
        first, *rest = shlex.split(line)
        if first == "quietly":
            list(self.do(line.removeprefix("quietly ")))
        elif first in ("limits", "node", "form", "start", "wait", "etcd", "show"):
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
        least, _, most = values.pop("nnodes", "1:2").partition(":")
        numbers = {name: type(getattr(self.limits, name))(v) for name, v in values.items()}
        self.limits = replace(self.limits, min_nodes=int(least), max_nodes=int(most), **numbers)
        return iter(())

    def _node(self, name: str, *given: str) -> Iterator[str]:
        values = dict(pair.split("=") for pair in given)
        self.agents[name] = Agent(
            name,
            int(values.pop("nproc", "1")),
            label=values.pop("label", name),
            topology=values.pop("topology", ""),
            run=values.pop("run", "run1"),
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

    def _etcd(self, what: str, key: str, value: str = "") -> Iterator[str]:
        """Somebody's hand, with etcdctl."""
        full = f"{KEYS.root}/{key}"
        prefix = key in ("", "history/", "acks/", "reports/", "members/")
        operation = Put(full, value) if what == "put" else Delete(full, prefix=prefix)
        self.etcd.txn(Txn((), (operation,)))
        return iter(())

    def _show(self, what: str) -> Iterator[str]:
        view = self.everything()
        if what == "round":
            yield _round(view.round)
        elif what == "ledger":
            yield _ledger(view.ledger)
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

    # --- commands about one agent

    def agent_worker(self, agent: Agent, how: str, *given: str) -> Iterator[str]:
        values = dict(pair.split("=") for pair in given)
        code, uptime = int(values.get("code", "1")), float(values.get("uptime", "100"))
        failure = Failure(agent.name, 0, 0, 1, code, uptime) if how == "fails" else None
        of_peer = values.get("of") == "peer"
        yield from self.event(agent, WorkerEnded(agent.workers, failure, of_peer))

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


def _round(now: Round | None) -> str:
    if now is None:
        return "no round"
    world = " ".join(f"{p.lease:x}" for p in now.participants)
    planned = ", planned" if now.planned else ""
    restarts = f", {now.restarts} restarts" if now.restarts else ""
    head = f"generation {now.generation} {now.phase}"
    return f"{head} [{world}]{restarts}{planned}: {now.reason}"


def _ledger(ledger: Ledger) -> str:
    ranks = " ".join(f"{lease:x}" for lease in ledger.group_ranks)
    last = f"generation {ledger.generation}, last world {ledger.final} [{ranks}]"
    trained = f", trained for {ledger.trained:g} s" if ledger.trained else ""
    return f"{last}, {ledger.restarts} restarts, {ledger.rapid_failures} rapid failures{trained}"
