"""Arrays that a user gives: what they may be, and forms of them that nobody changes."""

from __future__ import annotations

import hashlib
import warnings
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

FORMS = ("uint8", "float16", "float32", "float64")  # of samples that are no tokens
MOST_CLASSES = 1_000_000  # a model has an output for each
SERVED = "pfl_core trains classifiers of one class a sample"
NUMBER = "number them from 0 with np.unique(y, return_inverse=True)[1]"
CHUNK = 2**24  # bytes that are looked at a time
# {id: array}: what `owned` made, of which no one else has a view that can be written
_owned: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()
# Samples of these types (package.class) are no array; what to give instead.
INSTEAD = {
    "torch.TensorDataset": "its tensors: x, y = dataset.tensors",
    "torch.Subset": "the whole data set's arrays, and subset.indices as one client's list; or "
    "Federation.from_torch([subset, ...]), a Subset a client",
    "torch.DataLoader": "the arrays of loader.dataset",
    "torch.Dataset": "np.stack([np.asarray(image) for image, _ in dataset]), and as y "
    "[label for _, label in dataset]; or Federation.from_torch([dataset, ...]), one a client",
    "datasets.Dataset": "a column of it: dataset.with_format('numpy')['image']",
    "scipy._spbase": "x.toarray()",
    "PIL.Image": "np.stack of all images: np.stack([np.asarray(image) for image in images])",
    "builtins.dict": "an array of all samples, such as np.stack(list(x.values()))",
    "builtins.set": "an array of all samples",
    "builtins.str": "an array, read from its file",
    "pathlib.PurePath": "an array, read from its file",
    "builtins.generator": "np.stack(list(x))",
    "builtins.NoneType": "an array of all samples",
}


# -- arrays that do not change ---------------------------------------------------------------------


def owned(a: np.ndarray) -> np.ndarray:
    """The array read-only for good, not copied: of arrays just made, which nobody else has."""
    root = _root(a)
    root.flags.writeable = False
    _owned[id(root)] = root
    return fixed(a)


def fixed(a: np.ndarray) -> np.ndarray:
    """As `owned`, of an array that is copied where another Federation takes it."""
    a.flags.writeable = False
    return a.view()  # a view of it cannot be made writable again


def frozen(a: np.ndarray) -> np.ndarray:
    """A read-only array of the same values, which no one else can change.

    It is a copy, but for what `owned` made and for files that are mapped read-only.
    """
    root = _root(a)
    ours = _owned.get(id(root)) is root or mapped_file(a) is not None
    return a if ours and not a.flags.writeable else owned(np.array(a, order="C"))


def mapped_file(a: np.ndarray) -> str | None:
    """The file that an array maps read-only, None for any other array."""
    root = _root(a)
    if not isinstance(root, np.memmap) or root.mode != "r" or root.filename is None:
        return None
    return str(root.filename)


def _root(a: np.ndarray) -> np.ndarray:
    while isinstance(a.base, np.ndarray):
        a = a.base
    return a


def digest(arrays: Sequence[np.ndarray]) -> str:
    """sha256 (hex) of shapes, types and values; read in pieces, so that a map is not copied."""
    h = hashlib.sha256()
    for a in arrays:
        h.update(str((a.shape, a.dtype)).encode())
        if a.flags.c_contiguous:
            h.update(a.reshape(-1).view(np.uint8).data)
            continue
        rows = max(1, CHUNK * len(a) // max(1, a.nbytes))
        for i in range(0, len(a), rows):
            h.update(np.ascontiguousarray(a[i : i + rows]).data)
    return h.hexdigest()


def tensor(x: np.ndarray) -> Tensor:
    """An array as a tensor, read-only arrays and maps included; a copy where torch takes no view.

    That is of arrays with negative strides, and of another machine's byte order.
    """
    import torch  # seconds, which a list of data sets need not wait

    if x.dtype.kind == "u" and x.dtype != np.uint8:
        x = x.astype(np.int64)
    x = x.astype(x.dtype.newbyteorder("="), copy=False)
    with warnings.catch_warnings():  # nobody writes to it
        warnings.filterwarnings("ignore", "The given NumPy array is not writ", UserWarning)
        return torch.as_tensor(x if min(x.strides, default=0) >= 0 else x.copy())


# -- samples ---------------------------------------------------------------------------------------


def samples(x: Any) -> np.ndarray:
    """Samples as an array of a kind that is allowed; ValueError for others."""
    if instead := _instead(x):
        raise ValueError(f"x is a {type(x).__name__}; give {instead}")
    x = array("x", x)
    tokens = x.dtype.kind in "iu" and x.dtype != np.uint8
    allowed = x.ndim == 2 if tokens else x.ndim >= 2 and x.dtype.newbyteorder("=").name in FORMS
    if not allowed:
        raise ValueError(
            f"x is {x.dtype} {x.shape}; allowed are uint8 images (n, h, w), (n, h, w, c) or (n, "
            "c, h, w) of 0 to 255, uint8 tables (n, d), floats (n, ...) as a model takes them, "
            f"images as (n, c, h, w), and integer tokens (n, length){_kind_instead(x)}"
        )
    if len(x) and not x.size:
        raise ValueError(f"x is {x.dtype} {x.shape}: its samples hold no number")
    if x.dtype == np.uint8 and (
        x.ndim > 4 or x.ndim == 4 and not {x.shape[1], x.shape[3]} & {1, 3}
    ):
        raise ValueError(
            f"x is uint8 {x.shape}; images have 1 or 3 channels, first or last: leave an alpha "
            "channel out with x[..., :3], and give images of other channels and volumes as floats "
            "(n, c, h, w) or (n, c, d, h, w), x.astype('float32') / 255"
        )
    return x


def array(name: str, v: Any) -> np.ndarray:
    """A tensor, an array or a list as an array; ValueError for what makes none."""
    import torch

    if isinstance(v, torch.Tensor):
        return _of_tensor(name, v)
    if isinstance(v, np.ma.MaskedArray) and np.ma.getmaskarray(v).any():
        raise ValueError(
            f"{name} is a masked array, of which {int(np.ma.getmaskarray(v).sum())} values are "
            f"masked; leave these samples out, or fill the gaps with {name}.filled(value)"
        )
    try:
        return np.asarray(v)
    except (ValueError, RuntimeError, TypeError) as error:
        raise ValueError(_unequal(name, v, error)) from error


def _of_tensor(name: str, v: Tensor) -> np.ndarray:
    import torch

    if v.layout != torch.strided or v.is_nested:
        dense = "to_padded_tensor(0)" if v.is_nested else "to_dense()"
        kind = "nested" if v.is_nested else str(v.layout).removeprefix("torch.")
        raise ValueError(f"{name} is a {kind} tensor; give {name}.{dense}")
    try:
        return v.detach().cpu().resolve_conj().resolve_neg().numpy()
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"{name} is a tensor of {v.dtype} on {v.device}, which numpy has not; give "
            f"{name}.float()"
        ) from error


def _instead(v: Any) -> str:
    # What to give in place of an object that is no array of samples; "" for one that is.
    kinds = [f"{c.__module__.partition('.')[0]}.{c.__name__}" for c in type(v).__mro__]
    if "torch.Dataset" in kinds and hasattr(v, "data") and hasattr(v, "targets"):
        return "x=dataset.data, y=dataset.targets"
    if "pandas.DataFrame" in kinds and any(t.kind != "f" for t in v.dtypes if hasattr(t, "kind")):
        return "its columns of numbers as floats: x.to_numpy('float32'); or Federation.from_table"
    if isinstance(v, list | tuple) and len(v) and all(hasattr(s, "layout") for s in v):
        return "torch.stack(x)" if v[0].ndim else ""
    if isinstance(v, list) and v and all(isinstance(s, tuple) and len(s) == 2 for s in v):
        return "samples and labels apart: x, y = zip(*pairs), each as one array"
    return next((INSTEAD[kind] for kind in kinds if kind in INSTEAD), "")


def _kind_instead(x: np.ndarray) -> str:
    # How an array of a type that is not allowed becomes one that is.
    kind = x.dtype.kind
    if kind == "O":
        return "; of samples of one shape take np.stack(list(x))"
    if kind == "c":
        return "; give real and imaginary parts as channels, np.stack([x.real, x.imag], 1)"
    if kind == "V":
        return "; of columns with names take numpy.lib.recfunctions.structured_to_unstructured(x)"
    if kind == "b":
        return "; of bits take x.astype('float32')"
    return "; of one number a sample take x[:, None]" if kind in "fiu" and x.ndim == 1 else ""


def _unequal(name: str, v: Any, error: Exception) -> str:
    # Of a list that makes no array: its shapes, where each sample has one.
    try:
        shapes = list(dict.fromkeys(str(tuple(np.shape(s))) for s in v))
    except (ValueError, RuntimeError, TypeError):
        return f"{name} is a {type(v).__name__} that makes no array: {error}"
    if len(shapes) == 1:
        return f"{name} is a list that makes no array: {error}"
    some = ", ".join(shapes[:3])
    if name == "y":
        return f"labels y have the shapes {some}: several classes a sample are not served; {SERVED}"
    return f"{name} is a list of samples of shape {some}; cut or pad them to one shape"


def check_finite(x: Tensor) -> None:
    """Raise ValueError for samples (n, ...) that hold NaN or infinity in their number format."""
    import torch

    rows = max(1, CHUNK // max(1, x[:1].numel()))
    parts = [~torch.isfinite(part).flatten(1).all(1) for part in x.split(rows)]
    bad = torch.nonzero(torch.cat(parts)).flatten().tolist()
    if bad:
        raise ValueError(
            f"x is not finite as {x.dtype} in {len(bad)} of {len(x)} samples, the first is sample "
            f"{bad[0]}; "
            "NaN and infinite values spoil every model: leave these samples out, or replace the "
            "values"
        )


def warn_of_pixels(x: np.ndarray) -> None:
    """Warn of floats that look like pixels of 0 to 255, as torch's and numpy's conversions leave.

    Tables need larger values for it than images do: small whole numbers are counts.
    """
    some = np.asarray(x[:256])
    low, high = (some.min(), some.max()) if some.size else (0, 0)
    whole = bool((some == some.round()).all())
    images = x.ndim == 4 and x.shape[1] in (1, 3)  # resampled ones have fractions
    least = 2 if whole and x.ndim > 2 else 128
    if low < 0 or not least <= high <= 255 or not (whole or images):
        return
    values, instead = "numbers", "x / 255"
    if whole:
        values, instead = "whole numbers", "x.astype('uint8'), which is scaled, or x / 255"
    if x.ndim == 2:
        instead += "; if they are counts or measures, scale each column: (x - mean) / std"
    warnings.warn(
        f"x is {x.dtype} {x.shape} of {values} up to {high:g}, used as they are: if these are "
        f"pixels of 0 to 255, give {instead}",
        stacklevel=3,
    )


def per_channel(
    values: Sequence[float] | float | None, default: float, channels: int
) -> list[float]:
    """A mean (default 0) or std (default 1), as one number or one for each channel.

    Raises
    ------
    ValueError
        If there are more or fewer, or a number is not finite, or a std not > 0.
    """
    v = [default] if values is None else np.asarray(values, float).ravel().tolist()
    if len(v) not in (1, channels):
        raise ValueError(
            f"mean or std has {len(v)} numbers; give one, or one for each of {channels} channels"
        )
    # The bounds: what float32 holds, and its inverse too.
    if not (np.abs(v) < 1e37).all() or (default and min(v) < 1e-37):
        name, allowed = ("std", "finite numbers > 0") if default else ("mean", "finite numbers")
        allowed += f", from {-1e37 if not default else 1e-37:g} to 1e37"
        raise ValueError(f"{name} is {v}; allowed are {allowed}, a number a channel or one for all")
    return v


# -- labels ----------------------------------------------------------------------------------------


def labels(y: Any) -> np.ndarray:
    """Labels as int64 (n,), one class a sample; ValueError for others."""
    y = array("y", y)
    if y.ndim > 1 and set(y.shape[1:]) == {1}:
        y = y.reshape(len(y))
    if y.ndim != 1:
        raise ValueError(
            f"labels y have shape {y.shape}; allowed is one integer a sample, (n,) or (n, 1)"
            f"{_of_axes(y)}"
        )
    whole = None
    if y.dtype.kind in "biuf":
        with np.errstate(invalid="ignore"):  # NaN differs from any integer, and is refused
            whole = y.astype(np.int64)
    if whole is None or (y != whole).any():
        raise ValueError(
            f"labels y are {y.dtype}; allowed are integers 0 to classes - 1, one a sample"
            f"{_of_kind(y)}"
        )
    return whole


def _of_axes(y: np.ndarray) -> str:
    # What labels of two axes and more are.
    if y.ndim == 2 and y.dtype.kind in "biuf":
        if ((y == 0) | (y == 1)).all() and (y.sum(1) == 1).all():
            return "; of one-hot rows take y.argmax(1)"
        return f": several classes, shares of classes or targets a sample are not served; {SERVED}"
    return f": a class a pixel or token (segmentation) is not served; {SERVED}" * (y.ndim > 2)


def _of_kind(y: np.ndarray) -> str:
    # What labels of one axis that are no integers are.
    if y.dtype.kind == "f":
        missing = int(np.isnan(y).sum())
        if missing:
            return f": {missing} are NaN, leave these samples out"
        return f": these are quantities, and regression is not served; {SERVED}"
    if y.dtype.kind in "USO":
        return ": number names with np.unique(y, return_inverse=True)[1]"
    return ""


def count_classes(y: np.ndarray) -> int:
    """max(y) + 1, where that is plausible: a stray label, such as 10^9, would take all memory."""
    found, most = int(y.max(initial=0)) + 1, max(1000, len(y))
    if found > most:
        raise ValueError(
            f"labels reach {found - 1}; without classes= labels up to {most - 1} are allowed for "
            f"{len(y)} samples: {NUMBER}, if each is a class, or give classes="
        )
    if len(y) and y.min() > 0:
        raise ValueError(
            f"labels reach {y.min()}..{found - 1} and not 0: of labels that start at {y.min()} "
            f"take y - {y.min()}, or give classes={found} if others are to be there"
        )
    return found


def number_of_classes(classes: Any, y: np.ndarray) -> int:
    """`classes` as it was given, or counted; ValueError for what is no number of classes."""
    if classes is None:
        return count_classes(y)
    most = max(MOST_CLASSES, len(y))
    whole = isinstance(classes, int | np.integer) and not isinstance(classes, bool)
    if not whole or not 1 <= classes <= most:
        raise ValueError(f"classes={classes!r}; allowed is an integer from 1 to {most:,}")
    return int(classes)


# -- who has what ----------------------------------------------------------------------------------


def index_lists(given: Any, split: str, clients: int) -> tuple[np.ndarray, ...]:
    """One read-only int64 array for each client; ValueError for what is none."""
    if isinstance(given, dict):
        raise ValueError(
            f"{split} is a dict; give a list of one index array a client, such as "
            f"list({split}.values())"
        )
    if given is not None and (isinstance(given, set | str) or not hasattr(given, "__len__")):
        raise ValueError(
            f"{split} is a {type(given).__name__}; give a list of one index array a client"
        )
    if given is None or not len(given):
        given = [()] * clients
    return tuple(_indices(v, split, k) for k, v in enumerate(given))


def _indices(v: Any, split: str, client: int) -> np.ndarray:
    of = f"{split} of client {client}"
    if isinstance(v, set | frozenset | dict):
        raise ValueError(f"{of} is a {type(v).__name__}, which has no order; give sorted indices")
    v = array(of, v)
    if not v.ndim:
        raise ValueError(f"{of} is {v}; give one index array a client, such as [[0, 1], [2, 3]]")
    if sum(n != 1 for n in v.shape) > 1 and v.size:
        raise ValueError(f"{of} has shape {v.shape}; give one index array (m,) a client")
    v = v.reshape(-1)
    if len(v) and v.dtype.kind not in "iu":
        raise ValueError(
            f"{of} holds {v.dtype} values; give integer indices (np.flatnonzero(mask))"
        )
    return fixed(v.astype(np.int64))
