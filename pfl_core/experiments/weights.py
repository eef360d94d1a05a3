"""A start from given weights: a file that holds a state_dict, and counts by its content alone."""

from __future__ import annotations

import hashlib
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
        return cls(str(where), _digest(where))

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

        ValueError if the content is neither there nor at its path any more.
        """
        kept, here = store / "weights" / f"{self.sha256}.pt", Path(self.path)
        if kept.is_file() and _digest(kept) == self.sha256:
            return kept
        if not here.is_file() or _digest(here) != self.sha256:
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
        if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
            named = found.items() if isinstance(found, dict) else ()
            inside = [n for n, v in named if isinstance(v, dict)]
            has = f"holds a state_dict under {inside[0]!r}" if inside else "holds no state_dict"
            raise self._no_state(has)
        return found

    def _no_state(self, what: str) -> ValueError:
        cure = "write it with torch.save(model.state_dict(), path)"
        return ValueError(f"init_from={self.path} {what}; {cure}")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    given |= {n: given[first] for n, first in tied.items() if n in wanted and first in given}
    faults = _faults(wanted, given)
    if faults:
        advice = _advice(wanted, given)
        raise ValueError(f"init_from={where} does not fit the model: {'; '.join(faults)}; {advice}")
    parameters = dict(model.named_parameters())
    for n in parameters.keys() & given.keys():
        if not torch.isfinite(given[n]).all():
            raise ValueError(f"init_from={where}: {n} is not finite; take sound weights")
    with torch.no_grad():
        for n, v in wanted.items():
            v.copy_(given[n])


def _faults(wanted: dict[str, Tensor], given: dict[str, Tensor]) -> list[str]:
    both = [n for n in wanted if n in given]
    form: Callable[[Tensor], tuple] = lambda v: (tuple(v.shape), v.is_floating_point())  # noqa: E731
    other = [n for n in both if form(wanted[n]) != form(given[n])]
    said = {
        "missing": [n for n in wanted if n not in given],
        "unexpected": [n for n in given if n not in wanted],
        "of another shape": [
            f"{n} {tuple(given[n].shape)}, here {tuple(wanted[n].shape)}" for n in other
        ],
    }
    return [f"{what}: {_some(names)}" for what, names in said.items() if names]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def _advice(wanted: dict[str, Tensor], given: dict[str, Tensor]) -> str:
    if given and all(n.startswith("module.") for n in given):
        return "its names begin with 'module.', as of DataParallel: save model.module.state_dict()"
    if wanted.keys() == given.keys():
        return "new_head=True draws the head anew"
    return (
        "new_head=True draws the head anew; other gaps are filled by "
        "model.load_state_dict(weights, strict=False) and saving model.state_dict()"
    )
