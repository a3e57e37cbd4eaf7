"""ee.run: training that outlives its world.

A worker goes through one world after another: form the process group, synchronise the state,
train. When the world changes or breaks it drops the group, keeps its process with all that is in
it, and waits at a barrier in its agent for the next one. A newly started worker takes the same
path from its beginning.
"""

import functools
import gc
import itertools
import logging
import os
import queue
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Concatenate, ParamSpec, Protocol, TypeVar, overload

import torch.distributed as dist

from elastic_etcd.errors import AgentGone
from elastic_etcd.train.boundary import WorldBroken, WorldChanged
from elastic_etcd.train.channel import Channel, agent
from elastic_etcd.train.failures import is_communication_failure
from elastic_etcd.train.world import World, form_alone

log = logging.getLogger("elastic_etcd")

P = ParamSpec("P")
R = TypeVar("R")


class State(Protocol):
    """What `run` asks of a training's state; ElasticState is one."""

    def sync(self) -> bool:
        """All ranks get the newest committed state among them; whether another world's. Collective.

        The same answer on all ranks.
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

    Before each call the default process group is made, with `backend` (NCCL and gloo if there are
    GPUs, else gloo) and torch's other `options` of init_process_group, and the state is
    synchronised. The group is run's: make none before, and none is left after.

    What `train` returns ends it. A collective that fails because a peer is gone does not: the
    state goes back to its last commit, and another world follows. Nor does a planned change,
    for which `state.check()` stops all ranks. Any other exception is the user's, and is raised.
    SystemExit(0) says that this worker is not needed any more: its node leaves or the job has
    ended. Raises AgentGone when the agent has ended and a world with it.

    Without our launcher there is nobody to recover with: `train` is called once.
    """
    if train is None:
        return functools.partial(run, backend=backend, **options)

    @functools.wraps(train)
    def elastic(state: State, *args: Any, **kwargs: Any) -> Any:
        body = functools.partial(train, state, *args, **kwargs)
        channel = agent()
        if channel is None:
            return _once(state, body, backend, options)
        return _Worker(channel, state, body, backend, options).live()

    return elastic


class _Worker:
    """This process's way through the worlds."""

    _begun: ClassVar[defaultdict[int, Iterator[int]]] = defaultdict(itertools.count)

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
        self._next: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._world = self._make(channel.generation, os.environ)
        self._synced = False

    def live(self) -> Any:
        """Train in one world after the other; what the last training gives."""
        with self._channel.listening(self._heard):
            self._channel.elastic()
            while True:
                world, lost = self._world, ""
                try:
                    result = self._train(world)
                except WorldChanged:
                    world.meet()
                except BaseException as error:
                    lost = _why_lost(world, error)
                    if not lost:
                        world.drop(broken=True)
                        world.collect()
                        raise
                else:
                    world.drop(broken=False)
                    world.collect()
                    return result
                # Out of the handlers: the traceback held the training's frames, and all in them.
                world.drop(broken=bool(lost))
                self._park(world, lost)

    def _train(self, world: World) -> Any:
        world.form(self._backend, self._options)
        changed = self._state.sync()
        self._synced = True
        if changed:
            self._state._reset()  # noqa: SLF001 - ours, and not the user's to call
        return self._body()

    def _park(self, world: World, lost: str) -> None:
        """Wait for the next world. Raises SystemExit, AgentGone."""
        self._channel.parked("" if world.broken else lost)  # when leaving, too: an end takes time
        world.collect()  # while others still park
        if world.leaving:
            raise SystemExit(0)
        if lost and self._synced:
            self._state._rewind()  # noqa: SLF001
        message = self._next.get()
        if message["type"] == "bye":
            raise SystemExit(0)
        if message["type"] == "gone":
            raise AgentGone(message["reason"])
        os.environ.update(message["env"])
        self._channel.generation = message["generation"]

    def _make(self, generation: int, env: Mapping[str, str]) -> World:
        return World(generation, env, next(self._begun[generation]))

    def _heard(self, message: dict[str, Any]) -> None:
        """What the agent says, in the channel's thread."""
        here = message.get("generation") == self._world.generation
        match message["type"]:
            case "change" if here:
                self._world.change(leaving=message["leaving"])
            case "interrupt" if here:
                self._world.interrupt(message["reason"])
            case "world":
                # Before anything else is heard that may be about it.
                self._world = self._make(message["generation"], os.environ | message["env"])
                self._next.put(message)
            case "bye" | "gone":
                self._next.put(message)


def _why_lost(world: World, error: BaseException) -> str:
    """Why the world is lost; "" when the error is none of the world's."""
    if isinstance(error, WorldBroken):
        return str(error)
    if not is_communication_failure(error, broken=bool(world.broken)):
        return ""
    first = next(iter(str(error).splitlines()), "")  # what may follow are stacks of C++
    text = f"{type(error).__name__}: {first}"
    log.warning("rank %d leaves generation %d: %s", world.rank, world.generation, text)
    return text


def _once(
    state: State, body: Callable[[], Any], backend: str | None, options: Mapping[str, Any]
) -> Any:
    """Without an agent."""
    log.warning(
        "ee.run: no agent, so a lost peer ends this program; "
        "start it with python -m elastic_etcd.launch to recover in process"
    )
    ours = not dist.is_initialized()
    if ours:
        form_alone(backend, options)
    state.sync()
    result = body()
    if ours:
        gc.collect()
        dist.destroy_process_group()
    return result
