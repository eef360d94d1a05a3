"""Messages of a run, which no terminal that is gone may end."""

from __future__ import annotations

import sys
from typing import TextIO


def say(text: object, *, error: bool = False) -> None:
    """Print a line to stdout, or to stderr where it is an `error`.

    Where that is closed nothing is printed; what its encoding lacks is written as an escape.
    """
    stream: TextIO | None = sys.stderr if error else sys.stdout
    try:
        try:
            print(text, file=stream, flush=error)
        except UnicodeEncodeError:
            print(ascii(text)[1:-1], file=stream, flush=error)
    except (OSError, ValueError):  # closed, or its reader is gone
        pass
