"""The environment in which gRPC starts: without its own log, and without its fork handlers."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def grpc_startup() -> Iterator[None]:
    """Import gRPC and make its channels in this scope.

    gRPC reads these variables at the import and when it starts. Afterwards they have to be as
    they were, or the workers would inherit them.
    """
    wanted = {
        # Its log repeats our errors in its own words; whoever asks for it gets it.
        "GRPC_VERBOSITY": os.environ.get("GRPC_VERBOSITY", "NONE"),
        # Unset, one forked child in six crashes (grpcio 1.85); set to 1, it hangs.
        "GRPC_ENABLE_FORK_SUPPORT": "0",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
