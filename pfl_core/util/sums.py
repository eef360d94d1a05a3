"""Committed files: written whole or not at all, and held to the digests beside them.

SHA256SUMS has the form of sha256sum's: `sha256sum -c SHA256SUMS` checks the files by hand.

Files of a folder change together (`put`). The new ones are written to a hidden folder in it, which
is then renamed to `.next`: from that moment on they count. They are moved to their places by the
process that wrote them, or, if it was killed, by the next one that reads or writes there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

NAME = "SHA256SUMS"
_NEXT, _BEGUN = ".next", ".begun"  # hidden folders: of what counts already, and of what does not


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
        raise _unwritten(path, error) from error
    finally:
        part.unlink(missing_ok=True)


def _unwritten(path: Path, error: OSError) -> OSError:
    return OSError(
        f"cannot write {path} ({error.strerror or error}); what was there is as it was: "
        "make room, and run it again"
    )


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
    with suppress(OSError):  # a folder that may only be read
        _settle(folder)
    return _listed(folder / NAME)


def _listed(file: Path) -> dict[str, str]:
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


def read(path: Path, listed: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a file, checked against SHA256SUMS beside it, if there is one.

    Parameters
    ----------
    path : Path
    listed : dict of str, optional
        What `known` gave when the first of several files was read; the folder may not have changed
        since.

    Raises
    ------
    ValueError
        If the digest differs, or the file or its line is missing; if the folder changed.
    """
    before, listed = listed, known(path.parent)
    if before is not None and before != listed:
        raise ValueError(f"{path.parent} was written anew while it was read; read it again")
    checked = (path.parent / NAME).exists()
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


def put(folder: Path, new: Mapping[str, bytes], gone: Collection[str] = ()) -> list[Path]:
    """Write files of a folder, and SHA256SUMS, which lists them beside those listed before.

    All of them or none, also if the process is killed meanwhile.

    Parameters
    ----------
    folder : Path
    new : dict of bytes
        {name: content}.
    gone : collection of str
        Names of files to delete.

    Returns
    -------
    list of Path
        The files that were written.

    Raises
    ------
    OSError
        If there is no room for all of them; what was there is as it was.
    """
    _settle(folder)
    for stray in folder.glob(f".*{_BEGUN}"):  # of a process that was killed meanwhile
        shutil.rmtree(stray)
    left = {n: d for n, d in known(folder).items() if n not in gone and (folder / n).exists()}
    listed = left | {name: hashlib.sha256(raw).hexdigest() for name, raw in new.items()}
    text = "".join(f"{digest}  {name}\n" for name, digest in sorted(listed.items()))
    begun, path = folder / f".{os.getpid()}{_BEGUN}", folder
    try:
        begun.mkdir()
        for name, raw in {**new, NAME: text.encode()}.items():
            path = folder / name
            with (begun / name).open("wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
        begun.rename(folder / _NEXT)
    except OSError as error:
        raise _unwritten(path, error) from error
    finally:
        shutil.rmtree(begun, ignore_errors=True)
    _settle(folder)
    return [folder / name for name in (*new, NAME)]


def _settle(folder: Path) -> None:
    # Moves what counts to its place, and deletes what it does not list any more; SHA256SUMS is the
    # last, so that a kill leaves something to go on with. Another process may do so meanwhile.
    new = folder / _NEXT
    if new.is_symlink() or not new.is_dir():  # a link could take files from elsewhere
        return
    if (new / NAME).exists():
        for name in _listed(folder / NAME).keys() - _listed(new / NAME).keys():
            (folder / name).unlink(missing_ok=True)
    for file in sorted(new.iterdir(), key=lambda file: file.name == NAME):
        with suppress(FileNotFoundError):
            file.replace(folder / file.name)
    with suppress(FileNotFoundError):
        new.rmdir()
