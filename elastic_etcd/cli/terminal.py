"""Text from other nodes on a user's terminal."""


def shown(text: str) -> str:
    """Without what could steer a terminal: names, reasons and tracebacks are anybody's."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)
