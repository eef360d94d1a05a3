"""FLAYER: heads begin between global and own, layers have rates, what changed most is uploaded.

Chen, Yang, Ren, Li, Wang, "Optimizing Personalized Federated Learning through Adaptive Layer-Wise
Learning", arXiv:2412.07062 (IJCAI 2025), Eq. 2-9, Algorithm 1. Layers i = 1..L of rates and masks
are the model's top-level children, as in the released code. The head, the paper's last s layers, is
the experiment's; counted in modules (head_by="module"), s = 2 of ResNet-18 is its last BatchNorm
and classifier.

    thetatilde = theta_g, in the head                `begin`; "flayer." holds theta_k's head and
        A_k theta_k + (1 - A_k) theta_g              A_k                                       (2)
    eta^(i) = eta (1 + ln(1 + 1/||g^(i)||) i/L)      `paper_rates`, `step`                (3), (4)
    mask: the top UP^i = min(max(i/L, .1), 1)        `paper_masks`                       (5) - (8)
        of |thetahat - thetatilde|
    theta_g = mean of the masked models              `upload`, `filled`               (9), line 11

FLAYER is put around another method, `inner`, over its hooks alone: every training that inner leaves
to SGD takes `step`, its upload passes through the masks, and the heads that the server sends are
mixed before inner begins. What the server fills in for masked entries (`filled`) turns inner's own
mean into the rule below. FedPer and FedRep send no head, and FedALA blends heads itself: nothing is
mixed.

Differs from the paper
1. Line 11 averages zeros where a client sent nothing, so that layer 1 shrinks towards zero
   (agg="literal"). Default is the mean over those who sent the entry, and the old value where
   nobody did, as in code.
2. Silent there: A_k is of the model that ended the client's last round, on its training data (D_k),
   0 at first; rates are taken on a training's first batch and kept for it (as in code);
   ceil(UP^i n_i) entries are kept, of equal changes those of lower index; theta_k stays unmasked on
   its client (as in code); what `inner` covers (Tab. 5c names methods only). All but "as in code"
   are ours.
Differs from the authors' code, which mode="official" follows: an epoch on the head alone before
clients are tested (and A_k taken, on test data!), with or without `mixing`, rates by 0-based child,
`middle` and last/5, masks by tensor inside each kernel
1. The head epoch takes rates by the same rule from its first batch; the code takes those of the
   last training, and constants at first. For the CNN both are eta/5.
2. Who is not sampled keeps its state; there all clients begin and train their heads in every round.
   The same at participation 1.
3. fix_1x1 keeps tensors whose masked unit is a single entry; the code never uploads them (ResNet's
   downsampling stays at its draw).
4. Entries count as sent by the mask, not by being nonzero. Shuffling and left-out batches are the
   experiment's.
Momentum, weight decay and clipping do not reach `step`: as in paper and code, it is plain SGD.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl_core.methods.base import METHODS, Batch, Context, Method, State, Step, make_method
from pfl_core.methods.task import Task
from pfl_core.stacked import Params, clone, flat, prefixed, select, take, unflat, unprefixed
from pfl_core.util.fields import choice, number, value

INNER = ("fedavg", "ditto", "fedamp", "fedper", "fedrep", "fedala")
SORTED = 1024  # entries of a row that a GPU sorts whole; of longer ones it takes the largest
TOGETHER = 2**22  # entries of clients' tensors that a server multiplies at once
TINY = 1e-12  # least norm of a gradient; the code divides by zero


def accuracy(logits: Callable, ctx: Context, p: Params, split: str) -> Tensor:
    """A_k (S,) in [0, 1] of the models with plain names in p, float64.

    0 for a client without samples of that split.
    """

    def right(q: Params, batch: Batch) -> Params:
        hits = (logits(q, batch.x).argmax(1) == batch.y).sum()
        return {"hits": hits, "n": torch.ones_like(batch.y).sum()}

    got = ctx.measure(right, p, split)
    return got["hits"].double() / got["n"].clamp_min(1)


# -- (4): rates over eta of ONE client, {name: rate} -----------------------------------------------
# For gradients g {name: (*shape)}; names beyond the model's have none.


def paper_rates(g: Params, task: Task, middle: float) -> Params:
    """1 + ln(1 + 1/||g^(i)||) i/L, one rate for each child of the model."""
    layers = list(task.layers_by("child").values())
    out = {}
    for i, names in enumerate(layers, 1):
        if trained := [n for n in names if n in g]:
            norm = torch.stack([g[n].norm() for n in trained]).norm().clamp_min(TINY)
            out |= dict.fromkeys(trained, 1 + (1 / norm).log1p() * i / len(layers))
    return out


def official_rates(g: Params, task: Task, middle: float) -> Params:
    """1 for the first child, 1/5 for the last, more for those between them.

    They have `middle` times the mean over tensors of 1 + ln(1 + 1/||g||) (i-1)/(L-1).
    """
    layers = list(task.layers_by("child").values())
    out, last = {}, len(layers) - 1
    for i, names in enumerate(layers):
        if trained := [n for n in names if n in g]:
            norms = torch.stack([g[n].norm() for n in trained]).clamp_min(TINY)
            inner = middle * (1 + (1 / norms).log1p().mean() * i / max(last, 1))
            outer = torch.ones_like(norms[0]) / (1 if i < last else 5)
            out |= dict.fromkeys(trained, inner if 0 < i < last else outer)
    return out


# -- (5) to (8): what is uploaded, {name: (S, *shape) bool} ----------------------------------------
# For changes |after - before| {name: (S, *shape)} of parameters.


def paper_masks(change: Params, task: Task, fix_1x1: bool) -> Params:
    """The ceil(UP^i n_i) largest changes of each child."""
    layers = list(task.layers_by("child").values())
    out = {}
    for i, names in enumerate(layers, 1):
        if part := select(change, names):
            x = flat(part)
            size = x.shape[1]
            keep = max(-(-i * size // len(layers)), -(-size // 10))  # ceil(UP^i n_i), exactly
            out |= unflat(largest(x, keep), part)
    return out


def official_masks(change: Params, task: Task, fix_1x1: bool) -> Params:
    """The largest changes inside each kernel of a convolution, and in 1-D tensors as a whole.

    Other tensors are never masked.
    """
    out, n = {}, len(task.parameters)
    for t, name in enumerate(task.parameters):
        if name not in change:
            continue
        v = change[name]
        unit = v.flatten(3) if v.dim() == 5 else v
        size = unit.shape[-1]
        share = 1 - max(min(t / n, 0.9), 0.1)
        drop = max(min(round(size * share), size - 1), 1)  # halves to even
        if t >= n - 2 or v.dim() not in (2, 5) or (size == 1 and fix_1x1):
            drop = 0
        out[name] = largest(unit, size - drop).view_as(v)
    return out


def largest(x: Tensor, keep: int) -> Tensor:
    """Mask of the `keep` largest of x >= 0 along the last axis; of equal ones, of lower index."""
    if keep in (0, x.shape[-1]):
        return torch.full_like(x, keep > 0, dtype=torch.bool)
    least = _smallest(x, x.shape[-1] - keep)
    chosen = x >= least
    room = keep - chosen.sum(-1, keepdim=True)
    if x.device.type == "cpu" and not room.any():  # no equal ones: on a GPU, asking would wait
        return chosen
    equal = x == least
    room += equal.sum(-1, keepdim=True)
    return chosen & ~equal | equal & (equal.cumsum(-1, dtype=torch.int32) <= room)


def _smallest(x: Tensor, k: int) -> Tensor:
    # The k-th smallest entry along the last axis, from 0. numpy takes a seventh of torch's time.
    if x.device.type == "cpu":
        if x.shape[-1] <= SORTED:
            return torch.from_numpy(np.partition(x.numpy(), k, -1)[..., k : k + 1])
        rows = x.numpy().reshape(-1, x.shape[-1])
        least = np.array([_smallest_of(row, k) for row in rows], rows.dtype)
        return torch.from_numpy(least).view(*x.shape[:-1], 1)
    # torch.kthvalue takes one row after another on a GPU.
    size = x.shape[-1]
    if size <= SORTED:
        return x.sort(-1).values[..., k : k + 1]
    if k < size // 2:
        return x.topk(k + 1, -1, largest=False, sorted=False).values.amax(-1, keepdim=True)
    return x.topk(size - k, -1, sorted=False).values.amin(-1, keepdim=True)


def _smallest_of(row: np.ndarray, k: int) -> Any:
    # Among many equal entries np.partition takes 20 times as long, and many have not moved: weights
    # that met only zeros.
    moved = row[row != 0]
    still = row.size - moved.size
    return np.partition(moved, k - still)[k - still] if k >= still else 0


def filled(v: Tensor, sent: Tensor, weight: Tensor, old: Tensor | None) -> Tensor:
    """Uploads v (S, *shape) with something in place of what was not `sent` (a mask).

    Zeros if `old` is None. Else what does not move a weighted mean over the clients: the mean over
    those who sent the entry, and `old` where nobody did.
    """
    fill = torch.zeros_like(v[:1])
    if old is not None:
        mass, total = torch.zeros_like(v[0]), torch.zeros_like(v[0])
        # Some clients at a time: what a product of all of them takes is as large as their models.
        some = max(TOGETHER // max(v[0].numel(), 1), 1)
        for u, m, w in zip(v.split(some), sent.split(some), weight.split(some), strict=True):
            mass += torch.einsum("s,s...->...", w.to(v.dtype), m.to(v.dtype))
            total += torch.einsum("s,s...->...", w.to(v.dtype), u * m)
        fill = torch.where(mass > 0, total / mass.clamp_min(TINY), old)
    return torch.where(sent, v, fill)


def parted(p: Params) -> tuple[Params, Params]:
    """An upload's masks under the names of what they mask, and the rest."""
    return unprefixed("mask.", p), {n: v for n, v in p.items() if not n.startswith("mask.")}


FORMS = {"paper": (paper_rates, paper_masks), "official": (official_rates, official_masks)}


class Flayer(Method):
    """Heads weighed by accuracy, rates by layer, masked uploads (Chen et al., 2025).

    Examples
    --------
    Masks leave out of an upload what changed least:

    >>> flayer = Experiment(method="flayer", model="mlp", clients=3, rounds=1, max_samples=60)
    >>> sent = lambda e: run(e).history.query("metric == 'upload_bytes'").value.max()
    >>> bool(sent(flayer) < sent(flayer.but(method_args={"masking": False})))
    True
    """

    name = "flayer"
    mode: str = choice("paper", "official", doc="whose rules: the paper's or the released code's")
    agg: str = choice(
        "contributors",
        "literal",
        doc="the mean over those who sent an entry, or with zeros (paper)",
    )
    acc_on: str = choice(
        "auto", "train", "val", "test", doc="split of A_k; auto: train, and test in mode official"
    )
    mixing: bool = value(True, doc="heads are mixed by A_k; without all three parts it is `inner`")
    rates: bool = value(True, doc="layers have rates of their own (Fig. 3)")
    masking: bool = value(True, doc="uploads are masked (Fig. 3)")
    fix_1x1: bool = value(True, doc="mode official: False never uploads 1x1 kernels, as the code")
    middle: float = number(
        20.0,
        above=0,
        doc="mode official: factor on middle layers' rates (code: 20; ResNet-18, fastText: 1)",
    )
    inner: str = choice(*INNER, doc="the method inside (Tab. 5c)")
    inner_args: dict[str, Any] = value({}, doc="its hyper-parameters")

    def check(self) -> None:
        if self.mode == "official" and self.inner != "fedavg":
            raise ValueError(
                f"mode = 'official' has inner = 'fedavg', got {self.inner!r}; use mode = 'paper'"
            )
        _ = self.inner_method  # which is refused as it would be alone

    @cached_property
    def inner_method(self) -> Method:
        """The method inside, for the same task."""
        return make_method(self.inner, **self.inner_args).bind(self.task)

    @property
    def revision(self) -> int:
        """Raised with FLAYER's own numbers and with those of the method inside."""
        # One for each change of FLAYER itself: mode official tunes heads that are not mixed, too.
        return METHODS[self.inner].revision + int(self.mode == "official")

    @property
    def split(self) -> str:
        """The split that A_k is measured on."""
        if self.acc_on != "auto":
            return self.acc_on
        return "train" if self.mode == "paper" else "test"

    @property
    def leaks_test(self) -> bool:
        """Whether A_k reads test data."""
        return self.mixing and self.split == "test"

    # -- what is inner's alone ---------------------------------------------------------------------
    @property
    def noise(self) -> tuple[int, ...] | None:
        return self.inner_method.noise

    def is_shared(self, name: str) -> bool:
        return self.inner_method.is_shared(name)

    def download(self, state: State, sel: Tensor) -> Params:
        return self.inner_method.download(state, sel)

    @property
    def own_scores(self) -> bool:
        return METHODS[self.inner].logits is not Method.logits

    def logits(self, p: Params, x: Tensor) -> Tensor:
        return self.inner_method.logits(p, x)

    def loss(self, p: Params, anchor: Params, batch: Batch) -> Tensor:
        return self.inner_method.loss(p, anchor, batch)

    def serve(self, p: Params) -> Params:
        return self.inner_method.serve(p)

    # -- (2): where clients begin ------------------------------------------------------------------
    def carried(self, name: str) -> str:
        """The model's name inside a name that may have a prefix ("sent.fc.weight").

        "" if it carries no parameter.
        """
        plain = name if name in self.task.parameters else name.partition(".")[2]
        return plain if plain in self.task.parameters else ""

    def init(self) -> State:
        state, t = self.inner_method.init(), self.task
        if not self.mixing or self.inner == "fedala":
            return state
        sent = self.download(state, torch.zeros(1, dtype=torch.int64, device=t.device))
        if heads := {self.carried(n) for n in sent} & t.head:
            zero = torch.zeros(t.K, dtype=t.dtype, device=t.device)
            state.clients |= prefixed("flayer.", clone(select(t.start(), heads)) | {"acc": zero})
        return state

    def begin(self, state: State, sel: Tensor, sent: Params | None = None) -> Params:
        sent = self.download(state, sel) if sent is None else sent
        mine, mixed = unprefixed("flayer.", take(state.clients, sel)), {}
        for n, v in sent.items():
            if (head := self.carried(n)) in mine:
                mixed[n] = torch.lerp(v, mine[head], mine["acc"].view(-1, *[1] * (v.dim() - 1)))
        return self.inner_method.begin(state, sel, sent | mixed)

    def tune_head(self, ctx: Context, start: Params) -> Params:
        """Mode official: `start` after one epoch on the head alone, mixed or not."""
        if self.mode == "paper":
            return start
        only = [n for n in self.task.parameters if n in self.task.head]
        step = self.step if self.rates else None
        return ctx.train(self.loss, start, only=only, epochs=1, stream="flayer", step=step)

    def personal(self, state: State, ctx: Context) -> Params:
        start = self.begin(state, ctx.sel)
        if self.mode == "official" or "flayer.acc" in start:
            return self.serve(self.tune_head(ctx, start))
        return self.inner_method.personal(state, ctx)

    # -- (3), (4): the step ------------------------------------------------------------------------
    def step(self, p: Params, anchor: Params, grad: Any, at: Step) -> tuple[Params, Params]:
        """One step of ONE client; the first batch's factors are kept for the whole training."""
        g = grad(p)
        f: Params = at.memory or FORMS[self.mode][0](g, self.task, self.middle)
        eta: Any = at.lr if isinstance(at.lr, dict) else dict.fromkeys(g, at.lr)
        rate = {n: eta[n] * (f[n] if n in f else v.new_ones(())) for n, v in g.items()}
        # In place: new memory for a model in each step costs a tenth of it.
        return p | {n: p[n].sub_(v.mul_(rate[n])) for n, v in g.items()}, f

    def local(self, ctx: Context, start: Params) -> Params:
        start = self.tune_head(ctx, start)
        # The round as inner sees it: plain SGD is our step, a step of inner's own stays.
        train = partial(ctx.train, step=self.step) if self.rates else ctx.train
        same = dict(sel=ctx.sel, round=ctx.round, lr=ctx.lr, state=ctx.state, measure=ctx.measure)
        inner: Any = SimpleNamespace(**same, train=train)
        end = self.inner_method.local(inner, start)
        if "flayer.acc" in start:
            heads = select(end, unprefixed("flayer.", start))
            acc = accuracy(self.logits, ctx, end if self.mode == "paper" else start, self.split)
            end = end | prefixed("flayer.", heads | {"acc": acc.to(self.task.dtype)})
        return end | self.masks(ctx, start, end) if self.masking else end

    def masks(self, ctx: Context, start: Params, end: Params) -> Params:
        """What clients upload of `end`: {"mask." + name: (S, *shape) bool}."""
        uploaded = [n for n in end if n not in ctx.state.clients]
        sent = {n: self.carried(n) for n in uploaded if self.carried(n)}
        masks = []
        # One client after another: together they take several times the memory of all models.
        for i in range(len(ctx.sel)):
            change = {plain: (end[n][i] - start[plain][i]).abs()[None] for n, plain in sent.items()}
            masks.append(FORMS[self.mode][1](change, self.task, self.fix_1x1))
        return {f"mask.{n}": torch.cat([m[plain] for m in masks]) for n, plain in sent.items()}

    # -- (9): the server ---------------------------------------------------------------------------
    def upload(
        self, state: State, sel: Tensor, start: Params, end: Params, weight: Tensor
    ) -> State:
        masks, full = parted(end)
        for n, m in masks.items():
            old = state.server.get(n, start[self.carried(n)])
            full[n] = filled(full[n], m, weight, old if self.agg == "contributors" else None)
        return self.inner_method.upload(state, sel, start, full, weight)

    def traffic(self, state: State, sel: Tensor, down: Params, up: Params) -> tuple[int, int]:
        masks, full = parted(up)
        down_n, up_n = self.inner_method.traffic(state, sel, down, full)
        return down_n, up_n - int(sum((~m).sum() for n, m in masks.items() if n in full))
