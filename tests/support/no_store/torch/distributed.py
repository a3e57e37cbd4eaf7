"""As much of it as the store server takes."""


class TCPStore:
    """Holds the socket that it is given, and answers nobody: workers that tick have no group."""

    def __init__(self, *, master_listen_fd: int, **_more: object) -> None:
        self._listens_at = master_listen_fd
