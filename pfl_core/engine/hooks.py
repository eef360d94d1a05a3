"""What the hooks of a method that is not ours return, looked at once a run, before it does harm.

What is wrong is said with the hook's name. Ours are tested, and are not looked at.
"""

from __future__ import annotations

import functools
import linecache
import os
import traceback
import types
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pfl_core.data.client_data import ClientData
from pfl_core.methods.base import Method, State
from pfl_core.stacked import Params
from pfl_core.util import identity

OURS, TORCH = os.path.dirname(os.path.dirname(__file__)), os.path.dirname(torch.__file__)
PARTS = ("server", "clients", "extra")  # of a State
RETURN = "does every path through it end in `return`?"


def rehearse(method: Method, data: ClientData, state: State) -> Params:
    """What client 0 is served; nothing is trained. ValueError unless that gives class scores."""
    check_state(method, "init", state, _drawn(method, state))
    check_rows(method, "init, in its clients,", state.clients, data.K)
    first = torch.zeros(1, dtype=torch.int64, device=data.device)
    x, _ = data.batch(torch.as_tensor(data.index["train"][0][:2], device=data.device))
    with torch.no_grad(), method.task.mode(False):
        with reading(method, "download", state):
            sent = check_rows(method, "download", method.download(state, first), 1)
        with reading(method, "begin", state):
            start = check_rows(method, "begin", method.begin(state, first, sent), 1)
        with reading(method, "serve", state, start):
            served = check_rows(method, "serve", method.serve(start), 1)
        try:
            scores = method.logits({n: v[0] for n, v in served.items()}, x)
        except KeyError as error:
            raise ValueError(
                f"{method.name}: what begin and serve return lacks {error}, which logits reads"
            ) from error
    want = (len(x), method.task.C)
    if not isinstance(scores, Tensor) or scores.shape != want:
        raise ValueError(
            f"{method.name}.logits returned {_form(scores)} for {len(x)} samples of "
            f"{method.task.C} classes; allowed are class scores {want}"
        )
    return served


def _drawn(method: Method, state: State) -> dict[str, Tensor]:
    # What the network's tensors in a State have to be like.
    k, drawn = method.task.K, method.task.initial
    like = {f"server.{n}": v for n, v in drawn.items() if n in state.server}
    rows = {n: v.expand(k, *v.shape) for n, v in drawn.items() if n in state.clients}
    return like | {f"clients.{n}": v for n, v in rows.items()}


@contextmanager
def reading(method: Method, hook: str, state: State, given: Params | None = None) -> Iterator[None]:
    """Within it a hook runs that may read a State and what it was given, and change neither.

    Raises
    ------
    ValueError
        If it has: torch counts what is written in place, also through a row that is a view.
    """

    def held() -> dict[str, Tensor]:
        return {f"state.{n}": v for n, v in tensors(state).items()} | dict(
            flat(given or {}, "given.")
        )

    before = {name: (v, v._version) for name, v in held().items()}
    yield
    for name, v in held().items():
        if name not in before or v is not before[name][0] or v._version != before[name][1]:
            raise ValueError(
                f"{method.name}.{hook} changed {name}, which it may only read: rows are views of "
                "the server's model, one memory for all clients; make a new tensor (v + d)"
            )


def tensors(state: State) -> dict[str, Tensor]:
    """All tensors of a State, {"server.fc.weight": tensor}."""
    return dict(flat({n: getattr(state, n) for n in PARTS}))


def flat(p: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in dicts at any depth, as pairs ("outer.inner", tensor)."""
    for name, value in p.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        elif isinstance(value, Tensor):
            yield prefix + name, value


def check_shared(method: Method) -> None:
    """Raise ValueError where `is_shared` says nothing of any name."""
    if all(method.is_shared(name) is None for name in method.task.names):
        raise ValueError(f"{method.name}.is_shared returned None for every name; {RETURN}")


def check_rows(
    method: Method, hook: str, got: Any, clients: int, like: Params | None = None
) -> Params:
    """Return what a hook returned, checked: {name: (clients, *shape)}.

    Raises
    ------
    ValueError
        Unless it is, and has all that is in `like`, with these shapes.
    """
    said = f"{method.name}.{hook} returned"
    if not isinstance(got, dict):
        raise ValueError(f"{said} {_form(got)}, allowed is a dict {{name: tensor}}; {RETURN}")
    for name, v in got.items():
        if not isinstance(v, Tensor) or v.dim() < 1 or len(v) != clients:
            raise ValueError(
                f"{said} {name!r} as {_form(v)}; allowed is a tensor with a row for each of "
                f"{clients} clients"
            )
    for name, v in (like or {}).items():
        if name not in got or got[name].shape != v.shape:
            now = f"{name!r} as {_form(got[name])}" if name in got else f"no {name!r}"
            raise ValueError(
                f"{said} {now}; it was given {_form(v)}, and a name that it leaves out would stay "
                "untrained: return start | {...}"
            )
        _check_type(said, repr(name), got[name], v)
    return got


def check_state(
    method: Method, hook: str, got: Any, like: dict[str, Tensor] | None = None
) -> State:
    """Return what a hook returned, checked: a State of tensors that are as those of `like` were.

    `like` is what `tensors` gives of an earlier State. What is in `extra` may have other shapes.
    """
    said = f"{method.name}.{hook} returned"
    if not isinstance(got, State):
        raise ValueError(f"{said} {_form(got)}, allowed is a State; {RETURN}")
    for part in PARTS:
        _check_kinds(said, f"state.{part}", getattr(got, part), deep=part == "extra")
    now = tensors(got)
    for path, v in (like or {}).items():
        part, _, name = path.partition(".")
        where = f"state.{part}[{name!r}]"
        if part != "extra" and (path not in now or now[path].shape != v.shape):
            is_now = _form(now[path]) if path in now else "nothing"
            raise ValueError(
                f"{said} {is_now} as {where}, which was {tuple(v.shape)}; average over "
                "the clients, which are the first axis: weighted_mean(end, weight)"
            )
        if path in now:
            _check_type(said, where, now[path], v)
    return got


def _check_kinds(said: str, where: str, p: Any, deep: bool) -> None:
    # ValueError unless p is a dict {name: tensor}; or of such dicts, too.
    if not isinstance(p, dict):
        raise ValueError(f"{said} {_form(p)} as {where}; allowed is a dict {{name: tensor}}")
    for name, v in p.items():
        if not isinstance(name, str):
            raise ValueError(f"{said} {name!r} as a name in {where}; allowed are texts: str(name)")
        if deep and isinstance(v, dict):
            _check_kinds(said, f"{where}[{name!r}]", v, deep)
        elif not isinstance(v, Tensor):
            also = ", and dicts of them" * deep
            raise ValueError(
                f"{said} {_form(v)} as {where}[{name!r}]; allowed are tensors{also}, which "
                "checkpoints keep: torch.tensor(v), or torch.stack(list(v)) of several"
            )


def _check_type(said: str, where: str, v: Tensor, before: Tensor) -> None:
    # ValueError where numbers have become others, as by numpy, whose floats have 64 bits. Counters
    # in `extra` may become floats.
    if v.dtype == before.dtype or "extra" in where and not before.is_floating_point():
        return
    now, was = (str(t.dtype).removeprefix("torch.") for t in (v, before))
    raise ValueError(
        f"{said} {now} as {where}, which was {was}, and a network computes in one type; "
        f"return v.to({before.dtype})"
    )


class Outside:
    """What the foreign code of a method, its model and metrics reads: no round may change it.

    That would be state that no checkpoint has, and with which the next run of a process begins.
    It is compared after the first two rounds of a process. Another value is an error. What is added
    or gone is a warning, as that may be a cache of constants.
    """

    def __init__(self, method: Method, *others: Any):
        self.method, self.others = method, others
        self.before, self.left = self._reads(), 2  # a round adds, the next one changes it

    def _reads(self) -> dict[str, list[str]]:
        kind = type(self.method)
        # What `__dict__` holds beside hyper-parameters and the task, but for cached properties.
        made = {
            n: v
            for n, v in vars(self.method).items()
            if n != "task" and not isinstance(getattr(kind, n, None), functools.cached_property)
        }
        own = [] if identity.is_ours(kind) else [types.SimpleNamespace(**made)]
        modules = dict.fromkeys(map(type, self.method.task.model.modules()))
        return identity.reads(kind, *modules, *self.others, *own)

    def check(self, r: int) -> None:
        """Raise ValueError if round r changed what is read; warn if it added to it."""
        if not (self.before and self.left):
            return
        before, after = self.before, self._reads()
        self.before, self.left = after, self.left - 1
        gone = [n for n in before if _more(before, after, n) - identity.NOTHING]
        added = [n for n in after if _more(after, before, n)]
        if changed := [n for n in gone if n in after]:
            raise ValueError(
                f"{self.method.name}: round {r} changed {_listed(changed)}, outside of the State: "
                "no checkpoint has it, and the next run would begin with it; what the server "
                "remembers belongs into state.extra, what clients do into state.clients, as tensors"
            )
        if (found := added or gone) and self.left:  # told once
            warnings.warn(
                f"{self.method.name}: round {r} added or dropped {_listed(found)}, outside "
                "of the State: no checkpoint has it, and the next run would begin with it, under "
                "another id; state belongs into state.extra or state.clients, as tensors, and a "
                "cache of constants into functools.lru_cache",
                stacklevel=2,
            )


def _more(a: dict[str, list[str]], b: dict[str, list[str]], label: str) -> set[str]:
    # Digests that a has oftener than b.
    return set(Counter(a.get(label, ())) - Counter(b.get(label, ())))


def _listed(labels: list[str]) -> str:
    names = [n.lstrip(".") or "a value" for n in labels]
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


def check_step(method: Method) -> None:
    """Raise ValueError where local training has a step of the method's own and an optimizer, too.

    SGD is no other one: it is what such a step stands for.
    """
    if (name := method.task.config.optimizer) != "sgd":
        raise ValueError(
            f"Experiment(optimizer={name!r}): {method.name} trains by a step of its own, in place "
            "of an optimizer's; allowed with it is optimizer='sgd'"
        )


def check_loss(method: Method, got: Any, names: list[str]) -> None:
    """Raise ValueError unless a loss is one number that depends on what is trained."""
    if not isinstance(got, Tensor) or got.numel() != 1:
        raise ValueError(
            f"{method.name}: its loss returned {_form(got)}, allowed is a scalar, such as the mean "
            f"over the batch; {RETURN}"
        )
    if not got.requires_grad:
        raise ValueError(
            f"{method.name}: its loss does not depend on what is trained ({', '.join(names[:3])}, "
            "...); keep it in torch, without .item(), .detach() or numpy"
        )


def unstackable(error: BaseException) -> tuple[str, str]:
    """Where code met what torch.func.vmap cannot do, in one line, and how to write it instead.

    The place is the last line of a user's code on the way to the error, or of a torch module.
    """
    frames = [(f.f_locals.get("self"), f, n) for f, n in traceback.walk_tb(error.__traceback__)]
    name = lambda f: f.f_code.co_filename  # noqa: E731
    user = [e for e in frames if not name(e[1]).startswith((OURS, TORCH))]
    modules = [e for e in frames if isinstance(e[0], nn.Module)]
    said = " ".join(str(error).split()).removeprefix("vmap: ").partition(". ")[0]
    if not (user or modules):
        return said, ""
    of, frame, number = (user or modules)[-1]
    called = f"{type(of).__name__}." * (of is not None) + frame.f_code.co_name
    line = linecache.getline(name(frame), number).strip()
    where = f"{called} in {os.path.basename(name(frame))}, line {number}: {line}"
    cures = {
        "one_hot": "write F.one_hot(y, C) as (y[:, None] == torch.arange(C)).float(), or ",
        "item()": "keep the value a tensor, or ",
        "control flow": "choose by torch.where, or ",
        "random": "draw by a method's Batch.noise, or ",
    }
    cure = next((text for word, text in cures.items() if word in f"{line} {error}"), "")
    return f"{where}: {said}", cure


def _form(v: Any) -> str:
    return f"a tensor {tuple(v.shape)}" if isinstance(v, Tensor) else type(v).__name__
