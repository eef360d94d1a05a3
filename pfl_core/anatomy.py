"""What a trial run shows of a network: in which order its parameters are used, and which of them
give the scores.

Names say nothing of order: a head may be registered before its body, inside a wrapper, or beside a
layer that serves training alone. So a module that is not ours is run once on two samples, and each
of torch's operations is watched. What depends on the samples is data; a parameter is used where an
operation takes it, or what was made of it alone, together with data.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pfl_core import models
from pfl_core.util import checks, identity
from pfl_core.util.draws import Draws, unmoved

HOOKS = {"_forward_hooks", "_forward_pre_hooks"}


@dataclass(eq=False)
class Anatomy:
    """Layers and head of a network, in the order in which a trial run used them.

    Without one (`Anatomy(model)`) the order is that of registration, which is that of our own
    networks; the head is the last that was registered, and nothing is known of the scores.

    Attributes
    ----------
    used : names of the parameters that the scores depend on, in the order of their first use
    scoring : those of the last operations that multiply features: what gives the scores
    after : those that scale or shift scores afterwards, such as a temperature
    linear : the path of the nn.Linear whose output are the scores, and the names of its weight and
        bias; of another network (None, ())
    """

    model: nn.Module
    used: Sequence[str] = ()
    scoring: frozenset[str] = frozenset()
    after: frozenset[str] = frozenset()
    linear: tuple[str | None, tuple[str, ...]] = (None, ())

    @classmethod
    def seen(cls, model: nn.Module, x: Tensor) -> Anatomy:
        """The Anatomy of a network by a trial run on samples x (B, *input_shape).

        A copy of it runs, in evaluation mode. Our own networks need none.

        Raises
        ------
        ValueError
            If a parameter that it uses is not registered in it.
        """
        if models.is_ours(model):
            return cls(model)
        trial = copy.deepcopy(model).eval()
        calls = _Calls(trial)
        with torch.no_grad(), calls, _Flow(trial, x) as flow:
            scores = trial(x)
        if flow.loose:
            raise ValueError(
                f"{type(model).__name__} uses a parameter of shape {tuple(flow.loose[0].shape)} "
                "that is not registered in it, so it would not be trained; keep layers in an "
                "nn.ModuleList or nn.ModuleDict instead of a list or dict, or freeze it "
                "(requires_grad_(False)) if it is a constant"
            )
        used, scoring, after = flow.behind(scores)
        linear = (None, ()) if after else calls.linear(scores, scoring)
        return cls(model, used, scoring, after, linear)

    @cached_property
    def root(self) -> str:
        """The module whose children count as layers: single children are descended."""
        path, used = "", self.used or [n for n, _ in self.model.named_parameters()]
        while True:
            here = self.model.get_submodule(path)
            inside = path + "." if path else ""
            below = {n[len(inside) :].partition(".")[0] for n in used if n.startswith(inside)}
            child = here._modules.get(min(below, default=""))
            if len(below) != 1 or child is None or not _has_parts(child) or models.units(here):
                return path
            path = inside + min(below)

    def layers(self, by: str) -> dict[str, list[str]]:
        """{layer: names of its trainable parameters} in forward order; see `models.layers`.

        Layers that the scores do not depend on come first.
        """
        place = {n: at for at, n in enumerate(self.used)}
        found = models.layers(self.model, by, self.root)
        first = {
            layer: min([place[n] for n in names if n in place], default=-1)
            for layer, names in found.items()
        }
        return dict(sorted(found.items(), key=lambda e: first[e[0]]))

    def head(self, depth: int, by: str, named: str = "") -> list[str]:
        """Names of the parameters of the head, and then of its BatchNorm buffers.

        Parameters
        ----------
        depth, by
            How many layers, and what counts as one: what gives the scores is the first of them, and
            what scales the scores afterwards belongs to it.
        named
            Names of modules or parameters, separated by commas, in place of these.

        Raises
        ------
        ValueError
            For a depth beyond the layers, or an unknown name.
        """
        if named:
            return self._named([part.strip() for part in named.split(",")])
        parts = self.layers(by)
        models.check_depth(depth, parts, by)
        first = list(parts)[len(parts) - depth :]
        if self.scoring and by != "tensor":
            giving = self.scoring | self.after
            last = [layer for layer, names in parts.items() if not giving.isdisjoint(names)]
            rest = [layer for layer in parts if layer not in last]
            first = [*rest[max(0, len(rest) - depth + 1) :], *last] if depth else []
        names = [n for layer in parts if layer in first for n in parts[layer]]
        return names + models.statistics(self.model, names, by, self.root)

    def _named(self, parts: list[str]) -> list[str]:
        every = [n for n, _ in self.model.named_parameters(remove_duplicate=False)]
        paths = {".".join(n.split(".")[:i]) for n in every for i in range(1, n.count(".") + 2)}
        for part in parts:
            where = "module in Experiment(head=...):"
            checks.known(where, part, sorted(paths), "give names of modules, with commas")
        mine = lambda n: any(n == part or n.startswith(part + ".") for part in parts)  # noqa: E731
        tied = models.tied(self.model)
        inside = {tied.get(n, n) for n in every if mine(n)}  # by any of its names
        names = [n for n in models.trained(self.model) if n in inside]
        if not names:
            raise ValueError(
                f"Experiment(head={', '.join(parts)!r}): nothing in it is trained; train it, or "
                "name other modules"
            )
        norms = set(models.bn(self.model))
        return names + [n for n in models.buffers(self.model) if n in norms and mine(n)]

    def check_head(self, head: Sequence[str] | frozenset[str], depth: int, by: str) -> None:
        """Raise ValueError for a head of `depth` layers that is not what gives the scores."""
        if not depth:
            return
        if not self.scoring:
            self._check_last(depth)
            return
        why, mine = "", set(head)
        if self.scoring.isdisjoint(self._trained):
            why = "ends where nothing in it is trained"
        elif self.scoring.isdisjoint(mine):
            why = f"has {', '.join(sorted(mine)[:2])} instead"
        elif depth == 1 and mine.issuperset(self._trained) and self._deep:
            why = "is the whole network"
        if why:
            raise ValueError(
                f"the scores of {type(self.model).__name__} come from {self.scorer}, and a head of "
                f"head_depth={depth} by head_by={by!r} {why}; name the modules that are the head, "
                f"as in Experiment(head={self.scorer!r})"
            )

    def _check_last(self, depth: int) -> None:
        # Of a network without a trial run: what was registered last gives the scores.
        path, names = [*models.layers(self.model, every=True).items()][-1]
        if set(models.trained(self.model)).isdisjoint(names):
            raise ValueError(
                f"the scores come from {path}, and a head of head_depth={depth} ends where nothing "
                "in it is trained; train it, or take a method without a head, such as fedavg"
            )

    @property
    def _trained(self) -> set[str]:
        known = {n for n, p in self.model.named_parameters() if p.requires_grad}
        return known.intersection(self.used)

    @property
    def _deep(self) -> bool:
        # Whether there is more than one layer, and more than what gives the scores.
        modules = [n for n in self.layers("module").values() if self._trained.intersection(n)]
        return len(modules) > 1 and not self._trained <= self.scoring | self.after

    @property
    def scorer(self) -> str:
        """The modules that give the scores, separated by commas; "" if that is not known."""
        order = [n for n, _ in self.model.named_parameters() if n in self.scoring | self.after]
        return ",".join(dict.fromkeys(map(models.layer_namer(self.model, "module"), order)))

    def last_linear(self) -> tuple[str, ...]:
        """Names of weight and bias (if it has one) of the nn.Linear whose output are the scores.

        Raises
        ------
        ValueError
            If the scores are not the output of one.
        """
        if not self.scoring:
            return models.last_linear(self.model)
        if not self.linear[1]:
            raise ValueError(
                f"it needs a model whose last layer is an nn.Linear that gives the scores, and "
                f"the scores of {type(self.model).__name__} come from {self.scorer}: they are not "
                "the output of one nn.Linear over features (B, F); let its forward end in it, "
                "without a softmax or a scale after it"
            )
        return self.linear[1]


def examined(name: str, model: nn.Module, x: Tensor, classes: int, batch: int) -> Anatomy:
    """The Anatomy of the model `name`, after trial runs in both modes of what it is used for.

    Parameters
    ----------
    x : (2, *input_shape)
        Samples to try it on.
    classes
        Number of scores that it must give.
    batch
        Samples of a batch in training.

    Raises
    ------
    ValueError
        If it does not make scores (B, classes), in evaluation or in training mode.
    """
    if models.is_ours(model):
        models.check_fit(name, model, x, classes)
    else:
        with _unshared(name, model):
            # What is bound to a global generator has one of its own in a copy.
            _beside(name, models.copied(name, model))
            with unmoved(f"model {name!r}"):
                models.check_fit(name, model, x, classes)
                _check_training(name, model, x, classes)
            for training in (False, True):
                _check_memory(name, model, x, training)
            _check_mixing(name, model, x)
    if batch == 1 and models.bn(model):
        cure = "BatchNorm needs several values of a channel: use batch=2 or more"
        _check_training(name, model, x[:1], classes, f" with batch=1 ({cure})")
    return Anatomy.seen(model, x)


def _check_training(name: str, model: nn.Module, x: Tensor, classes: int, how: str = "") -> None:
    trial = models.copied(name, model).train()
    try:
        with torch.no_grad(), Draws(0):
            scores = trial(x.clone())
    except models.REFUSED as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(
            f"model {name!r} gives scores in evaluation mode, and fails in training mode{how}: "
            f"{error}"
        ) from error
    frozen = {n: p.requires_grad for n, p in model.named_parameters()}
    if moved := [n for n, p in trial.named_parameters() if p.requires_grad != frozen.get(n)]:
        raise ValueError(
            f"model {name!r}: its forward or train freezes or unfreezes {moved[0]}; call "
            "requires_grad_ in the function that makes the model instead"
        )
    before = dict(model.named_buffers())
    for n, v in trial.named_buffers():
        if n in before and not (before[n].isfinite().all() or torch.equal(v, before[n])):
            raise ValueError(
                f"model {name!r}: buffer {n} holds infinite numbers, so it is a constant, and "
                "training changes it; let it begin with finite ones"
            )
    got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
    if got != (len(x), classes):
        raise ValueError(
            f"model {name!r} returns {got} for {len(x)} samples in training mode{how}; it must "
            f"give scores {(len(x), classes)} in both modes: leave auxiliary outputs out, as with "
            "aux_logits=False, or return model(x)[0] from a module around it"
        )


def _check_memory(name: str, model: nn.Module, x: Tensor, training: bool) -> None:
    # ValueError where scores are not a function of samples and of what the model registers: its
    # other memory would be that of a thread, which one client after the other goes through.
    fresh, used = (models.copied(name, model).train(training) for _ in range(2))
    state = {n: v.clone() for n, v in used.state_dict().items() if isinstance(v, Tensor)}
    given, hidden = x.clone(), ""
    with torch.no_grad():
        with Draws(0):
            scores = fresh(given)
        if not _same(given, x):
            raise ValueError(
                f"model {name!r}: its forward changes its samples in place, which some methods use "
                "twice; let it begin with x = x.clone(), or compute without in-place operations"
            )
        weights = {n for n, _ in model.named_parameters(remove_duplicate=False)}
        now = fresh.state_dict()
        for n in [n for n in state if not training or n in weights]:
            if not _same(now[n], state[n]):
                raise ValueError(
                    f"model {name!r}: its forward changes {n}, which clients share; compute with "
                    "a changed copy, and write to buffers in training mode only (if self.training)"
                )
        try:
            for p in filter(Tensor.is_floating_point, used.parameters()):
                p *= 0.75
            with Draws(1):
                used(x[:1].expand_as(x).clone())
            used.load_state_dict(state, strict=False)
            with Draws(0):
                again = used(x.clone())
            near = torch.allclose(again, scores, rtol=1e-4, atol=1e-4, equal_nan=True)
        except models.REFUSED as error:
            near, hidden = False, f" ({error})"
        kept = []
        for _ in range(2):
            with contextlib.suppress(*models.REFUSED), Draws(0):
                used.load_state_dict(state, strict=False)
                used(x.clone())
            kept.append(_beside(name, used))
    keeps = (
        "it keeps something from call to call that is no registered buffer, and clients would get "
        "each other's; keep it by register_buffer, without persistent=False, or compute it in each "
        "forward"
    )
    if not near:
        raise ValueError(
            f"model {name!r} gives the same samples other scores after it was used with other "
            f"weights{hidden}: {keeps}"
        )
    if counted := [n for n, v in kept[1].items() if v != kept[0].get(n)]:
        raise ValueError(
            f"model {name!r} changes {counted[0]} each time the same samples are given: {keeps}"
        )


@contextlib.contextmanager
def _unshared(name: str, model: nn.Module) -> Iterator[None]:
    # ValueError where copies of the model that run within it change what the model itself holds:
    # they share its functions, and the variables that these close over.
    before, failed = _beside(name, model), None
    try:
        yield
    except ValueError as error:
        failed = error
    if changed := [n for n, v in _beside(name, model).items() if v != before.get(n)]:
        raise ValueError(
            f"model {name!r}: a copy of it that runs changes {changed[0]} of the others, or what "
            "that reads: copies share functions and the variables around them (closures), so "
            "clients that train at the same time would get each other's; keep it in an attribute "
            "of the module that forward itself sets, or return it"
        ) from failed
    if failed:
        raise failed


def _check_mixing(name: str, model: nn.Module, x: Tensor) -> None:
    # ValueError where a sample's scores in evaluation mode depend on the samples beside it.
    mixes = False
    given = _unlike(x)
    small = given / given.abs().max().clamp(min=1) if given.is_floating_point() else given
    # Weights of zero, as of a last layer, may hide it, or large samples beside what they become.
    for drawn, x in ((False, given), (True, small)):
        trial = models.copied(name, model).eval()
        with torch.no_grad(), Draws(0):
            for p in trial.parameters() if drawn else ():
                if p.requires_grad and p.is_floating_point():
                    p += torch.randn_like(p) * (p.shape[:1].numel() / max(1, p.numel())) ** 0.5
        for i, j in ((0, 1), (1, 0)):
            with contextlib.suppress(*models.REFUSED), torch.no_grad(), Draws(0), _Eps() as eps:
                twice = trial(x[[i, i]])
                # In one place of a batch of one size a sample's scores are rounded alike.
                pairs = [(twice[0], trial(x[[i, j]])[0]), (twice[1], trial(x[[j, i]])[1])]
                if not drawn:
                    pairs.append((twice[0], twice[1]))
                    with contextlib.suppress(*models.REFUSED):  # it may need two samples
                        alone = trial(x[[i]])
                        pairs += [(twice[0], alone[0])] if len(alone) == 1 else []
                mixes |= any(_far(a, b, eps.value**0.5) for a, b in pairs)
    if mixes:
        raise ValueError(
            f"model {name!r}: in evaluation mode a sample's scores change with the other samples "
            "of its batch, which are those of several clients in some methods; give "
            "batch_first=True to attention and RNNs, leave track_running_stats=False out of "
            "BatchNorm, and take no softmax, norm, mean or sum over dim 0"
        )


def _unlike(x: Tensor) -> Tensor:
    # Two samples; where they are about equal, the second one is changed.
    a, b = x
    if a.is_floating_point() and torch.allclose(a, b, rtol=0.1, atol=0.1):
        with Draws(0):
            b = a + torch.rand_like(a) * a.abs().max().clamp(min=1)
    elif torch.equal(a, b):
        b = torch.zeros_like(a)  # any model of tokens knows 0
    return torch.stack([a, b])


def _far(a: Tensor, b: Tensor, tolerance: float) -> bool:
    # Whether finite scores differ, relative to each and to the usual one.
    if not (a.isfinite().all() and b.isfinite().all()):
        return False
    least = tolerance * max(0.01, float(a.double().abs().median()))
    return not torch.allclose(a.double(), b.double(), rtol=tolerance, atol=least)


class _Eps(TorchDispatchMode):
    """Within it, `value` is the eps of the coarsest numbers that are computed, float32 at least."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see util/draws.py

    def __init__(self) -> None:
        super().__init__()
        self.value = torch.finfo(torch.float32).eps

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`, and note the precision of its results."""
        out = func(*args, **kwargs or {})
        found = [torch.finfo(t.dtype).eps for t in _tensors(out) if t.is_floating_point()]
        self.value = max([self.value, *found])
        return out


def beside(name: str, model: nn.Module) -> dict[str, str]:
    """{place: content} of what a model holds, and its state_dict lacks."""
    kept, buffers = model.state_dict(), model.named_buffers(remove_duplicate=False)
    lacking = {n: identity.contents(v) for n, v in buffers if n not in kept}
    return lacking | _beside(name, model)


def _beside(name: str, model: nn.Module) -> dict[str, str]:
    # What modules hold beside what torch registers, and their hooks, by content; ValueError for a
    # generator among it.
    torchs, found = vars(nn.Module()).keys() - HOOKS, {}
    for path, module in model.named_modules():
        for n in sorted(vars(module).keys() - torchs):
            place = f"{path}.{n}".lstrip(".")
            held = vars(module)[n]
            try:
                found[place] = identity.contents(list(held.values()) if n in HOOKS else held)
            except ValueError as error:
                raise ValueError(
                    f"model {name!r}: {place} is or holds a generator of random numbers, which "
                    "goes on from client to client, in the order in which threads get to it; draw "
                    "with torch.rand, torch.randn or nn.Dropout (they are seeded for each "
                    "client), or make the generator where it is used, from a seed"
                ) from error
    return found


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def _has_parts(module: nn.Module) -> bool:
    # Whether it is a container, and no layer.
    if isinstance(module, nn.ParameterList | nn.ParameterDict):
        return True
    return bool(module._modules) and not hasattr(module, "parametrizations")


@dataclass(eq=False)
class _Value:
    """What lies in a tensor's memory: of which data and parameters it was made."""

    data: list[_Value] = field(default_factory=list)
    parameters: frozenset[str] = frozenset()
    is_data: bool = False
    through: bool = True  # as large as its data, which it scales or shifts at most
    # Its size, if what scales it has several axes; larger than the scores, it is summed later.
    table: int = 0


class _Flow(TorchDispatchMode):
    """Watches which operations take what: data that depend on x, and parameters."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see util/draws.py

    def __init__(self, model: nn.Module, x: Tensor):
        super().__init__()
        self.names = {n: at for at, (n, _) in enumerate(model.named_parameters())}
        self.known: dict[Any, _Value] = {_memory(x): _Value(is_data=True)}
        self.held: list[Tensor] = [x]  # so that no later tensor gets its memory
        self.first: dict[str, int] = {}  # use of each parameter, by number
        self.loose: list[Tensor] = []  # parameters that are used and not registered
        for name, p in model.named_parameters():
            before = self.known.get(_memory(p), _Value())
            self.known[_memory(p)] = _Value([], before.parameters | {name})

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func`, and note of what its results are made."""
        given = [(t, self.known.get(_memory(t))) for t in _tensors((args, kwargs))]
        out = func(*args, **kwargs or {})
        taken = [(t, v) for t, v in given if v is not None]
        unknown = [t for t, v in given if v is None and isinstance(t, nn.Parameter)]
        self.loose += [t for t in unknown if t.requires_grad]
        made = list(_tensors(out))
        if taken and made:
            self._note(func, taken, made)
        return out

    def _note(self, func: Any, taken: list[tuple[Tensor, _Value]], made: list[Tensor]) -> None:
        data = [(t, v) for t, v in taken if v.is_data]
        weights = [(t, v) for t, v in taken if not v.is_data and v.parameters]
        names = frozenset().union(*(v.parameters for _, v in weights))
        value = _Value([v for _, v in data], names, bool(data))
        if data and names:
            for n in names:
                self.first.setdefault(n, len(self.held))
            small = torch.Tag.pointwise in func.tags or all(t.dim() < 2 for t, _ in weights)
            value.through = small and made[0].numel() == max(t.numel() for t, _ in data)
            if any(t.squeeze().dim() > 1 for t, _ in weights):
                value.table = made[0].numel()
        for t in made:
            self.known[_memory(t)] = value
            self.held.append(t)

    def behind(self, scores: Tensor) -> tuple[list[str], frozenset[str], frozenset[str]]:
        """`used`, `scoring` and `after` of an Anatomy."""
        begin = self.known.get(_memory(scores), _Value())
        through = lambda v: v.through and v.table <= scores.numel()  # noqa: E731
        last = list(_reached(begin, lambda v: v.data if through(v) else []))
        scoring = frozenset().union(*(v.parameters for v in last if not through(v)))
        after = frozenset().union(*(v.parameters for v in last if through(v))) - scoring
        every = frozenset().union(*(v.parameters for v in _reached(begin, lambda v: v.data)))
        order = sorted(every & self.first.keys(), key=lambda n: (self.first[n], self.names[n]))
        return (order, scoring, after) if scoring else ([], frozenset(), frozenset())


def _reached(begin: _Value, following: Any) -> Iterator[_Value]:
    todo, seen = [begin], {id(begin)}
    while todo:
        yield (value := todo.pop())
        new = [v for v in following(value) if id(v) not in seen]
        seen |= set(map(id, new))
        todo += dict.fromkeys(new)


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (t for t in tree_leaves(tree) if isinstance(t, Tensor))


def _memory(t: Tensor) -> Any:
    # Views share it with what they are views of.
    try:
        return t.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # sparse tensors have none
        return id(t)


class _Calls:
    """Within it, the last input and output of each nn.Linear of a model are kept."""

    def __init__(self, model: nn.Module):
        self.model, self.last = model, {}

    def __enter__(self) -> None:
        linears = [(n, m) for n, m in self.model.named_modules() if isinstance(m, nn.Linear)]
        self.hooks = [m.register_forward_hook(self._keep(n), with_kwargs=True) for n, m in linears]

    def _keep(self, path: str) -> Any:
        def keep(module: nn.Module, args: tuple, named: dict[str, Any], out: Tensor) -> None:
            self.last[path] = (*args, *named.values())[0], out

        return keep

    def __exit__(self, *error: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def linear(self, scores: Tensor, scoring: frozenset[str]) -> tuple[str | None, tuple[str, ...]]:
        """`linear` of an Anatomy: the scores may have another shape than the layer's output."""
        known = {id(p): n for n, p in self.model.named_parameters()}
        for path, (z, out) in self.last.items():
            layer = self.model.get_submodule(path)
            both = [layer._parameters.get(n) for n in ("weight", "bias")]
            own = [p for p in both if p is not None]
            names = tuple(known[id(p)] for p in own)
            if both[0] is None or set(names) != scoring:
                continue
            if out.numel() != scores.numel() or z.numel() != len(scores) * z.shape[-1]:
                continue
            if out.dtype != scores.dtype:
                continue
            again = F.linear(z.reshape(len(scores), -1), *own)
            if torch.allclose(again, scores) and torch.equal(out.reshape(scores.shape), scores):
                return path, names
        return None, ()
