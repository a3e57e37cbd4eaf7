"""Workers' output as lines with a prefix, in bytes: nothing is decoded, so nothing can be garbled.

Pure; a chunk costs a few passes at C speed, whatever its lines look like.
"""

_LONGEST = 1 << 16


class LinePrefixer:
    r"""Turns the chunks of one stream into whole lines that each begin with the prefix.

    A line ends with \n, \r\n or \r; a progress bar's \r stays as it is, so that the bar shows. A
    line longer than 64 KiB is cut into pieces, each a line of its own.
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._rest = bytearray()
        self._after_return = False

    def rename(self, prefix: bytes) -> bytes:
        """Begin the lines from here on with another prefix; gives the unfinished one."""
        rest = self.finish()
        self._prefix = prefix
        return rest

    def feed(self, chunk: bytes) -> bytes:
        """The lines that are complete with this chunk, prefixed; may be empty."""
        cut = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
        if not cut:
            self._rest += chunk
            return self._cut_long()
        lines = bytes(self._rest) + chunk[:cut]
        self._rest = bytearray(chunk[cut:])
        head = b""
        if self._after_return and lines.startswith(b"\n"):  # the other half of a \r\n
            head, lines = b"\n", lines[1:]
        self._after_return = chunk[cut - 1 : cut] == b"\r"
        return head + self._prefixed(lines) + self._cut_long()

    def finish(self) -> bytes:
        """The last line, when it has no line end: it gets one."""
        last = bytes(self._rest)
        self._rest.clear()
        return self._prefix + last + b"\n" if last else b""

    def _cut_long(self) -> bytes:
        if len(self._rest) < _LONGEST:
            return b""
        self._after_return = False
        return self.finish()

    def _prefixed(self, lines: bytes) -> bytes:
        prefix = self._prefix
        if not lines or not prefix:
            return lines
        out = prefix + lines
        if b"\r" in lines:
            out = out.replace(b"\r", b"\r" + prefix).replace(b"\r" + prefix + b"\n", b"\r\n")
        out = out.replace(b"\n", b"\n" + prefix)
        if b"\r" in lines:  # the empty line before a bar that begins with \r needs no prefix
            out = out.replace(prefix + b"\r" + prefix, b"\r" + prefix)
        return out[: -len(prefix)]
