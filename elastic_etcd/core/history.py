"""What `history/GENERATION` holds: why a world began and ended, for people to read."""

from elastic_etcd.core.fields import Fields, inner, items, number, objects, text
from elastic_etcd.core.keys import decode
from elastic_etcd.core.values import Failure, Outcome

_NUMBERS = ("generation", "world_size", "restarts")
_TEXTS = ("run", "began", "began_at", "coordinator", "ended", "ended_at")
_KNOWN = {*_NUMBERS, *_TEXTS, "nodes", "failures", "outcome"}


def read(value: str) -> Fields:
    """The fields of an entry that this program knows. Raises ValueError for a malformed one.

    What else somebody has put there is left out: an entry is written again when its world ends.
    """
    fields = {name: field for name, field in decode(value).items() if name in _KNOWN}
    for name in fields.keys() & set(_NUMBERS):
        number(fields, name)
    for name in fields.keys() & set(_TEXTS):
        text(fields, name)
    for node in items({"nodes": []} | fields, "nodes"):
        text({"node": node}, "node")
    if "failures" in fields:
        told = objects(fields, "failures")
        fields["failures"] = [Failure.decode(failure).encode() for failure in told]
    if "outcome" in fields:
        fields["outcome"] = Outcome.decode(inner(fields, "outcome") or {}).fields()
    number(fields, "generation")
    return fields
