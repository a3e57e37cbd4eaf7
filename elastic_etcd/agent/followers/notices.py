"""Notices that this machine is about to be taken away: of a cloud's metadata service, or a file.

A thread looks, because each look may wait. It uses no proxy: the services are on this machine's own
link. An agent loads this module with --preemption-watch only.

Documented by the clouds as "Spot Instance interruption notices", "Spot VMs: preemption process" and
"Scheduled Events for Linux VMs".
"""

import json
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from elastic_etcd.agent.inbox import Notice
from elastic_etcd.core.lifecycle import Event, Left, Life, State
from elastic_etcd.system.threads import in_thread
from elastic_etcd.times import APPROVE_TIMEOUT, NOTICE_TIMEOUT

METADATA = "ELASTIC_ETCD_METADATA"  # HOST:PORT of another metadata service, for tests
_SERVICE = "169.254.169.254:80"
_LONG_POLL = 60
_FIRST_ANSWER = 130.0  # Azure's first may take two minutes
_TOKEN_LIFE = "21600"  # noqa: S105 - seconds, the most
_LARGEST = 1 << 16  # bytes of an answer
_MOST = 1e6  # seconds that a file may say
_SELDOM = 12  # times the period, while nobody answers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of a metadata service."""

    status: int
    headers: Mapping[str, str]
    text: str

    def must_be(self, *known: int) -> None:
        """Raises ValueError for another status."""
        if self.status not in known:
            raise ValueError(f"status {self.status}")


class Source(ABC):
    """A source of notices; it is asked each `period` seconds, in one thread."""

    period = 1.0

    @abstractmethod
    def look(self) -> Notice | None:
        """A notice, if there is one. Raises whatever a look may meet."""

    def approve(self) -> None:  # noqa: B027 - most have nobody to tell
        """Say that nothing runs here any more. Raises as `look`."""


class FileSource(Source):
    """A file that somebody makes; it may hold a number of seconds."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._empty = False

    def look(self) -> Notice | None:
        try:
            text = self._path.read_text(errors="replace").strip()
        except FileNotFoundError:
            return None
        if not text and not self._empty:  # it may be written to right now
            self._empty = True
            return None
        return Notice(f"{self._path} is there", _number(text))


class _Service(Source):
    def __init__(self) -> None:
        self._address = os.environ.get(METADATA) or _SERVICE

    def _ask(
        self,
        path: str,
        headers: Mapping[str, str],
        method: str = "GET",
        body: str | None = None,
        timeout: float = NOTICE_TIMEOUT,
    ) -> Answer:
        connection = HTTPConnection(self._address, timeout=timeout)
        try:
            connection.request(method, path, body, dict(headers))
            answer = connection.getresponse()
            text = answer.read(_LARGEST).decode(errors="replace")
            names = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, names, text)
        finally:
            connection.close()


class Aws(_Service):
    """A spot instance's interruption notice, two minutes before; with IMDSv2's token."""

    period = 5.0
    _token = ""

    def look(self) -> Notice | None:
        if not self._token:
            life = {"X-aws-ec2-metadata-token-ttl-seconds": _TOKEN_LIFE}
            answer = self._ask("/latest/api/token", life, "PUT")
            answer.must_be(200)
            self._token = answer.text.strip()
        answer = self._ask(
            "/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": self._token}
        )
        if answer.status == 401:
            self._token = ""  # it was too old
            return None
        answer.must_be(200, 404)
        if answer.status == 404:
            return None
        found = json.loads(answer.text)
        seconds = _until(datetime.fromisoformat, found["time"], 180.0)
        return Notice(f"aws: {found['action']} at {found['time']}", seconds)


class Gcp(_Service):
    """A spot VM's preemption, 30 seconds before; the service answers when it changes."""

    _etag = ""

    def look(self) -> Notice | None:
        path = "/computeMetadata/v1/instance/preempted"
        if self._etag:
            path += f"?wait_for_change=true&timeout_sec={_LONG_POLL}&last_etag={self._etag}"
        answer = self._ask(path, {"Metadata-Flavor": "Google"}, timeout=_LONG_POLL + NOTICE_TIMEOUT)
        answer.must_be(200)
        if answer.headers.get("metadata-flavor") != "Google":
            raise ValueError("this is not Google's metadata service")
        self._etag = answer.headers.get("etag", "")
        return Notice("gcp: preempted", 30.0) if answer.text.strip() == "TRUE" else None


@dataclass
class _Event:
    id: str
    kind: str
    not_before: str

    @property
    def seconds(self) -> float | None:
        """Until it may begin at the soonest; None once it has begun."""
        return _until(parsedate_to_datetime, self.not_before, 900.0)


class Azure(_Service):
    """A scheduled event that takes this VM away; it is approved when nothing runs any more."""

    period = 2.0
    _path = "/metadata/scheduledevents?api-version=2020-07-01"
    _name = ""
    _timeout = _FIRST_ANSWER
    _event: _Event | None = None

    def look(self) -> Notice | None:
        if not self._name:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            answer = self._ask(path, {"Metadata": "true"})
            answer.must_be(200)
            self._name = answer.text.strip()
        answer = self._ask(self._path, {"Metadata": "true"}, timeout=self._timeout)
        answer.must_be(200)
        self._timeout = NOTICE_TIMEOUT
        self._event = self._own(json.loads(answer.text)["Events"])
        if self._event is None:
            return None
        what = f"azure: {self._event.kind} of {self._name} at {self._event.not_before or 'once'}"
        return Notice(what, self._event.seconds)

    def _own(self, events: list[dict[str, Any]]) -> _Event | None:
        """The first that takes this VM away; the document is of all that are in its group."""
        for event in events:
            if event["EventType"] in ("Preempt", "Terminate") and self._name in event["Resources"]:
                return _Event(event["EventId"], event["EventType"], event["NotBefore"])
        return None

    def approve(self) -> None:
        if self._event:
            body = json.dumps({"StartRequests": [{"EventId": self._event.id}]})
            self._ask(self._path, {"Metadata": "true"}, "POST", body).must_be(200)


SOURCES: dict[str, Callable[[], Source]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}


def source_of(text: str) -> Source:
    """The source that --preemption-watch names: one of SOURCES, or file:PATH."""
    kind, _, path = text.partition(":")
    return FileSource(path) if kind == "file" else SOURCES[kind]()


def _number(text: str) -> float | None:
    try:
        return _within(float(text), _MOST)
    except ValueError:
        return None


def _until(parse: Callable[[str], datetime], time: str, most: float) -> float | None:
    """Seconds until then. None if that is no time, or not so soon: then a clock is wrong."""
    try:
        return _within((parse(time) - datetime.now(UTC)).total_seconds(), most)
    except (ValueError, TypeError):
        return None


def _within(seconds: float, most: float) -> float | None:
    return seconds if 0 < seconds <= most else None


class Watch:
    """Looks for a notice, in a thread of its own, until it has found one or is closed.

    `found(notice)` is called in that thread, once.
    """

    def __init__(self, name: str, found: Callable[[Notice], None]) -> None:
        self.source = source_of(name)
        self._name = name
        self._found = found
        self._ended = threading.Event()
        self._fails = False
        self._has_left = False
        threading.Thread(target=self._look_for_notices, name="notices", daemon=True).start()

    def see(self, before: State, event: Event, state: State) -> None:
        """Take note whether this node has left its job."""
        del before, event
        self._has_left = state.life is Life.ENDED and isinstance(state.ending, Left)

    async def close(self) -> None:
        """Look no more. The machine of a node that has left may go at once."""
        self._ended.set()
        if self._has_left:
            with suppress(TimeoutError):
                await in_thread(self.approve, APPROVE_TIMEOUT)

    def approve(self) -> None:
        """Nothing runs here any more: the machine may go at once."""
        try:
            self.source.approve()
        except Exception as error:  # noqa: BLE001 - it is only told
            log.warning("--preemption-watch %s: not approved: %s", self._name, error)

    def _look_for_notices(self) -> None:
        pause = 0.0
        while not self._ended.wait(pause):
            pause = self.source.period
            try:
                notice = self.source.look()
            except Exception as error:  # noqa: BLE001 - whatever is answered, training goes on
                pause *= _SELDOM
                self._note_failure(error)
                continue
            if self._fails:
                log.info("--preemption-watch %s: answers", self._name)
            self._fails = False
            if notice:
                self._found(notice)
                return

    def _note_failure(self, error: Exception) -> None:
        if not self._fails:
            log.warning(
                "--preemption-watch %s: nothing can be seen there, and it is tried again: %s",
                *(self._name, error or type(error).__name__),
            )
        self._fails = True
