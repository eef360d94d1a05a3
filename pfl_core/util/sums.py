"""Committed files: written whole or not at all, and held to the digests beside them.

SHA256SUMS has the form of sha256sum's: `sha256sum -c SHA256SUMS` checks the files by hand.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

NAME = "SHA256SUMS"


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` when all went well.

    If not, the old file stays, and an OSError says why.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise OSError(
            f"cannot write {path} ({error.strerror or error}); what was there is as it was: "
            "make room, and run it again"
        ) from error
    finally:
        part.unlink(missing_ok=True)


def file_digest(path: str | os.PathLike) -> str:
    """sha256 (hex) of a file, read piece by piece."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def known(folder: Path) -> dict[str, str]:
    """{name: hex digest} of the files that SHA256SUMS in `folder` lists, {} without one.

    Raises
    ------
    ValueError
        If it is no text, or names what lies elsewhere.
    """
    file = folder / NAME
    try:
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is damaged ({error}); restore it from git") from error
    parts = (line.partition("  ") for line in lines if line.strip())
    listed = {name: digest for digest, _, name in parts}
    for name in listed:
        if Path(name).name != name:
            raise ValueError(
                f"{file} lists {name!r}, and allowed are names of files beside it; delete this line"
            )
    return listed


def read(path: Path) -> bytes:
    """The bytes of a file, checked against SHA256SUMS beside it, if there is one.

    Raises
    ------
    ValueError
        If the digest differs, or the file or its line is missing.
    """
    listed, checked = known(path.parent), (path.parent / NAME).exists()
    raw = path.read_bytes() if path.exists() or path.name not in listed else None
    if raw is None or (checked and listed.get(path.name) != hashlib.sha256(raw).hexdigest()):
        what = "is not as it was published" if path.name in listed else "was not published"
        lists = "differs" if path.name in listed else "does not list it"
        if raw is None:
            what, lists = "is missing", "lists it"
        raise ValueError(
            f"{path} {what} ({NAME} beside it {lists}); restore it "
            f"(git restore {path.name} {NAME}, in that folder); what lies below runs/ its notebook "
            "writes again"
        )
    return raw


def write(folder: Path, new: Mapping[str, bytes]) -> None:
    """Write SHA256SUMS of `folder` anew.

    It lists `new` {name: bytes}, and of those that were listed before the ones still there.
    """
    sums = {name: digest for name, digest in known(folder).items() if (folder / name).exists()}
    sums |= {name: hashlib.sha256(raw).hexdigest() for name, raw in new.items()}
    with replacing(folder / NAME) as file:
        file.write("".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())).encode())
