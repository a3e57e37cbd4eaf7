"""What a script may say of its activity, so that its agent knows a hang from a long pause."""

from contextlib import AbstractContextManager

from elastic_etcd.protocol import activity
from elastic_etcd.protocol.activity import Doing


def heartbeat() -> None:
    """Say that a step of training has ended; call it at the same places on all ranks.

    Only a script needs it that trains without an optimizer of torch's and without
    `ElasticState.check`. After the first call in a world only these calls count as steps. It makes
    no system call and takes about a microsecond. Without our launcher it does nothing.
    """
    activity.step()


def quiet(what: str) -> AbstractContextManager[None]:
    """While this is open no step is expected: `with ee.quiet("evaluation"): ...`.

    what: a word for the messages, of which 128 bytes are kept.
    """
    return activity.during(Doing.QUIET, what)
