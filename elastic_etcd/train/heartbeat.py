"""A script's own word of its activity, so that its agent knows a hang from a long pause.

It is apart from the channel, which takes long to import: a signal's handler that asks
`ee.leaving()` while `ee.heartbeat` is imported must not find half of a module.
"""

from contextlib import AbstractContextManager

from elastic_etcd.protocol import activity


def heartbeat(step: int | None = None) -> None:
    """Say that a step of training has ended; call it at the same places on all ranks.

        for batch in loader:
            train(batch)
            ee.heartbeat()

    Only a script needs it that trains without an optimizer of torch's and without
    `ElasticState.check`. After the first call in a world only these calls count as steps. It makes
    no system call and takes about a microsecond. Without our launcher it does nothing. It raises
    nothing. docs/hangs.md says how a hang is found.

    step: of the whole training, from 0; after a checkpoint it goes on from there. By it
    `--stop-after-no-progress` knows that a script fails again and again at one place.
    """
    activity.step()
    if step is not None and (page := activity.own_page()):
        page.reach(step)


def quiet(what: str) -> AbstractContextManager[None]:
    """While this is open no step is expected, so that a long pause is no hang.

        with ee.quiet("evaluation"):
            evaluate(model)

    what: a word for the messages, of which 128 bytes are kept. It raises nothing, and does nothing
    without our launcher. docs/hangs.md says how a hang is found.
    """
    return activity.during(activity.Doing.QUIET, what)
