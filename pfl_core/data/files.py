"""Files of a user's own data: the folder of a Federation, a partition alone, PFLlib's folders.

What is read may be damaged or made to harm: nothing is unpickled unasked, and no room is taken for
what a header promises and the file does not hold.
"""

from __future__ import annotations

import math
import os
import shutil
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from pfl_core.util import sums

SPLITS = ("train", "val", "test")
NAMES = ("class_names", "client_names")
FILES = ("x.npy", "y.npy", "index.npz")  # of a Federation's folder
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
Stamp = tuple[str, int, int, int]  # a file: its path, size, time of change (ns) and inode


# -- arrays in files -------------------------------------------------------------------------------


def _header(file: Any, size: int, name: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    # Of the array in a file of `size` bytes: its shape, whether in Fortran's order, its type.
    try:
        shape, fortran, dtype = _HEADERS[npy.read_magic(file)](file)
    except Exception as error:  # numpy meets damage with nearly any type
        raise ValueError(f"{name} is no array that numpy wrote ({error})") from error
    if dtype.hasobject:
        raise ValueError(
            f"{name} holds pickled objects, which are not read; save arrays of numbers"
        )
    promised, held = math.prod(shape) * dtype.itemsize, size - file.tell()
    if min(shape, default=0) < 0 or promised != held:
        raise ValueError(
            f"{name} promises {dtype} {shape}, which are {promised:,} bytes, and holds {held:,}"
        )
    return shape, fortran, dtype


def mapped(path: Path) -> np.ndarray:
    """The array of an npy file, mapped read-only; ValueError for a damaged one."""
    with path.open("rb") as file:
        shape, fortran, dtype = _header(file, path.stat().st_size, str(path))
        how: dict[str, Any] = dict(offset=file.tell(), shape=shape, order="F" if fortran else "C")
    if not math.prod(shape):
        raise ValueError(f"{path} holds an array {shape}, which is empty")
    return np.memmap(path, dtype, mode="r", **how)


def unpacked(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an npz file, read-only; ValueError for a damaged one, or one with objects."""
    found = {}
    try:
        with zipfile.ZipFile(path) as packed:
            for info in packed.infolist():
                name = info.filename.removesuffix(".npy")
                with packed.open(info) as file:
                    shape, fortran, dtype = _header(file, info.file_size, name)
                    values = np.frombuffer(file.read(), dtype)  # all is there, or this fails
                found[name] = values.reshape(shape, order="F" if fortran else "C")
    except (OSError, MemoryError):
        raise
    except Exception as error:  # zipfile and numpy meet damage with nearly any type
        raise ValueError(f"{path} is damaged, or no file of arrays: {error}") from error
    return found


def stamps(paths: Iterable[str | Path]) -> tuple[Stamp, ...]:
    """What shows that files have changed: of each its size, time of change and inode."""
    found = ((str(path), os.stat(path)) for path in paths)
    return tuple((path, s.st_size, s.st_mtime_ns, s.st_ino) for path, s in found)


def check_unchanged(before: Sequence[Stamp]) -> None:
    """Raise ValueError unless files are as their stamps say."""
    for stamp in before:
        path = Path(stamp[0])
        now = stamps([path])[0] if path.exists() else None
        if now != stamp:
            raise ValueError(
                f"{path} has {'changed' if now else 'gone'} since it was opened, so that numbers "
                "would be of other data than their id says; open it again"
            )


# -- the folder of a Federation --------------------------------------------------------------------


def write_folder(
    folder: Path, x: np.ndarray, y: np.ndarray, lists: Mapping, about: Mapping[str, Any]
) -> None:
    """Write x.npy, y.npy and index.npz, whole or not at all, to a folder that is not there yet.

    `about` is what the index holds beside the lists of all clients, which are joined.
    """
    index = {name: v for name, v in about.items() if v is not None}
    for split in SPLITS:
        index[split] = np.concatenate([np.empty(0, np.int64), *lists[split]])
        index[f"{split}_n"] = np.array([len(i) for i in lists[split]], np.int64)
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        part.mkdir(parents=True)
        for name, a in (("x.npy", x), ("y.npy", y)):
            with sums.replacing(part / name) as file:
                np.save(file, a, allow_pickle=False)
        with sums.replacing(part / "index.npz") as file:
            np.savez(file, **index)
        os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def read_folder(folder: Path) -> dict[str, Any]:
    """The arguments of the Federation in a folder, x mapped, and its `hash`.

    Raises
    ------
    ValueError
        For another folder, or a damaged one.
    """
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        raise ValueError(
            f"{folder} has no {', '.join(missing)}; expected is a folder that "
            "federation.save(folder) wrote"
        )
    z = unpacked(folder / "index.npz")
    y = np.array(mapped(folder / "y.npy"))
    try:
        given: dict[str, Any] = {s: _divided(z[s], z[f"{s}_n"]) for s in SPLITS}
        given |= {"classes": int(z["classes"]), "name": str(z["name"]), "hash": str(z["hash"])}
        given |= {name: z[name].tolist() for name in ("mean", "std") if name in z}
        given |= {name: z[name].tolist() for name in NAMES if name in z}
        given["rule"] = str(z["rule"]) if "rule" in z else ""
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"{folder / 'index.npz'} is damaged: {error}") from error
    return given | {"x": mapped(folder / "x.npy"), "y": y}


def _divided(joined: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    if sizes.ndim != 1 or sizes.dtype.kind not in "iu" or (sizes < 0).any():
        raise ValueError(f"sizes of lists are {sizes.dtype} {sizes.shape}")
    if joined.ndim != 1 or joined.dtype.kind not in "iu" or sum(sizes.tolist()) != len(joined):
        raise ValueError(f"lists of {sum(sizes.tolist())} samples in an array of {joined.shape}")
    return np.split(joined, np.cumsum(sizes)[:-1]) if len(sizes) else []


# -- a partition alone -----------------------------------------------------------------------------


def write_partition(path: Path, lists: Mapping, about: Mapping[str, Any]) -> None:
    """Write index lists and what they belong to as npz."""
    flat = {f"{s}_{k}": i for s in SPLITS for k, i in enumerate(lists[s])}
    with sums.replacing(path) as f:  # by name, numpy would add .npz where it is missing
        np.savez_compressed(f, **about, **flat)


def read_partition(path: Path) -> tuple[dict[str, Any], str]:
    """The lists and the name in a partition's file, and the hash of what it belongs to."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; read it with Federation.open({str(path)!r})")
    z = unpacked(path)
    try:
        clients, digest, name = int(z["clients"]), str(z["hash"]), str(z["name"])
        lists: dict[str, Any] = {s: [z[f"{s}_{k}"] for k in range(clients)] for s in SPLITS}
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged, or no partition that Federation.save wrote: {error}"
        ) from error
    return lists | {"name": name} | {n: z[n].tolist() for n in NAMES if n in z}, digest


# -- PFLlib ----------------------------------------------------------------------------------------


def read_pfllib(folder: Path, trusted: bool) -> dict[str, Any]:
    """x, y and the lists of a PFLlib folder: the samples of all its files, one after another."""
    xs, ys, lists, at = [], [], {"train": [], "test": []}, 0
    clients = len([*(folder / "train").glob("*.npz")])
    for s in lists:
        there = sorted((p.stem for p in (folder / s).glob("*.npz")), key=lambda n: (len(n), n))
        if not clients or there != [str(i) for i in range(clients)]:
            raise ValueError(
                f"{folder} holds {s} files [{', '.join(there)}]; expected train/0.npz, 1.npz, ... "
                "and test/ likewise, as PFLlib writes them"
            )
        for i in there:
            x, y = _pfllib_arrays(file := folder / s / f"{i}.npz", trusted)
            lists[s].append(np.arange(at, at + len(y)))
            at += len(y)
            if not len(y):
                continue  # an empty array has no type of its own
            xs.append(x)
            ys.append(y)
            mine, first = (f"{a.dtype} of shape {a.shape[1:]}" for a in (x, xs[0]))
            if mine != first and not _texts(x, xs[0]):
                raise ValueError(f"{file} holds samples {mine}, and the first file {first}")
    if not xs:
        raise ValueError(f"{folder} holds no sample")
    return lists | {"x": np.concatenate(_of_one_length(xs)), "y": np.concatenate(ys)}


def _texts(*arrays: np.ndarray) -> bool:
    return all(a.ndim == 2 and a.dtype == np.int64 for a in arrays)


def _of_one_length(xs: list[np.ndarray]) -> list[np.ndarray]:
    # Texts that were padded file by file, padded with 0 to the longest.
    if not _texts(*xs):
        return xs
    longest = max(x.shape[1] for x in xs)
    return [np.pad(x, ((0, 0), (0, longest - x.shape[1]))) for x in xs]


def _pfllib_arrays(path: Path, trusted: bool) -> tuple[np.ndarray, np.ndarray]:
    data, names = _pfllib_data(path, trusted)
    if data is None and "data" in names:
        raise ValueError(
            f"{path} holds a pickled dict; pass trusted=True if you made it yourself, else "
            "save arrays x and y in it"
        )
    if data is None:
        raise ValueError(
            f"{path} holds {', '.join(names) or 'nothing'}; expected arrays x and y, or "
            "`data` with both"
        )
    x, y = data
    y = y.reshape(len(y)) if y.ndim == 2 and y.shape[1] == 1 else y
    if x.shape[:1] != y.shape:
        raise ValueError(f"{path} has samples {x.shape} and labels {y.shape}; give each one label")
    if x.dtype == object and len(x):
        x = _tokens(path, x)
    return (x.astype(np.float32) if x.dtype == np.float64 else x), y


def _pfllib_data(path: Path, trusted: bool) -> tuple[tuple[np.ndarray, ...] | None, list[str]]:
    # x and y, where there are any, and what is in the file.
    data, names = None, []
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=trusted) as z:
            names = z.files
            if trusted and "data" in names:
                data = tuple(np.asarray(z["data"].item()[name]) for name in "xy")
            elif trusted and {"x", "y"} <= set(names):
                data = z["x"], z["y"]
        if not trusted and {"x", "y"} <= set(names):
            z = unpacked(path)
            data = z["x"], z["y"]
    except OSError:
        raise
    except Exception as error:  # zipfile and numpy meet damage with nearly any type
        hint = "; pass trusted=True if you made it yourself" * ("pickled objects" in str(error))
        raise ValueError(f"{path} cannot be read: {error}{hint}") from error
    return data, names


def _tokens(path: Path, x: np.ndarray) -> np.ndarray:
    # PFLlib's texts, (tokens, length) each, as tokens (n, longest), padded with 0.
    try:
        rows = [np.asarray(row[0], np.int64) for row in x]
        out = np.zeros((len(x), max(map(len, rows))), np.int64)
        for to, row in zip(out, rows, strict=True):
            to[: len(row)] = row
    except (ValueError, TypeError, IndexError) as error:
        raise ValueError(
            f"{path} holds samples that are neither arrays of numbers nor texts as PFLlib writes "
            f"them, (tokens, length) each: {error}"
        ) from error
    return out
