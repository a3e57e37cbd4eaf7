"""User and password for a token, once for everybody who waits for it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from elastic_etcd.etcd.config import EtcdConfig
from elastic_etcd.etcd.pb import elastic_etcd_rpc_pb2 as pb
from elastic_etcd.etcd.retry import now


@dataclass(frozen=True, slots=True)
class Token:
    """What etcd gave for the password, and when. Empty: this etcd does not ask for one."""

    value: str
    issued: float

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """To send with each request."""
        return (("token", self.value),) if self.value else ()


ANONYMOUS = Token("", 0.0)


class Login:
    """Keeps one token. A login costs etcd 60 ms of CPU, so it is done once at a time."""

    def __init__(self, config: EtcdConfig) -> None:
        self.user = config.user
        self._password = config.password or ""
        self._token: Token | None = None
        self._lock = asyncio.Lock()

    async def token(
        self, authenticate: Callable[[pb.AuthenticateRequest], Awaitable[str]]
    ) -> Token:
        """The token, from `authenticate` when there is none; its errors are raised."""
        if self.user is None:
            return ANONYMOUS
        if self._token is None:
            async with self._lock:
                if self._token is None:  # nobody else got one while we waited for the lock
                    issued = now()
                    request = pb.AuthenticateRequest(name=self.user, password=self._password)
                    self._token = Token(await authenticate(request), issued)
        return self._token

    def forget(self, token: Token) -> None:
        """Forget a `token` that etcd refused: whoever comes next logs in again."""
        if self._token is token:
            self._token = None
