"""pFedHN and pFedHN-PC: a hypernetwork on the server writes each client's model from an embedding.

Shamsian, Navon, Fetaya and Chechik, "Personalized Federated Learning using Hypernetworks", ICML
2021, arXiv:2103.04628, Algorithm 1.

    theta_i = h(v_i; phi)                                `Hypernetwork`, `download`
    theta~_i <- K local steps from theta_i               `local` (the default; the experiment's
                                                         `steps`, plan="fresh")
    Delta_i = theta_i - theta~_i                         `upload`; what travels is as large as
                                                         theta_i, not as phi
    phi <- phi - alpha (d theta_i / d phi)^T Delta_i     one vector-Jacobian product, then SGD with
    v_i <- v_i - alpha (d theta_i / d v_i)^T Delta_i     momentum and weight decay
    PC (Sec. 3.3): omega_i, the experiment's head, stays with client i; phi writes the rest

Local training is given by fields of the Experiment: steps=50 is the paper's (Sec. 5), participation
1/K Algorithm 1's; plan="fresh", batch=64, lr=5e-3, momentum=.9, weight_decay=5e-5, clip=50 are the
released trainer's (the paper tunes rates over a grid and names no more). alpha and the
hypernetwork's momentum, decay and clip are fields here.

Differs from the paper
1. Algorithm 1 prints Delta = theta~ - theta, with which phi - alpha J^T Delta climbs the loss;
   hn_sign="literal" does so.
2. Several participants (the paper has one): phi takes the mean of their products, each v_i its own.
3. BatchNorm (no network of the paper has any): scale and shift are written, statistics follow the
   experiment's buffer policy.
4. Novel clients (Sec. 5.3): start, rate and number of steps are not given; see `novel`. Use
   weight_decay=0 there.
5. omega_i is trained with the local rate, as in the authors' code; the text says alpha.
Differs from the authors' code
1. Spectral norm (Table 4): their trainer reads the flag and never passes it on; here it acts, after
   15 warm-up power iterations.
2. Sizes S/M/L (Table 2), fixed descriptors (App. C.5) and novel clients are not in it; the authors
   describe the first in an issue.
3. Embeddings have the rate of phi (there an option that defaults to it); its other optimiser, Adam,
   is left out.
As in their code: momentum and decay move all of phi and all embeddings at every step; no ReLU
between trunk and heads.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfl_core.methods.base import Context, Method, State
from pfl_core.methods.task import Task
from pfl_core.stacked import Params, clone, select
from pfl_core.util.fields import choice, log_uniform, number, value

Shapes = dict[str, tuple[int, ...]]


AT_ONCE = 2**16  # numbers that a step updates while they lie in a core's own cache


class Outer(NamedTuple):
    """A sum of S outer products, left^T right (P, H), which is never written out."""

    left: Tensor  # (S, P)
    right: Tensor  # (S, H)

    def norm(self) -> Tensor:
        """The Frobenius norm."""
        left, right = (v @ v.T for v in self)
        return (left * right).sum().clamp_min(0).sqrt()


class Hypernetwork(NamedTuple):
    """h(v; phi): a trunk of linear layers with ReLU between them, then linear heads.

    There is one head for each tensor of each size of network.
    """

    sizes: list[Shapes]  # what is written for a client of size 0, 1, ...
    full: Shapes  # the model that they are padded to
    hidden: int
    n_hidden: int
    spectral: bool

    def draw(self, d: int) -> Params:
        """New weights for embeddings of size d, as nn.Linear draws them.

        {layer.weight, layer.bias, and with spectral norm layer.u}
        """
        layers = {
            f"trunk.{i}": (self.hidden if i else d, self.hidden) for i in range(self.n_hidden + 1)
        }
        for g, shapes in enumerate(self.sizes):
            layers |= {f"head.{g}.{n}": (self.hidden, prod(s)) for n, s in shapes.items()}
        phi = {}
        for name, (inputs, outputs) in layers.items():
            linear = nn.Linear(inputs, outputs)
            phi |= {f"{name}.{p}": v.detach() for p, v in linear.named_parameters()}
            if self.spectral:
                phi[f"{name}.u"] = torch.randn(outputs)
        for _ in range(15):
            self.advance(phi)
        return phi

    def write(self, phi: Params, sel: Tensor, size: Tensor) -> Params:
        """Models {name: (S, *shape)} of clients sel (S,), of sizes (S,).

        A smaller one has zeros at the far end of each axis.
        """
        h = self._trunk(phi, sel)
        if self.sizes != [self.full]:
            return self._padded(phi, h, size)
        heads = {n: self._linear(phi, f"head.0.{n}", h) for n in self.full}
        return {n: w.view(len(sel), *self.full[n]) for n, w in heads.items()}

    def pull(
        self, phi: Params, names: Collection[str], sel: Tensor, size: Tensor, delta: Params
    ) -> tuple[Params, dict[str, Outer]]:
        """(d theta / d phi)^T delta for the entries `names` of phi, {name: like phi[name]}.

        delta {name: (S, *shape)} is of what is written. The weights of heads are nearly all of phi.
        Theirs are outer products, the second dict, unless spectral norm makes them more.
        """
        heads = {} if self.spectral else self._outer(phi, sel, size, delta)
        with torch.enable_grad():
            leaves = {n: phi[n].detach().requires_grad_() for n in names if n not in heads}
            theta = self.write(phi | leaves, sel, size)
        outputs, inputs = [theta[n] for n in delta], list(leaves.values())
        products = torch.autograd.grad(outputs, inputs, list(delta.values()))
        return dict(zip(leaves, products, strict=True)), {n: heads[n] for n in heads if n in names}

    def _outer(self, phi: Params, sel: Tensor, size: Tensor, delta: Params) -> dict[str, Outer]:
        # A head multiplies h, so that its gradient is that of what it writes, times h.
        h, found = self._trunk(phi, sel), {}
        for g, rows in enumerate(self._rows(size)):
            for n, shape in self.sizes[g].items():
                left = delta[n][(rows, *map(slice, shape))].reshape(len(rows), prod(shape))
                found[f"head.{g}.{n}.weight"] = Outer(left, h[rows])
        return found

    def _trunk(self, phi: Params, sel: Tensor) -> Tensor:
        h = self._linear(phi, "trunk.0", phi["v"][sel])
        for i in range(self.n_hidden):
            h = self._linear(phi, f"trunk.{i + 1}", h.relu())
        return h

    def _padded(self, phi: Params, h: Tensor, size: Tensor) -> Params:
        # Models of several sizes: clients are sorted by theirs, and put back.
        rows = self._rows(size)
        back, out = torch.argsort(torch.cat(rows)), {}
        for n, full in self.full.items():
            parts = []
            for g, r in enumerate(rows):
                part = self._linear(phi, f"head.{g}.{n}", h[r]).view(len(r), *self.sizes[g][n])
                short = [(0, a - b) for a, b in zip(full, self.sizes[g][n], strict=True)]
                parts.append(F.pad(part, sum(reversed(short), ())))
            out[n] = torch.cat(parts)[back]
        return out

    def _rows(self, size: Tensor) -> list[Tensor]:
        # Which of the clients have size 0, 1, ...
        if len(self.sizes) == 1:
            return [torch.arange(len(size), device=size.device)]
        return [(size == g).nonzero().squeeze(1) for g in range(len(self.sizes))]

    def advance(self, phi: Params) -> None:
        """One power iteration of every layer's u, in place."""
        for n in phi:
            if n.endswith(".u"):
                phi[n].copy_(_power(phi[n[:-1] + "weight"], phi[n])[0])

    def _linear(self, phi: Params, name: str, x: Tensor) -> Tensor:
        # Spectral norm: the weight over its top singular value u^T W v, where u and v count as
        # constants (Miyato et al., 2018).
        w = phi[f"{name}.weight"]
        if self.spectral:
            u, v = _power(w.detach(), phi[f"{name}.u"])
            w = w / (u @ w @ v)
        return F.linear(x, w, phi[f"{name}.bias"])


def _power(w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    v = F.normalize(w.T @ u, dim=0)
    return F.normalize(w @ v, dim=0), v


def narrowed(task: Task, width: float) -> Shapes:
    """Shapes of the task's parameters with `width` times the channels in all convolutions.

    What reads them reads fewer, outputs stay.

    Raises
    ------
    ValueError
        For BatchNorm, and for a width with which channels are no integers >= 1.
    """
    if task.bn and width != 1:
        raise ValueError(
            f"widths: a network with BatchNorm ({min(task.bn)}) has one size; use one without it, "
            "or widths=()"
        )
    if (task.constants or task.tied) and width != 1:
        odd = min([*task.constants, *task.tied])
        raise ValueError(
            f"widths: a network with frozen or tied tensors ({odd}) has one size; use one without "
            "them, or widths=()"
        )
    shapes, before = {}, 1.0
    for layer, names in task.layers.items():
        convolves = task.initial[names[0]].dim() > 2
        here = width if convolves else 1.0
        for n in names:
            size = task.initial[n].shape
            outputs, inputs = (1, 0) if width != 1 and _turned(task, layer, n) else (0, 1)
            factors = {outputs: here, inputs: before} if len(size) > 1 else {0: here}
            exact = [s * factors.get(axis, 1.0) for axis, s in enumerate(size)]
            if not 0 < width <= 1 or any(abs(s - round(s)) > 1e-6 for s in exact):
                raise ValueError(
                    f"widths: {width} makes {n} {exact}; use shares in (0, 1] that leave whole "
                    "channels"
                )
            shapes[n] = tuple(map(round, exact))
        before = here
    return shapes


def _turned(task: Task, layer: str, name: str) -> bool:
    # Whether a weight is (inputs, outputs, ...), as of transposed convolutions.
    module = task.model if name == layer else task.model.get_submodule(layer)
    if getattr(module, "groups", 1) != 1:
        raise ValueError(
            f"widths: {layer} convolves in groups, of which smaller networks have others; use a "
            "network without groups, or widths=()"
        )
    return bool(getattr(module, "transposed", False))


class PFedHN(Method):
    """A hypernetwork writes all models, from one embedding a client (Shamsian et al., 2021).

    Examples
    --------
    The server knows each client by an embedding:

    >>> hn = Experiment(method="pfedhn", model="mlp", clients=3, rounds=1, max_samples=60)
    >>> hn = hn.but(method_args={"dim": 2})
    >>> rounds, embeddings = run(hn.but(record=["embeddings"])).probe("embeddings")
    >>> embeddings["v"].shape  # evaluations, clients, dim
    (2, 3, 2)
    """

    name = "pfedhn"
    adopts = True
    lr: float = number(
        0.01,
        low=0,
        doc="alpha, of phi and embeddings [code; paper's grid: .1, .05, .01, .005]",
        search=log_uniform(0.005, 0.1),
    )
    momentum: float = number(0.9, low=0, below=1, doc="of the hypernetwork's SGD [code]")
    weight_decay: float = number(1e-3, low=0, doc="of the hypernetwork's SGD [code]")
    clip: float = number(
        50.0, low=0, doc="L2 norm of the hypernetwork's gradient [code]; 0 is no clipping"
    )
    dim: int = number(0, low=0, doc="d_e, size of an embedding; 0 is floor(1 + K/4) (Sec. 5)")
    hidden: int = number(100, low=1, doc="width of the trunk (App. B)")
    n_hidden: int = number(
        3, low=0, doc="hidden layers of the trunk (App. B; 1 for MNIST); 0 is linear (Sec. 4.1)"
    )
    spectral_norm: bool = value(
        False, doc="every linear layer divided by its top singular value (App. C.3)"
    )
    embed: str = choice(
        "trainable",
        "fixed",
        "fixed_columns",
        doc="fixed: v_i is the client's class proportions; fixed_columns: its share of each class, "
        "App. C.5's descriptor (that of Sec. 5.3)",
    )
    hn_sign: str = choice(
        "descent", "literal", doc="the authors' code's, or Algorithm 1's as printed"
    )
    widths: tuple[float, ...] = value(
        (),
        doc="sizes of the clients' networks, as shares of the model's channels; (.25, .5, 1) of 32 "
        "kernels is S/M/L (Sec. 5.2, App. B)",
    )
    novel: str = choice(
        "mean",
        "normal",
        "trained",
        doc="where embeddings of new clients start: the mean of the trained ones, normal draws, or "
        "the trained ones themselves (the same clients once more)",
    )

    def check(self) -> None:
        if not self.hn.full:  # which refuses widths
            raise ValueError(
                "all that is trained is in the head, so that the hypernetwork has nothing to "
                "write; lower head_depth, or train more of the model"
            )

    def pairs(self, s: int) -> tuple[int, int]:
        # Embeddings grow with the clients, by the paper's rule; their momentum and gradient, too.
        return 0, 0 if self.dim or self.embed != "trainable" else 3 * self.task.K**2 // 4

    @property
    def hn(self) -> Hypernetwork:
        """The shape of the hypernetwork; its weights are in State.extra["phi"]."""
        written = [n for n in self.task.parameters if self.is_shared(n)]
        widths = (1, *(self.widths or (1,)))
        full, *sizes = (select(narrowed(self.task, width), written) for width in widths)
        return Hypernetwork(sizes, full, self.hidden, self.n_hidden, self.spectral_norm)

    def embeddings(self, state: State) -> Tensor:
        """The clients' embeddings v, (K, d_e)."""
        return state.extra["phi"]["v"]

    # -- what the server keeps ---------------------------------------------------------------------
    def init(self) -> State:
        t, state = self.task, super().init()
        state.server = select(state.server, t.buffers)
        phi, trained = self._drawn() if t.joins is None else self._joined(t.joins)
        # Sizes take turns, so that a group of one size is every such client of a partition.
        size = torch.arange(t.K, device=t.device) % max(1, len(self.widths))
        momentum = {n: torch.zeros_like(phi[n]) for n in trained}  # what has one is trained
        state.extra = {"phi": phi, "momentum": momentum, "size": size}
        return state

    def _drawn(self) -> tuple[Params, list[str]]:
        # A new hypernetwork, and the names in it that are trained.
        t = self.task
        with t.seeded("hypernetwork"):
            v = self._embedded(torch.randn(t.K, self.dim or 1 + t.K // 4))
            phi = {"v": v} | {
                n: w.to(t.device, t.dtype) for n, w in self.hn.draw(v.shape[1]).items()
            }
        fixed = {"v"} if self.embed != "trainable" else set()
        return phi, [n for n in phi if not n.endswith(".u") and n not in fixed]

    def _joined(self, source: State) -> tuple[Params, list[str]]:
        # New clients of a trained hypernetwork, which is frozen: their embeddings alone are fitted,
        # by the same rounds (Sec. 5.3).
        phi, k = clone(source.extra["phi"]), self.task.K
        trained = phi["v"]
        if self.novel == "trained" and k != len(trained):
            raise ValueError(
                f"{self.name}: novel='trained' is for the {len(trained)} clients that were "
                f"trained, here are {k}; use mean or normal"
            )
        with self.task.seeded("novel clients"):
            drawn = torch.randn(k, trained.shape[1])
        starts = {"mean": trained.mean(0).repeat(k, 1), "normal": drawn, "trained": trained}
        phi["v"] = self._embedded(starts[self.novel])
        return phi, ["v"] if self.embed == "trainable" else []

    def _embedded(self, v: Tensor) -> Tensor:
        # Embeddings (K, d_e): v, unless they are fixed.
        t = self.task
        if self.embed != "trainable":
            counts = t.label_counts.to(t.dtype)
            v = counts / counts.sum(int(self.embed == "fixed"), keepdim=True).clamp_min(1)
        return v.to(t.device, t.dtype)

    # -- a round -----------------------------------------------------------------------------------
    def download(self, state: State, sel: Tensor) -> Params:
        written = self.hn.write(state.extra["phi"], sel, state.extra["size"][sel])
        return super().download(state, sel) | written

    def upload(
        self, state: State, sel: Tensor, start: Params, end: Params, weight: Tensor
    ) -> State:
        state = super().upload(state, sel, start, end, weight)  # averaged buffers, if any
        phi, momentum, size = (state.extra[n] for n in ("phi", "momentum", "size"))
        if momentum:  # else nothing is trained
            share = (1 if self.hn_sign == "descent" else -1) / len(sel)
            delta = {n: share * (start[n] - end[n]) for n in self.hn.full}
            grad, heads = self.hn.pull(phi, momentum, sel, size[sel], delta)
            if "v" in grad:
                grad["v"] *= len(sel)  # an embedding is its client's alone
            self._sgd(phi, momentum, grad, heads)
        return state

    def _sgd(self, phi: Params, momentum: Params, grad: Params, heads: dict[str, Outer]) -> None:
        # As torch.optim.SGD counts it, in place: phi is large, and reading it from memory costs
        # more than the arithmetic. With phi frozen clients do not meet, and each one's gradient (a
        # row of v) is clipped alone.
        if momentum.keys() == {"v"}:
            norm = grad["v"].norm(dim=1, keepdim=True)
        else:
            self.hn.advance(phi)
            norm = torch.stack([g.norm() for g in (*grad.values(), *heads.values())]).norm()
        scale = torch.ones_like(norm)
        if self.clip:
            scale = (self.clip / (norm + 1e-6)).clamp(max=1)
        for n, g in grad.items():
            momentum[n].mul_(self.momentum).addcmul_(g, scale)
            self._descend(phi[n], momentum[n])
        for n, (left, right) in heads.items():
            some = max(1, AT_ONCE // phi[n].shape[1]) if phi[n].is_cpu else len(phi[n])
            parts = (phi[n].split(some), momentum[n].split(some), left.split(some, 1))
            for weight, velocity, part in zip(*parts, strict=True):
                velocity.addmm_(part.T, right * scale, beta=self.momentum)
                self._descend(weight, velocity)

    def _descend(self, weight: Tensor, velocity: Tensor) -> None:
        weight.sub_(velocity.add_(weight, alpha=self.weight_decay), alpha=self.lr)

    def traffic(self, state: State, sel: Tensor, down: Params, up: Params) -> tuple[int, int]:
        if len(self.hn.sizes) == 1:
            return super().traffic(state, sel, down, up)
        shapes = (self.hn.full, *self.hn.sizes)
        full, *sizes = (sum(map(prod, s.values())) for s in shapes)
        padding = sum(full - sizes[g] for g in state.extra["size"][sel].tolist())
        sent, returned = super().traffic(state, sel, down, up)
        return sent - padding, returned - padding


class PFedHNPC(PFedHN):
    """pFedHN that writes the extractor alone; heads stay with clients (Shamsian et al., 2021).

    Classifiers of the clients' own draws, as in the code, are the experiment's head_init="own";
    head_depth=0 is pFedHN.

    Examples
    --------
    Heads do not travel, 10 x 100 weights and 10 biases a client here:

    >>> pc = Experiment(method="pfedhn_pc", model="mlp", clients=3, rounds=1, max_samples=60)
    >>> sent = lambda e: run(e).history.query("metric == 'upload_bytes'").value.max()
    >>> int(sent(pc.but(method="pfedhn")) - sent(pc)) // 4 // 3
    1010
    """

    name = "pfedhn_pc"
    lr: float = number(
        0.05, low=0, doc="alpha, of phi and embeddings [code]", search=log_uniform(0.005, 0.1)
    )
    novel: str = choice(
        "mean",
        "normal",
        doc="where embeddings of new clients start; their heads begin as in `init`",
    )

    def is_shared(self, name: str) -> bool:
        return name not in self.task.head

    def init(self) -> State:
        state = super().init()
        # The classifier's optimiser is the client's and lives on between its visits.
        omega = select(state.clients, self.task.parameters)
        state.clients |= self.task.optimizer_state(omega)
        return state

    def local(self, ctx: Context, start: Params) -> Params:
        extractor = [n for n in self.task.parameters if self.is_shared(n)]
        return ctx.train(self.loss, start, clipped=extractor)  # as in the code

    def serve(self, p: Params) -> Params:
        return select(p, self.task.names)
