"""A connection to one endpoint of etcd: requests with one answer each, and streams."""

import asyncio
from collections.abc import Awaitable
from typing import Any, Generic, cast

from elastic_etcd.etcd import _grpc
from elastic_etcd.etcd._grpc import CONNECTING, EOF, Answer, Credentials, Request, Rpc
from elastic_etcd.etcd.faults import RpcFailed, Unanswered
from elastic_etcd.etcd.retry import now
from elastic_etcd.times import LOOK_UP

Metadata = tuple[tuple[str, str], ...]


class Connection:
    """A channel to `endpoint`.

    Once retired, it takes no new requests, and it closes after those under way. Whoever has a
    stream on it learns `why`.
    """

    def __init__(self, endpoint: str, credentials: Credentials | None) -> None:
        self.endpoint = endpoint
        self.retired = False
        self.why = ""
        self._began = now()
        self._named = _grpc.target(endpoint).startswith("dns:")
        self._channel = _grpc.channel(endpoint, credentials)
        self._streams: set[Any] = set()
        self._under_way = 0
        self._closing: asyncio.Task[None] | None = None

    @property
    def closed(self) -> bool:
        """Whether nothing of it is left."""
        return self._closing is not None and self._closing.done()

    @property
    def looking_up(self) -> bool:
        """Whether its name may still be looked up, which another channel would begin anew.

        TCP and TLS have a second (OPTIONS): all that lasts longer is the lookup.
        """
        connecting = self._channel.get_state() is CONNECTING
        return self._named and connecting and now() - self._began < LOOK_UP

    async def unary(
        self, rpc: Rpc[Request, Answer], request: Request, timeout: float, metadata: Metadata
    ) -> Answer:
        """Send one request; gives its answer. Raises RpcFailed, Unanswered."""
        method = self._channel.unary_unary(
            rpc.path, request_serializer=rpc.encode, response_deserializer=rpc.decode
        )
        self._under_way += 1
        try:
            answer: Answer = await _outcome(
                method(request, timeout=timeout, metadata=metadata), self
            )
            return answer
        finally:
            self._under_way -= 1
            if self.retired:
                self._close_when_idle()

    def open(
        self, rpc: Rpc[Request, Answer], metadata: Metadata, began: float
    ) -> "Stream[Request, Answer]":
        """Open a stream in both directions, which the caller closes; see Stream for `began`."""
        call = self._channel.stream_stream(
            rpc.path, request_serializer=rpc.encode, response_deserializer=rpc.decode
        )(metadata=metadata)
        self._streams.add(call)
        return Stream(self, call, began)

    def end(self, call: Any) -> None:
        """Cancel a stream."""
        call.cancel()
        self._streams.discard(call)

    def retire(self, why: str = "the client is closed") -> None:
        """End the streams now, and the channel when its last request is answered."""
        self.retired = True
        self.why = self.why or why
        for call in self._streams:
            call.cancel()
        self._close_when_idle()

    async def close(self) -> None:
        """Retire and close, whatever is under way."""
        self.retire()
        await self._channel.close()
        if self._closing is not None:
            await self._closing

    def _close_when_idle(self) -> None:
        if self._under_way == 0 and self._closing is None:
            self._closing = asyncio.create_task(self._channel.close())


class Stream(Generic[Request, Answer]):
    """A stream of requests and answers on one connection. Raises RpcFailed, Unanswered.

    `began` is when the attempt began that has not succeeded yet: whoever uses the stream sets
    it to `now()` after each success.
    """

    def __init__(self, connection: Connection, call: Any, began: float) -> None:
        self.began = began
        self._connection = connection
        self._call = call
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        call.add_done_callback(self._call_ended)

    async def write(self, request: Request) -> None:
        """Send a request. A stream that has ended says why when it is read."""
        work = asyncio.ensure_future(self._call.write(request))
        try:
            await asyncio.wait({work, self._ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()  # gRPC's write waits for ever if the call ends before it has begun
        outcome = _outcome(work, self._connection)
        del work
        try:
            await outcome
        except Unanswered:
            await self.read()

    async def read(self) -> Answer:
        """The next answer. Raises Unanswered at the stream's end."""
        answer = await _outcome(self._call.read(), self._connection)
        if answer is EOF:
            raise Unanswered("the server ended the stream")
        return cast("Answer", answer)

    def close(self) -> None:
        """Cancel what is under way."""
        call, self._call = self._call, None  # a traceback may keep this object, not the call
        self._connection.end(call)

    def _call_ended(self, _: object) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


async def _outcome(work: Awaitable[Any], connection: Connection) -> Any:
    """The result of `work`, or gRPC's error in our words.

    It is raised outside of the handler and without `work` on purpose: a traceback that holds
    a call keeps it alive, and that lets a closed channel connect again and again.
    """
    failure: Exception
    try:
        return await work
    except _grpc.RpcError as error:
        failure = RpcFailed(error.code(), error.details() or "")
    except asyncio.InvalidStateError:
        failure = Unanswered("the stream has ended")
    except asyncio.CancelledError:
        # A call that we cancelled looks in gRPC as if this task were cancelled.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        failure = Unanswered(connection.why)
    del work
    raise failure
