"""gRPC without its own log, which repeats our errors on stderr in its own words."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "GRPC_VERBOSITY"


@contextmanager
def quiet() -> Iterator[None]:
    """Import gRPC and make its channels in this scope; a user's own GRPC_VERBOSITY stays.

    gRPC reads the variable at the import and when it starts. Afterwards it has to go, or the
    workers would inherit it.
    """
    asked_for = VARIABLE in os.environ
    if not asked_for:
        os.environ[VARIABLE] = "NONE"
    try:
        yield
    finally:
        if not asked_for:
            del os.environ[VARIABLE]
