"""ee.run: training that outlives its world.

A worker goes through one world after another: it initialises the process group, synchronises the
state, and trains. When the world changes or breaks, it tears the group down, keeps its process with
all that is in it, and waits at a barrier in its agent for the next one. A newly started worker
takes the same path from its beginning.
"""

import functools
import itertools
import logging
import os
import queue
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import (
    Any,
    ClassVar,
    Concatenate,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    overload,
)

import torch
import torch.distributed as dist

from elastic_etcd import protocol
from elastic_etcd.core.peers import names_lost_peer
from elastic_etcd.errors import AgentGone
from elastic_etcd.train.channel import Channel, agent
from elastic_etcd.train.process_group import ProcessGroup, init_alone, teardown_alone
from elastic_etcd.train.sync_point import WorldBroken, WorldChanged

_RUNTIME_ERRORS = {RuntimeError, getattr(torch, "AcceleratorError", RuntimeError)}

log = logging.getLogger("elastic_etcd")

P = ParamSpec("P")
R = TypeVar("R")
_Order: TypeAlias = protocol.World | protocol.Bye | protocol.Gone


class State(Protocol):
    """What `run` asks of a training's state; ElasticState is one."""

    def sync(self) -> bool:
        """Give all ranks the newest committed state among them; a collective.

        It returns whether that is of another world, alike on all ranks.
        """

    def _rewind(self) -> None:
        """Go back to the last commit, or the last sync."""

    def _reset(self) -> None:
        """The world is another one than the state comes from."""


S = TypeVar("S", bound=State)
Train = Callable[Concatenate[S, P], R]


@overload
def run(train: Train[S, P, R], /) -> Train[S, P, R]: ...
@overload
def run(
    *, backend: str | None = None, **options: Any
) -> Callable[[Train[S, P, R]], Train[S, P, R]]: ...
def run(train: Any = None, /, *, backend: str | None = None, **options: Any) -> Any:
    """Decorate `train(state, ...)`: it is called once for each world, and goes on from `state`.

    Before each call, run makes the default process group, with `backend` (None: NCCL and gloo if
    there are GPUs, else gloo) and torch's other `options` of init_process_group, and synchronises
    the state. The group is run's: make none before, and none is left after.

    When `train` returns, all is done, and what it returns is returned. Two things begin another
    world instead: a collective that fails because a peer is gone, after which the state goes back
    to its last commit; and a planned change, for which `state.check()` stops all ranks. Any other
    exception is the user's, and is raised. Raises SystemExit(0) when this worker is not needed any
    more, because its node leaves or the job has ended, and AgentGone when the agent has ended and a
    world with it.

    Without our launcher there is nobody to recover with: `train` is called once.
    """
    if train is None:
        return functools.partial(run, backend=backend, **options)

    @functools.wraps(train)
    def elastic(state: State, *args: Any, **kwargs: Any) -> Any:
        body = functools.partial(train, state, *args, **kwargs)
        channel = agent()
        if channel is None:
            return _run_without_agent(state, body, backend, options)
        return _Worker(channel, state, body, backend, options).live()

    return elastic


class _Worker:
    """This process's way through the worlds."""

    _attempts: ClassVar[defaultdict[int, Iterator[int]]] = defaultdict(itertools.count)

    def __init__(
        self,
        channel: Channel,
        state: State,
        body: Callable[[], R],
        backend: str | None,
        options: Mapping[str, Any],
    ) -> None:
        self._channel, self._state, self._body = channel, state, body
        self._backend, self._options = backend, options
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._group = self._next_group(channel.generation, os.environ)
        self._synced = False

    def live(self) -> Any:
        """Train in one world after the other; what the last training gives."""
        with self._channel.listening(self._hear):
            self._channel.elastic()
            while True:
                group, lost = self._group, ""
                try:
                    result = self._train(group)
                except WorldChanged:
                    group.barrier()
                except BaseException as error:
                    lost = _why_world_lost(group, error)
                    if not lost:
                        group.teardown(broken=True)
                        group.release()
                        raise
                else:
                    group.teardown(broken=False)
                    group.release()
                    return result
                # Out of the handlers: the traceback held the training's frames, and all in them.
                group.teardown(broken=bool(lost))
                self._park(group, lost)

    def _train(self, group: ProcessGroup) -> Any:
        group.init(self._backend, self._options)
        changed = self._state.sync()
        self._synced = True
        if changed:
            self._state._reset()  # noqa: SLF001 - ours, and not the user's to call
        return self._body()

    def _park(self, group: ProcessGroup, lost: str) -> None:
        """Wait for the next world. Raises SystemExit, AgentGone."""
        self._channel.parked("" if group.broken else lost)  # when leaving, too: an end takes time
        group.release()  # while others still park
        if group.leaving:
            raise SystemExit(0)
        if lost and self._synced:
            self._state._rewind()  # noqa: SLF001
        match self._orders.get():
            case protocol.World(generation, _, env):
                os.environ.update(env)
                self._channel.generation = generation
            case protocol.Bye():
                raise SystemExit(0)
            case protocol.Gone(reason):
                raise AgentGone(reason)

    def _next_group(self, generation: int, env: Mapping[str, str]) -> ProcessGroup:
        return ProcessGroup(generation, env, next(self._attempts[generation]))

    def _hear(self, message: protocol.FromAgent | protocol.Gone) -> None:
        """What the agent says, in the channel's thread."""
        match message:
            case protocol.Change(generation) if generation == self._group.generation:
                self._group.change(leaving=message.leaving)
            case protocol.Interrupt(generation, reason) if generation == self._group.generation:
                self._group.interrupt(reason)
            case protocol.World(generation, _, env):
                # Before anything else is heard that may be about it.
                self._group = self._next_group(generation, os.environ | env)
                self._orders.put(message)
            case protocol.Bye() | protocol.Gone():
                self._orders.put(message)


def is_communication_failure(error: BaseException, *, broken: bool) -> bool:
    """Whether `error`, or an error that it was raised from, comes from a collective that failed.

    All others are the user's own. In a world that is known to be `broken` any RuntimeError of
    torch's is taken for a result of that: what is aborted in the middle fails in many ways.
    """
    cause: BaseException | None = error
    while cause is not None:
        # QueueEmptyError and time-outs of a store come from its users' keys, too.
        if isinstance(cause, dist.DistError):
            return True
        if type(cause) in _RUNTIME_ERRORS and (broken or names_lost_peer(str(cause))):
            return True
        cause = cause.__cause__
    return False


def _why_world_lost(group: ProcessGroup, error: BaseException) -> str:
    """Why the world is lost; "" when the error is the user's own."""
    if isinstance(error, WorldBroken):
        return str(error)
    if not is_communication_failure(error, broken=bool(group.broken)):
        return ""
    first = next(iter(str(error).splitlines()), "")  # what may follow are stacks of C++
    text = f"{type(error).__name__}: {first}"
    log.warning("rank %d leaves generation %d: %s", group.rank, group.generation, text)
    return text


def _run_without_agent(
    state: State, body: Callable[[], Any], backend: str | None, options: Mapping[str, Any]
) -> Any:
    """Without an agent."""
    log.warning(
        "ee.run: no agent, so a lost peer ends this program; "
        "start it with python -m elastic_etcd.launch to recover in process"
    )
    ours = not dist.is_initialized()
    if ours:
        init_alone(backend, options)
    state.sync()
    result = body()
    if ours:
        teardown_alone()
    return result
