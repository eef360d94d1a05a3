"""pFedHN and pFedHN-PC: a hypernetwork on the server writes every client's model from the client's embedding.

Shamsian, Navon, Fetaya and Chechik, "Personalized Federated Learning using Hypernetworks", ICML 2021, arXiv:2103.04628, Algorithm 1.

    theta_i = h(v_i; phi)                                       `Hypernetwork`, `download`
    theta~_i <- K local steps from theta_i                      `local` (the default; the experiment's `steps`, plan="fresh")
    Delta_i = theta_i - theta~_i                                `upload`; what travels is as large as theta_i, not as phi
    phi <- phi - alpha (d theta_i / d phi)^T Delta_i            one vector-Jacobian product, then SGD with momentum and weight decay
    v_i <- v_i - alpha (d theta_i / d v_i)^T Delta_i
    PC (Sec. 3.3): omega_i, the experiment's head, stays with client i; phi writes the rest

Local training is given by fields of the Experiment: steps=50 is the paper's (Sec. 5), participation 1/K Algorithm 1's; plan="fresh",
batch=64, lr=5e-3, momentum=.9, weight_decay=5e-5, clip=50 are the released trainer's (the paper tunes rates over a grid and names no
more). alpha and the hypernetwork's momentum, decay and clip are fields here.

Differs from the paper
1. Algorithm 1 prints Delta = theta~ - theta, with which phi - alpha J^T Delta climbs the loss; hn_sign="literal" does so.
2. Several participants (the paper has one): phi takes the mean of their products, each v_i its own.
3. BatchNorm (no network of the paper has any): scale and shift are written, statistics follow the experiment's buffer policy.
4. Novel clients (Sec. 5.3): start, rate and number of steps are not given; see `adopt`. Use weight_decay=0 there.
5. omega_i is trained with the local rate, as in the authors' code; the text says alpha.
Differs from the authors' code
1. Spectral norm (Table 4): their trainer reads the flag and never passes it on; here it acts, after 15 warm-up power iterations.
2. Sizes S/M/L (Table 2), fixed descriptors (App. C.5) and novel clients are not in it; the authors describe the first in an issue.
3. Embeddings have the rate of phi (there an option that defaults to it); its other optimiser, Adam, is left out.
As in their code: momentum and decay move all of phi and all embeddings at every step; no ReLU between trunk and heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfl_core.methods.base import Method, State
from pfl_core.methods.task import Task
from pfl_core.stacked import Params, own, prefixed, select

Shapes = dict[str, tuple[int, ...]]


class Hypernetwork(NamedTuple):
    """h(v; phi): a trunk of linear layers with ReLU between them, then one linear head for each tensor of each size of network."""

    sizes: list[Shapes]  # what is written for a client of size 0, 1, ...
    full: Shapes  # the model that they are padded to
    hidden: int
    n_hidden: int
    spectral: bool

    def draw(self, d: int) -> Params:
        """New weights {layer.weight, layer.bias, with spectral norm layer.u} for embeddings of size d, as nn.Linear draws them."""
        layers = {
            f"trunk.{i}": (self.hidden if i else d, self.hidden) for i in range(self.n_hidden + 1)
        }
        for g, shapes in enumerate(self.sizes):
            layers |= {f"head.{g}.{n}": (self.hidden, prod(s)) for n, s in shapes.items()}
        phi = {}
        for name, (inputs, outputs) in layers.items():
            phi |= {
                f"{name}.{p}": v.detach() for p, v in nn.Linear(inputs, outputs).named_parameters()
            }
            if self.spectral:
                phi[f"{name}.u"] = torch.randn(outputs)
        for _ in range(15):
            self.advance(phi)
        return phi

    def write(self, phi: Params, sel: Tensor, size: Tensor) -> Params:
        """Models {name: (S, *shape)} of clients sel (S,), of sizes (S,); a smaller one has zeros at the far end of each axis."""
        h = self._linear(phi, "trunk.0", phi["v"][sel])
        for i in range(self.n_hidden):
            h = self._linear(phi, f"trunk.{i + 1}", h.relu())
        rows = [(size == g).nonzero().squeeze(1) for g in range(len(self.sizes))]
        back, out = torch.argsort(torch.cat(rows)), {}
        for n, full in self.full.items():
            parts = []
            for g, r in enumerate(rows):
                part = self._linear(phi, f"head.{g}.{n}", h[r]).view(len(r), *self.sizes[g][n])
                short = [(0, a - b) for a, b in zip(full, self.sizes[g][n], strict=True)]
                parts.append(F.pad(part, sum(reversed(short), ())))
            out[n] = torch.cat(parts)[back]
        return out

    def pull(
        self, phi: Params, names: Iterable[str], sel: Tensor, size: Tensor, delta: Params
    ) -> Params:
        """(d theta / d phi)^T delta for the entries `names` of phi: {name: like phi[name]}; delta {name: (S, *shape)} as written."""
        with torch.enable_grad():
            leaves = {n: phi[n].detach().requires_grad_() for n in names}
            theta = self.write(phi | leaves, sel, size)
        outputs, cotangents = [theta[n] for n in delta], list(delta.values())
        return dict(
            zip(
                leaves, torch.autograd.grad(outputs, list(leaves.values()), cotangents), strict=True
            )
        )

    def advance(self, phi: Params) -> None:
        """One power iteration of every layer's u, in place."""
        for n in phi:
            if n.endswith(".u"):
                phi[n].copy_(_power(phi[n[:-1] + "weight"], phi[n])[0])

    def _linear(self, phi: Params, name: str, x: Tensor) -> Tensor:
        # Spectral norm: the weight over its top singular value u^T W v, where u and v count as constants (Miyato et al., 2018).
        w = phi[f"{name}.weight"]
        if self.spectral:
            u, v = _power(w.detach(), phi[f"{name}.u"])
            w = w / (u @ w @ v)
        return F.linear(x, w, phi[f"{name}.bias"])


def _power(w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    v = F.normalize(w.T @ u, dim=0)
    return F.normalize(w @ v, dim=0), v


def narrowed(task: Task, width: float) -> Shapes:
    """Shapes of the task's parameters with `width` times the channels in all convolutions; what reads them reads fewer, outputs stay.

    Raises ValueError for BatchNorm, and for a width with which channels are no integers >= 1.
    """
    if task.bn and width != 1:
        raise ValueError(
            f"widths: a network with BatchNorm ({min(task.bn)}) has one size; use one without it, or widths=()"
        )
    shapes, before = {}, 1.0
    for names in task.layers.values():
        here = width if task.initial[names[0]].dim() > 2 else 1.0
        for n in names:
            exact = [
                s * w for s, w in zip(task.initial[n].shape, (here, before, 1, 1), strict=False)
            ]
            if not 0 < width <= 1 or any(abs(s - round(s)) > 1e-6 for s in exact):
                raise ValueError(
                    f"widths: {width} makes {n} {exact}; use shares in (0, 1] that leave whole channels"
                )
            shapes[n] = tuple(map(round, exact))
        before = here
    return shapes


def _sgd(
    p: Params,
    momentum: Params,
    grad: Params,
    lr: float,
    mu: float,
    decay: float,
    clip: float,
    by_row: bool,
) -> None:
    # As torch.optim.SGD counts it, in place: phi is large, and new memory would cost more than the arithmetic. With phi frozen
    # clients do not meet, and each one's gradient (a row of v) is clipped alone.
    norm = (
        grad["v"].norm(dim=1, keepdim=True)
        if by_row
        else torch.stack([g.norm() for g in grad.values()]).norm()
    )
    scale = (clip / (norm + 1e-6)).clamp(max=1) if clip else torch.ones_like(norm)
    for n, g in grad.items():
        p[n].sub_(momentum[n].mul_(mu).addcmul_(g, scale).add_(p[n], alpha=decay), alpha=lr)


@dataclass(frozen=True, eq=False)
class PFedHN(Method):
    """A hypernetwork writes all clients' models from one embedding a client (Shamsian et al., 2021)."""

    name = "pfedhn"
    lr: float = 0.01  # alpha, of phi and embeddings; the code's default, the paper's grid is .1, .05, .01, .005
    momentum: float = 0.9  # of the hypernetwork's SGD [code]
    weight_decay: float = 1e-3  # of the hypernetwork's SGD [code]
    clip: float = 50.0  # L2 norm of the hypernetwork's gradient [code]; 0 is no clipping
    dim: int = 0  # d_e; 0 is floor(1 + K/4) (Sec. 5)
    hidden: int = 100  # width of the trunk (App. B)
    n_hidden: int = (
        3  # hidden layers of the trunk (App. B; 1 for MNIST); 0 is a linear hypernetwork (Sec. 4.1)
    )
    spectral_norm: bool = False  # every linear layer divided by its top singular value (App. C.3)
    # "fixed": v_i = the client's class proportions; "fixed_columns": its share of each class, App. C.5's descriptor (that of Sec. 5.3).
    embed: str = "trainable"
    hn_sign: str = "descent"  # the authors' code; "literal" is Algorithm 1 as printed
    # Sizes of the clients' networks, as shares of the model's channels; (.25, .5, 1) of 32 kernels is S/M/L (Sec. 5.2, App. B).
    widths: tuple[float, ...] = ()
    # Where embeddings of adopted clients start: "mean" of the trained ones, "normal" draws, or "trained" (the same clients once more).
    novel: str = "mean"

    def check(self):
        options = {
            "embed": ("trainable", "fixed", "fixed_columns"),
            "hn_sign": ("descent", "literal"),
        }
        for field, legal in (options | {"novel": ("mean", "normal", "trained")}).items():
            if getattr(self, field) not in legal:
                raise ValueError(
                    f"{self.name}: {field}={getattr(self, field)!r}; use one of {', '.join(legal)}"
                )
        for field, least in {"dim": 0, "n_hidden": 0, "hidden": 1}.items():
            if getattr(self, field) < least:
                raise ValueError(
                    f"{self.name}: {field}={getattr(self, field)}; allowed: integers >= {least}"
                )
        _ = self.hn  # which refuses widths

    @property
    def hn(self) -> Hypernetwork:
        """The shape of the hypernetwork; its weights are in State.extra["phi"]."""
        written = [n for n in self.task.parameters if self.is_shared(n)]
        full, *sizes = (
            select(narrowed(self.task, width), written) for width in (1, *(self.widths or (1,)))
        )
        return Hypernetwork(sizes, full, self.hidden, self.n_hidden, self.spectral_norm)

    def embeddings(self, state: State) -> Tensor:
        """The clients' embeddings v, (K, d_e)."""
        return state.extra["phi"]["v"]

    def _clients(self, k: int, v: Tensor) -> tuple[Tensor, Tensor]:
        # What the server keeps of k clients: embeddings (v, unless they are fixed), and sizes, which take turns (so that a group
        # of one size is every such client of a partition).
        t, size = self.task, torch.arange(k) % max(1, len(self.widths))
        if self.embed != "trainable":
            counts = t.label_counts.to(t.dtype)
            v = counts / counts.sum(int(self.embed == "fixed"), keepdim=True).clamp_min(1)
            if len(v) != k:
                raise ValueError(
                    f"{self.name}: {k} clients, but labels of {len(v)} are known; bind it to their data"
                )
        return v.to(t.device, t.dtype), size.to(t.device)

    def init(self):
        t, state = self.task, super().init()
        state.server = select(state.server, t.buffers)
        with t.seeded("hypernetwork"):
            v, size = self._clients(t.K, torch.randn(t.K, self.dim or 1 + t.K // 4))
            phi = {"v": v} | {
                n: w.to(t.device, t.dtype) for n, w in self.hn.draw(v.shape[1]).items()
            }
        # What has a momentum is trained.
        trained = [
            n for n in phi if not n.endswith(".u") and (n != "v" or self.embed == "trainable")
        ]
        state.extra = {
            "phi": phi,
            "momentum": {n: torch.zeros_like(phi[n]) for n in trained},
            "size": size,
        }
        return state

    def adopt(self, state, k):
        """k novel clients: phi is frozen, their embeddings (all alike, or drawn) are fitted by the same rounds (Sec. 5.3)."""
        phi, fresh = own(state.extra["phi"]), super().adopt(state, k)
        with self.task.seeded("novel clients"):
            drawn = torch.randn(k, phi["v"].shape[1])
        if self.novel == "trained" and k != len(phi["v"]):
            raise ValueError(
                f"{self.name}: novel='trained' is for the {len(phi['v'])} clients that were trained, here are {k}; use mean or normal"
            )
        start = {"mean": phi["v"].mean(0).repeat(k, 1), "normal": drawn, "trained": phi["v"]}[
            self.novel
        ]
        phi["v"], size = self._clients(k, start)
        momentum = {"v": torch.zeros_like(phi["v"])} if self.embed == "trainable" else {}
        fresh.extra = {"phi": phi, "momentum": momentum, "size": size}
        return fresh

    def download(self, state, sel):
        return super().download(state, sel) | self.hn.write(
            state.extra["phi"], sel, state.extra["size"][sel]
        )

    def upload(self, state, sel, start, end, weight):
        state = super().upload(state, sel, start, end, weight)  # averaged buffers, if any
        phi, momentum, hn = state.extra["phi"], state.extra["momentum"], self.hn
        if not momentum:
            return state
        share = (1 if self.hn_sign == "descent" else -1) / len(sel)
        delta = {n: share * (start[n] - end[n]) for n in hn.full}
        grad = hn.pull(phi, momentum, sel, state.extra["size"][sel], delta)
        if "v" in grad:
            grad["v"] *= len(sel)
        frozen = grad.keys() == {"v"}
        if not frozen:
            hn.advance(phi)
        _sgd(
            phi, momentum, grad, self.lr, self.momentum, self.weight_decay, self.clip, by_row=frozen
        )
        return state

    def traffic(self, state, sel, down, up):
        full, *sizes = (
            sum(map(prod, shapes.values())) for shapes in (self.hn.full, *self.hn.sizes)
        )
        padding = sum(full - sizes[g] for g in state.extra["size"][sel].tolist())
        return tuple(moved - padding for moved in super().traffic(state, sel, down, up))


@dataclass(frozen=True, eq=False)
class PFedHNPC(PFedHN):
    """pFedHN with personal classifiers: the hypernetwork writes the extractor, heads stay with their clients (Shamsian et al., 2021)."""

    name = "pfedhn_pc"
    lr: float = 0.05  # alpha [code]
    # Classifiers of the clients' own draws, as in the code, are the experiment's head_init="own"; head_depth=0 is pFedHN.

    def check(self):
        super().check()
        if self.novel == "trained":
            raise ValueError(
                f"{self.name}: novel='trained' needs classifiers that stayed with their clients; use mean, normal or pfedhn"
            )

    def is_shared(self, name):
        return name not in self.task.head

    def is_clipped(self, name):
        return name not in self.task.head  # the code clips the extractor only

    def init(self):
        state = super().init()
        # The classifier's optimiser is the client's and lives on between its visits.
        omega = select(state.clients, self.task.parameters)
        state.clients |= prefixed("opt.", {n: torch.zeros_like(v) for n, v in omega.items()})
        return state

    def serve(self, p):
        return select(p, self.task.names)
