"""ee.run: training that outlives its world.

A worker goes through one world after another: it initialises the process group, synchronises the
state, and trains. When the world changes or breaks, it tears the group down, keeps its process with
everything in it, and waits at a barrier in its agent for the next one. A newly started worker
takes the same path from its beginning.
"""

import functools
import inspect
import itertools
import logging
import multiprocessing
import os
import queue
import time
import traceback
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple, ParamSpec, TypeAlias, TypeVar, overload

import torch
import torch.distributed as dist

from elastic_etcd.core.peers import names_lost_peer, names_own_mistake
from elastic_etcd.core.words import counted
from elastic_etcd.errors import AgentGone, UsageError, WrongHere
from elastic_etcd.protocol import activity, messages
from elastic_etcd.system.process_title import show_rank
from elastic_etcd.train import ddp, sync_point
from elastic_etcd.train.agent_channel import Channel, agent
from elastic_etcd.train.collectives import World, gather
from elastic_etcd.train.process_group import ProcessGroup, init_agentless, teardown_agentless
from elastic_etcd.train.state.elastic_state import ElasticState

_NO_STEP = -1  # not even the step that was under way
_LONGEST_TRACEBACK = 3000  # characters in a report; the error stands at its end
_NO_TRAINING = (
    inspect.isgeneratorfunction,
    inspect.iscoroutinefunction,
    inspect.isasyncgenfunction,
)
_RUNTIME_ERRORS = {RuntimeError, getattr(torch, "AcceleratorError", RuntimeError)}

log = logging.getLogger("elastic_etcd")

P = ParamSpec("P")
R = TypeVar("R")
_Order: TypeAlias = messages.NextWorld | messages.Bye | messages.Gone


@overload
def run(train: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def run(
    *, backend: str | None = None, **options: Any
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def run(train: Any = None, /, *, backend: str | None = None, **options: Any) -> Any:
    """Decorate `train(state)`: it is called once for each world, and goes on from `state`.

        @ee.run
        def train(state):
            for batch in state.steps(loader):
                step(model, batch)

        train(ee.ElasticState(model=model, optimizer=optimizer, sampler=sampler))

    backend: of the default process group, which run makes before each call; None: NCCL and gloo if
    there are GPUs, else gloo. options: torch's others of init_process_group. The group is run's:
    make none before, and none is left after. Then run synchronises the state, which is the first
    ElasticState among the arguments: `train` may be a method, and may have others.

    When `train` returns in a whole world, all is done, and run returns its value; in a broken one
    it is called again for the next. Once all is done this process is a plain one: SIGTERM stops it,
    and no world begins for newcomers before its end. Two events begin another world instead: a
    collective fails because a peer is gone, and the state goes back to its last commit; or a change
    is planned, and `state.check()` stops all ranks.

    Any other exception is the user's, and is raised; but with NCCL not in a world that is broken,
    where collectives that were aborted give garbage. Raises UsageError on all ranks if they are in
    different calls of it: one was started anew while the others were in their second, and now all
    begin at the first; also if multiprocessing has imported the script for a process of its own,
    such as a data loader's. Raises SystemExit(0) when this worker is not needed any more, because
    its node leaves or the job has ended, and AgentGone when the agent has ended and a world with
    it. Without our launcher there is nobody to recover with: `train` is called once. See
    docs/state.md. Raises UsageError for a generator or `async def`, whose call trains nothing.
    """
    if train is None:
        return functools.partial(run, backend=backend, **options)
    name = getattr(train, "__qualname__", "train")
    if any(kind(train) for kind in _NO_TRAINING):
        raise UsageError(f"ee.run: a call of {name} only makes a generator or coroutine: use `def`")

    @functools.wraps(train)
    def elastic(*args: Any, **kwargs: Any) -> Any:
        _refuse_where_main_is_imported()
        given = (each for each in (*args, *kwargs.values()) if isinstance(each, ElasticState))
        state = next(given, None)
        if state is None:
            raise UsageError(f"ee.run: {name} needs its ElasticState as an argument")
        _tell_undone(state)
        body = functools.partial(train, *args, **kwargs)
        channel = agent()
        if channel is None:
            return _run_without_agent(state, body, backend, options)
        return _Worker(channel, state, body, name, backend, options).live()

    return elastic


def _refuse_where_main_is_imported() -> None:
    """Multiprocessing's fork server, the default from Python 3.14 on, would join the world, too."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as it asks itself
        raise UsageError(
            "ee.run was called while multiprocessing imported this script once more, for a process "
            "of its own such as a data loader's.\n"
            'Put what begins the training under `if __name__ == "__main__":`.'
        )


def _tell_undone(state: ElasticState) -> None:
    """Another run has trained this state, or a loop: what is in no commit goes with the sync."""
    if state._calls and not state._at_commit and os.environ.get("RANK", "0") == "0":
        log.warning(
            "ee.run goes on from the state's last commit, without the %s since then: call"
            " state.commit() at the end of the training before, to keep that",
            counted(state._calls, "step"),
        )


class _Ended(NamedTuple):
    """The end of the world before."""

    here: bool  # in this process
    at: int  # nanoseconds
    again: int  # whole steps that are trained again, or _NO_STEP

    def cost(self) -> str:
        """The time and the steps that it has cost until now, in words."""
        again = {_NO_STEP: "nothing", 0: "the step under way"}
        steps = again.get(self.again, f"{counted(self.again, 'step')} and the one under way")
        return f" after {(time.monotonic_ns() - self.at) / 1e9:.2f} s; trained again: {steps}"


class _Worker:
    """This process's way through the worlds."""

    _attempts: ClassVar[defaultdict[int, Iterator[int]]] = defaultdict(itertools.count)
    _calls: ClassVar[Iterator[int]] = itertools.count(1)

    def __init__(
        self,
        channel: Channel,
        state: ElasticState,
        body: Callable[[], R],
        name: str,
        backend: str | None,
        options: Mapping[str, Any],
    ) -> None:
        self._channel, self._state, self._body = channel, state, body
        self._name, self._call = name, next(self._calls)
        self._backend, self._options = backend, options
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._group = self._next_group(channel.generation, os.environ)
        self._synced = False  # ever, so that there is something to go back to
        self._begun = False  # in this world
        self._ended: _Ended | None = None

    def live(self) -> Any:
        """Train in one world after the other; the value is the last training's."""
        with self._channel.listening(self._receive):
            self._channel.send(messages.Elastic())
            while True:
                group, lost, again = self._group, "", _NO_STEP
                try:
                    result = self._train(group)
                except sync_point.WorldChanged:
                    group.barrier()
                except BaseException as error:
                    lost = self._why_lost(group, error)
                    if not lost:
                        self._leave_worlds(group, broken=True)
                        raise
                    again = self._state._uncommitted() if self._begun else _NO_STEP
                else:
                    self._leave_worlds(group, broken=False)
                    return result
                # Out of the handlers: the traceback held the training's frames, and all in them.
                self._ended = _Ended(here=True, at=time.monotonic_ns(), again=again)
                self._state._end_world()
                group.teardown(broken=bool(lost))
                group.release()
                self._park(group, lost)
                group.unhook()

    def _train(self, group: ProcessGroup) -> Any:
        self._begun = False
        _enable_loggers()
        with activity.during(activity.Doing.INIT):
            group.init(self._backend, self._options)
            ended = self._meet(group)
            changed = self._state.sync()
        self._synced = self._begun = True
        self._ended = None
        if group.rank == 0 and (changed or ended):
            log.warning("%s", self._describe_change(group, ended))
        ddp.make()
        if changed:
            self._state._reset(World(group.generation, group.rank, group.world_size))
        try:
            result = self._body()
        except sync_point.WorldChanged:
            self._state._leave(leaves=group.leaving)
            raise
        sync_point.current().raise_if_broken()  # garbage may have said that all is done
        self._state._finish()
        return result

    def _meet(self, group: ProcessGroup) -> _Ended | None:
        """The end of the world before as its survivors know it; None if there are none.

        Raises UsageError, on all ranks, where they are in other calls of ee.run.
        """
        now, ended = time.monotonic_ns(), self._ended
        known = (now - ended.at, ended.again) if ended else (-1, _NO_STEP)
        rows = gather([self._call, zlib.crc32(self._name.encode()), *known])
        calls = [row[:2] for row in rows]
        if any(call != calls[0] for call in calls):
            first, last = min(calls)[0], max(calls)[0]
            raise WrongHere(
                f"rank {group.rank} is in call {self._call} of ee.run ({self._name}), others are"
                f" in calls {first} to {last}: a worker that is started anew begins at the first."
                " Train in one function, with a value of the state that says what comes next"
            )
        nanoseconds, again = max(row[2] for row in rows), max(row[3] for row in rows)
        if nanoseconds < 0:
            return None
        return _Ended(ended is not None, now - nanoseconds, again)

    def _describe_change(self, group: ProcessGroup, ended: _Ended | None) -> str:
        """The line that a user reads of a change."""
        why = f" ({self._channel.reason})" if self._channel.reason else ""
        place = f"generation {group.generation}{why}: rank 0 of {group.world_size}"
        line = f"{place} goes on from {self._state._position()}"
        anew = "" if ended and ended.here else " in a new process"
        return f"{line}{anew}{ended.cost() if ended else ''}"

    def _leave_worlds(self, group: ProcessGroup, *, broken: bool) -> None:
        """First of all say so: the agent's messages from now on have no reader."""
        activity.done()
        with suppress(AgentGone):
            self._channel.send(messages.TrainingDone())
        group.teardown(broken=broken)
        group.release()

    def _why_lost(self, group: ProcessGroup, error: BaseException) -> str:
        """Why the world is lost; "" when the error is the user's own.

        In a world that is known to be broken two are no mistakes of the user's: one before the
        state is synchronised comes from the remains of an abort, and one after a collective of
        NCCL's that was aborted may come from its garbage, such as a loss of NaN or a flag to stop.
        Such a mistake would come again in the next world.
        """
        _enable_loggers()  # training may have set up logging
        broken = bool(group.broken)
        if isinstance(error, sync_point.WorldBroken):  # the agent's word, or what a commit has met
            return str(error) if broken else _report_error(group, error)
        unready = isinstance(error, Exception) and broken and not self._begun
        misled = isinstance(error, Exception | SystemExit) and group.tells_garbage()
        if not (unready or misled or is_communication_failure(error, broken=broken)):
            return ""
        return _report_error(group, error)

    def _park(self, group: ProcessGroup, lost: str) -> None:
        """Wait for the next world. Raises SystemExit, AgentGone."""
        if not group.leaving:  # else the others wait for this process's end: it may save
            why = group.own_reason if group.broken else lost
            self._channel.send(messages.Parked(self._channel.generation, why))
        if lost and self._synced:
            self._state._rewind()
        if group.leaving:
            raise SystemExit(0)
        match self._orders.get():
            case messages.NextWorld(generation, reason, env):
                os.environ.update(env)
                show_rank(os.environ["RANK"])
                self._channel.generation, self._channel.reason = generation, reason
            case messages.Bye():
                raise SystemExit(0)
            case messages.Gone(reason):
                raise AgentGone(reason)

    def _next_group(self, generation: int, env: Mapping[str, str]) -> ProcessGroup:
        return ProcessGroup(generation, env, next(self._attempts[generation]))

    def _receive(self, message: messages.FromAgent | messages.Gone) -> None:
        """A message of the agent's, in the channel's thread."""
        match message:
            case messages.Change(generation) if generation == self._group.generation:
                self._group.change(leaving=message.leaving)
            case messages.Interrupt(generation, reason) if generation == self._group.generation:
                self._group.interrupt(reason)
            case messages.NextWorld(generation, _, env):
                # Before any other message that may be about it.
                self._group = self._next_group(generation, os.environ | env)
                self._orders.put(message)
            case messages.Bye() | messages.Gone():
                self._orders.put(message)


def is_communication_failure(error: BaseException, *, broken: bool) -> bool:
    """Whether `error`, or an error that it was raised from, comes from a collective that failed.

    All others are the user's own, also those in which NCCL or a DataLoader speak of the script
    itself. In a world that is known to be `broken` any RuntimeError of torch's is taken for a
    result of that: a call that is aborted in the middle fails in many ways.
    """
    cause: BaseException | None = error
    while cause is not None:
        # QueueEmptyError and time-outs of a store come from its users' keys, too.
        if isinstance(cause, dist.DistError) and (broken or not names_own_mistake(str(cause))):
            return True
        if type(cause) in _RUNTIME_ERRORS and (broken or names_lost_peer(str(cause))):
            return True
        cause = cause.__cause__
    return False


def _report_error(group: ProcessGroup, error: BaseException) -> str:
    """Log a lost peer's effect on this rank; for its report, with the end of the traceback."""
    first = next(iter(str(error).splitlines()), "")  # stacks of C++ may follow
    text = f"{type(error).__name__}: {first}"
    log.warning("rank %d leaves generation %d: %s", group.rank, group.generation, text)
    log.debug("rank %d was there:", group.rank, exc_info=error)
    stack = "".join(traceback.format_exception(error))
    return f"{text}\n{stack[-_LONGEST_TRACEBACK:]}"


def _enable_loggers() -> None:
    """Enable our loggers again: logging.config disables all that are there before it.

    A worker that is forked has ours before its script begins. Levels and handlers stay the user's.
    """
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.partition(".")[0] == log.name and isinstance(logger, logging.Logger):
            logger.disabled = False


def _run_without_agent(
    state: ElasticState, body: Callable[[], Any], backend: str | None, options: Mapping[str, Any]
) -> Any:
    """Without an agent."""
    log.warning(
        "ee.run: no agent, so a lost peer ends this program; "
        "start it with python -m elastic_etcd.launch to recover in process"
    )
    ours = not dist.is_initialized()
    if ours:
        init_agentless(backend, options)
    state.sync()
    ddp.make()
    result = body()
    state._finish()
    if ours:
        teardown_agentless()
    return result
