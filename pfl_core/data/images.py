"""A user's own image files: a folder a client, in it a folder a class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pfl_core.data import names
from pfl_core.data.readers import decoded
from pfl_core.util import checks

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
GREY = ("1", "L", "LA", "La")
FORM = "CLIENT/CLASS/IMAGE, such as anna/cat/1.png"
Size = tuple[int, int]


class Found(NamedTuple):
    """The images of a folder: their files in order, and of each its client and its class."""

    files: list[Path]
    client: np.ndarray
    label: np.ndarray
    clients: tuple[str, ...]
    classes: tuple[str, ...]


def found(root: Path) -> Found:
    """What lies in a folder: client by client, class by class, file by file, each by name.

    Classes are those of all clients together. Hidden files, and others than images that lie beside
    the folders of clients and classes, do not count.

    Raises
    ------
    ValueError
        For images at another depth, and for other files among images.
    """
    if not root.is_dir():
        raise ValueError(f"{root} is no folder; give one that holds {FORM}")
    lying = [
        (client, label, file)
        for client in _folders(root, root)
        for label in _folders(client, root)
        for file in _inside(label)
    ]
    if odd := [f for *_, f in lying if f.suffix.lower() not in SUFFIXES or not f.is_file()]:
        raise ValueError(
            f"{root} holds {len(odd)} files or folders in folders of classes that are no images "
            f"({_listed(odd, root)}); expected is {FORM}, with an ending of {', '.join(SUFFIXES)}: "
            "take the others away"
        )
    if not lying:
        raise ValueError(f"{root} holds no image; expected is {FORM}")
    _check_once([file for *_, file in lying], root)
    clients = tuple(c.name for c in _folders(root, root))
    client, _ = names.numbered("client", [c.name for c, *_ in lying], clients)
    held = {label.name for c in _folders(root, root) for label in _folders(c, root)}
    classes = tuple(sorted(held, key=names.order))
    label, _ = names.numbered("class", [c.name for _, c, _ in lying], classes)
    return Found([file for *_, file in lying], client, label, clients, classes)


def _check_once(files: Sequence[Path], root: Path) -> None:
    # ValueError for an image that links put at two places: it could be trained on and tested.
    if not any(p.is_symlink() for p in {p for f in files for p in (f, f.parent, f.parent.parent)}):
        return
    held: dict[Path, Path] = {}
    for file in files:
        if (first := held.setdefault(file.resolve(), file)) is not file:
            raise ValueError(
                f"{root} holds one image at two places, {_listed([first, file], root)}: a link; "
                "list each image once"
            )


def _inside(folder: Path) -> list[Path]:
    # What is not hidden, by name.
    seen = (path for path in folder.iterdir() if not path.name.startswith("."))
    return sorted(seen, key=lambda path: names.order(path.name))


def _folders(folder: Path, root: Path) -> list[Path]:
    inside = _inside(folder)
    if stray := [p for p in inside if not p.is_dir() and p.suffix.lower() in SUFFIXES]:
        raise ValueError(
            f"{root} holds images in no folder of a client's class ({_listed(stray, root)}); "
            f"expected is {FORM}"
        )
    if lost := [p for p in inside if not p.exists()]:
        raise ValueError(f"{root} holds links to nothing ({_listed(lost, root)}); take them away")
    return [path for path in inside if path.is_dir()]


def _listed(files: Sequence[Path], root: Path) -> str:
    return names.some(file.relative_to(root).as_posix() for file in files)


def pixels(files: Sequence[Path], root: Path, size: Any, colour: Any) -> np.ndarray:
    """The images as uint8: (n, h, w) of grey, (n, h, w, 3) of colour ones.

    Parameters
    ----------
    size : int, (height, width) or None
        What they are resampled to; without it they must have one size.
    colour : bool or None
        None is colour if any of them has it.

    Raises
    ------
    ValueError
        For images that cannot be read, which it names, and those of several sizes.
    """
    shape = _size(size)
    if colour not in (None, True, False):
        raise ValueError(f"colour={colour!r}: allowed are True, False, and None (as they are)")
    about = _each(files, root, _header)
    deep = [f for f, (mode, _) in zip(files, about, strict=True) if mode.startswith(("I", "F"))]
    if deep:
        raise ValueError(
            f"{len(deep)} images of {root} have more than 8 bits a channel ({_listed(deep, root)});"
            " save them with 8, or give arrays of floats: Federation.grouped(x, y, by=...)"
        )
    if shape is None:
        shape = _one_size(files, root, [size for _, size in about])
    if colour is None:
        colour = any(mode not in GREY for mode, _ in about)
    mode = "RGB" if colour else "L"
    out = np.empty((len(files), *shape, *[3] * bool(colour)), np.uint8)
    flipped = shape[1], shape[0]  # Pillow says the width first

    def into(file: Path) -> np.ndarray:
        return decoded(file.read_bytes(), mode, flipped)

    for i in range(0, len(files), 1024):  # so that no more than these are held twice
        part = files[i : i + 1024]
        out[i : i + len(part)] = _each(part, root, into)
    return out


def _header(file: Path) -> tuple[str, Size]:
    from PIL import Image

    with Image.open(file) as image:
        return image.mode, (image.height, image.width)


def _each(files: Sequence[Path], root: Path, read: Callable[[Path], Any]) -> list[Any]:
    # What `read` makes of each file; ValueError that names those that are broken.
    def tried(file: Path) -> Any:
        try:
            return read(file)
        except (MemoryError, PermissionError):
            raise
        except Exception as error:  # Pillow meets damage with nearly any type
            return error

    with ThreadPoolExecutor() as workers:  # Pillow decodes outside the interpreter lock
        results = list(workers.map(tried, files))
    bad = [f for f, result in zip(files, results, strict=True) if isinstance(result, Exception)]
    if bad:
        first = next(result for result in results if isinstance(result, Exception))
        why = str(first).partition(" '")[0] or type(first).__name__  # without the path
        raise ValueError(
            f"{len(bad)} of {len(files)} images of {root} cannot be read ({_listed(bad, root)}; "
            f"the first: {why}); replace them, or take them away"
        )
    return results


def _size(size: Any) -> Size | None:
    if size is None:
        return None
    both = [size, size] if checks.whole(size) is not None else size
    whole = [checks.whole(v) for v in both] if isinstance(both, list | tuple) else []
    if len(whole) != 2 or not all(v is not None and v >= 1 for v in whole):
        raise ValueError(
            f"size={size!r}: allowed is a number of pixels, or (height, width), each >= 1"
        )
    return int(whole[0] or 0), int(whole[1] or 0)


def _one_size(files: Sequence[Path], root: Path, sizes: Sequence[Size]) -> Size:
    other = next((i for i, size in enumerate(sizes) if size != sizes[0]), None)
    if other is None:
        return sizes[0]
    a, b = (f"{_listed([files[i]], root)} has {sizes[i]}" for i in (0, other))
    raise ValueError(
        f"images of {root} differ in size (height, width): {a}, {b}; give size=, as "
        f"size={sizes[0]}, to which all are resampled"
    )
