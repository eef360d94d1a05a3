"""A start from given weights: a file that holds a state_dict, and counts by its content alone."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pfl_core import models
from pfl_core.util import checks, paths, sums

LISTED = 5  # names in an error


@dataclass(frozen=True)
class Weights:
    """A file of a state_dict: where it was, and the digest of its content, which is what counts.

    A run copies it into its store, `weights/<sha256>.pt`. So worker processes and the nodes of a
    cluster find it, and the run can be computed anew when the file is gone.
    """

    path: str
    sha256: str

    @classmethod
    def of(cls, path: str | Path) -> Weights:
        """The weights in a file; ValueError if there is none."""
        where = paths.absolute(path, "init_from")
        if not where.is_file():
            raise ValueError(
                f"Experiment(init_from={str(path)!r}): there is no such file; write one with "
                "torch.save(model.state_dict(), path), or give an Experiment"
            )
        return cls(str(where), sums.file_digest(where))

    @classmethod
    def read(cls, plain: Any) -> Weights | None:
        """The weights whose `plain()` this is; None for that of an Experiment."""
        return cls(plain.get("path", ""), plain["sha256"]) if plain and "sha256" in plain else None

    @property
    def id(self) -> str:
        """The first 16 digits of the digest."""
        return self.sha256[:16]

    def plain(self) -> dict[str, str]:
        """Path and digest, as JSON keeps them."""
        return {"path": self.path, "sha256": self.sha256}

    def __repr__(self) -> str:
        return repr(self.path)

    def keep(self, store: Path) -> Path:
        """The file in a store: its copy there, made now if it is not there yet.

        Raises
        ------
        ValueError
            If the content is neither there nor at its path any more.
        """
        kept, here = store / "weights" / f"{self.sha256}.pt", Path(self.path)
        if kept.is_file() and sums.file_digest(kept) == self.sha256:
            return kept
        if not here.is_file() or sums.file_digest(here) != self.sha256:
            has = "has other content now" if here.is_file() else "is gone"
            raise ValueError(
                f"init_from={self.path} {has}; this run starts from the content with sha256 "
                f"{self.id}...: give that file, as in experiment.but(init_from=path)"
            )
        checks.make_folder(kept.parent)
        with sums.replacing(kept) as file, here.open("rb") as source:
            shutil.copyfileobj(source, file)
        return kept

    def load(self, store: Path) -> dict[str, Tensor]:
        """{name: (*shape)}; ValueError if the file holds no state_dict."""
        try:
            found = torch.load(self.keep(store), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            raise self._no_state("holds code or objects, which are not loaded") from None
        except (RuntimeError, EOFError, LookupError) as error:
            raise self._no_state(f"cannot be read ({error!r:.100})") from None
        named = found.items() if isinstance(found, dict) else [("", found)]
        if not all(isinstance(n, str) and isinstance(v, Tensor) for n, v in named):
            inside = [n for n, v in named if isinstance(v, dict)]
            has = f"holds a state_dict under {inside[0]!r}" if inside else "holds no state_dict"
            raise self._no_state(has)
        return found

    def _no_state(self, what: str) -> ValueError:
        cure = "write it with torch.save(model.state_dict(), path)"
        return ValueError(f"init_from={self.path} {what}; {cure}")


def fill(model: nn.Module, given: dict[str, Tensor], where: str, new: Iterable[str] = ()) -> None:
    """Give a model the tensors `given`, but for those of `new` (names) and of their modules.

    Raises
    ------
    ValueError
        If names, shapes or kinds differ, or a value of a parameter is not finite; it lists them.
    """
    state, tied = model.state_dict(), models.tied(model)
    inside = {n.rpartition(".")[0] for n in new}
    taken = lambda n: n not in new and n.rpartition(".")[0] not in inside  # noqa: E731
    wanted = {n: v for n, v in state.items() if taken(n)}
    given = {n: v for n, v in given.items() if taken(n)}
    _tie(given, {n: first for n, first in tied.items() if n in wanted and first in wanted}, where)
    faults = _faults(wanted, given)
    if faults:
        advice = _advice(wanted, given)
        raise ValueError(f"init_from={where} does not fit the model: {'; '.join(faults)}; {advice}")
    for n, v in wanted.items():
        if v.isfinite().all() and not given[n].isfinite().all():
            raise ValueError(f"init_from={where}: {n} is not finite; take sound weights")
    with torch.no_grad():
        for n, v in wanted.items():
            v.copy_(given[n])


def _tie(given: dict[str, Tensor], tied: dict[str, str], where: str) -> None:
    # A tied tensor may be there under any of its names, and is one.
    for n, first in tied.items():
        a, b = given.get(first), given.get(n)
        if a is not None and b is not None and not (a.shape == b.shape and torch.equal(a, b)):
            raise ValueError(
                f"init_from={where}: {first} and {n} differ, and are one tensor in the model; give "
                "one of them, or a model whose weights are not tied"
            )
        if (either := b if a is None else a) is not None:
            given[first] = given[n] = either


def _faults(wanted: dict[str, Tensor], given: dict[str, Tensor]) -> list[str]:
    both = [n for n in wanted if n in given]
    shape: Callable[[str], tuple] = lambda n: (tuple(given[n].shape), tuple(wanted[n].shape))  # noqa: E731
    other = [(n, *shape(n)) for n in both if wanted[n].shape != given[n].shape]
    kinds = [(n, _kind(given[n]), _kind(wanted[n])) for n in both]
    said = {
        "missing": [n for n in wanted if n not in given],
        "unexpected": [n for n in given if n not in wanted],
        "of another shape": [f"{n} {has}, here {needs}" for n, has, needs in other],
        "of another kind": [f"{n} {has}, here {needs}" for n, has, needs in kinds if has != needs],
    }
    return [f"{what}: {_some(names)}" for what, names in said.items() if names]


def _kind(v: Tensor) -> str:
    if v.layout != torch.strided or v.is_quantized or v.is_meta:
        where = ", without values (meta)" * v.is_meta
        return f"{v.dtype}, {v.layout}{where}".replace("torch.", "")
    return "real" if v.is_floating_point() else "complex" if v.is_complex() else "integers"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def _advice(wanted: dict[str, Tensor], given: dict[str, Tensor]) -> str:
    if inside := _wrapper(given, wanted):
        return (
            f"its names begin with {inside!r}, as of a module around the model (DataParallel, "
            "torch.compile): save the state_dict of the module inside"
        )
    if inside := _wrapper(wanted, given):
        return (
            f"the model's names begin with {inside!r}: save {{{inside!r} + n: v for n, v in "
            "weights.items()}"
        )
    if {n: v.shape for n, v in wanted.items()} == {n: v.shape for n, v in given.items()}:
        return "save them in the model's kinds, dense, as with v.to_dense().to(model's dtype)"
    if wanted.keys() == given.keys():
        return "new_head=True draws the head anew"
    return (
        "new_head=True draws the head anew; other gaps are filled by "
        "model.load_state_dict(weights, strict=False) and saving model.state_dict()"
    )


def _wrapper(outer: Iterable[str], inner: Iterable[str]) -> str:
    # What all names of `outer` begin with, if some of them are names of `inner` without it.
    first = next(iter(outer), "")
    starts = [first[: at + 1] for at, sign in enumerate(first) if sign == "."]
    for start in starts:
        if all(n.startswith(start) for n in outer):
            if any(n.removeprefix(start) in inner for n in outer):
                return start
    return ""
