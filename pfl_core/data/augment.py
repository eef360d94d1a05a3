"""Augmentation: torchvision's transforms of training images, drawn anew in each round."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pfl_core.util import checks
from pfl_core.util.draws import rng, seeded

Transform = Callable[[Tensor], Tensor]
FORM = "allowed are names of torchvision.transforms.v2 as a list, such as "
FORM += '["RandomHorizontalFlip", {"name": "RandomCrop", "size": 32, "padding": 4}]'


def plain(given: Any) -> list[dict[str, Any]]:
    """The transforms that a value of `Experiment(augment=...)` says, as dicts with a name each.

    Raises
    ------
    ValueError
        For another value.
    """
    listed = [given] if isinstance(given, str | dict) else [] if given is None else given
    if not isinstance(listed, list | tuple):
        raise ValueError(f"Experiment(augment={given!r}): {FORM}")
    named = [{"name": one} if isinstance(one, str) else one for one in listed]
    if not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in named):
        raise ValueError(f"Experiment(augment={given!r}): {FORM}")
    return [dict(one) for one in named]


def _kinds() -> dict[str, Any]:
    from torchvision.transforms import v2

    found = {n: c for n, c in vars(v2).items() if isinstance(c, type)}
    return {n: c for n, c in found.items() if issubclass(c, v2.Transform)}


def canonical(given: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same without arguments that are defaults of their transforms, as ids have them."""
    kinds, out = _kinds() if given else {}, []
    for one in given:
        usual = inspect.signature(kinds[one["name"]]).parameters if one["name"] in kinds else {}
        out.append({n: v for n, v in one.items() if n not in usual or v != usual[n].default})
    return out


def transforms(given: Sequence[dict[str, Any]]) -> list[Transform]:
    """The transforms themselves; ValueError for unknown names and for arguments they refuse."""
    kinds, made = _kinds() if given else {}, []
    for one in given:
        name, args = one["name"], {n: v for n, v in one.items() if n != "name"}
        checks.known("Experiment(augment): transform", name, sorted(kinds))
        try:
            made.append(kinds[name](**args))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"Experiment(augment): {name}({args}) is refused: {error}") from error
    return made


def changed(x: Tensor, given: Sequence[Transform], seed: int, round: int, client: int) -> Tensor:
    """Images x (n, c, h, w) as the client has them in a round; a function of (seed, round, client).

    Raises
    ------
    ValueError
        For transforms that change shape or type, or refuse such images.
    """
    drawn = int(rng(seed, "augment", round, client).integers(2**62))
    with torch.no_grad(), seeded(drawn):
        return torch.stack([_one(image, given) for image in x]) if len(x) else x


def _one(image: Tensor, given: Sequence[Transform]) -> Tensor:
    out = image
    for transform in given:
        name, before = type(transform).__name__, out
        try:
            out = transform(before)
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise ValueError(
                f"Experiment(augment): {name} refuses an image {_form(before)}: {error}"
            ) from error
        if not isinstance(out, Tensor) or (out.shape, out.dtype) != (before.shape, before.dtype):
            became = _form(out) if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise ValueError(
                f"Experiment(augment): {name} makes {became} of an image {_form(before)}; allowed "
                "are transforms that keep shape and type: normalisation is done afterwards"
            )
    return out


def _form(image: Tensor) -> str:
    return f"{str(image.dtype).removeprefix('torch.')} {tuple(image.shape)}"
