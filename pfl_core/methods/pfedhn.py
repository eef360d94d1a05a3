"""pFedHN and pFedHN-PC: a hypernetwork on the server writes every client's model from the client's embedding.

Shamsian, Navon, Fetaya and Chechik, "Personalized Federated Learning using Hypernetworks", ICML 2021, arXiv:2103.04628, Algorithm 1.

    theta_i = h(v_i; phi)                                       `generate`, `download`; trunk, then one linear head a tensor
    theta~_i <- K local steps from theta_i                      `local` (the default; the experiment's `steps`, plan="fresh")
    Delta_i = theta_i - theta~_i                                `upload`; what travels is as large as theta_i, not as phi
    phi <- phi - alpha (d theta_i / d phi)^T Delta_i            one vector-Jacobian product, then SGD with momentum and weight decay
    v_i <- v_i - alpha (d theta_i / d v_i)^T Delta_i
    PC (Sec. 3.3): omega_i, the experiment's head, stays with client i; phi writes the rest

Local training in the paper is steps=50, plan="fresh", batch=64, lr=5e-3, momentum=.9, weight_decay=5e-5, clip=50 with participation 1/K:
fields of the Experiment. alpha and the hypernetwork's momentum, decay and clip are fields here.

Differs from the paper
1. Algorithm 1 prints Delta = theta~ - theta, with which phi - alpha J^T Delta climbs the loss; hn_sign="literal" does so.
2. Several participants (the paper has one): phi takes the mean of their products, each v_i its own.
3. BatchNorm (no network of the paper has any): scale and shift are written, statistics follow the experiment's buffer policy.
4. Novel clients (Sec. 5.3): start, rate and number of steps are not given; see `adopt`. Use weight_decay=0 there.
5. omega_i is trained with the local rate, as in the authors' code; the text says alpha.
Differs from the authors' code
1. Spectral norm (Table 4): their trainer reads the flag and never passes it on; here it acts, after 15 warm-up power iterations.
2. Sizes S/M/L (Table 2), fixed descriptors (App. C.5) and novel clients are not in it; the authors describe the first in an issue.
As in their code: momentum and decay move all of phi and all embeddings at every step; no ReLU between trunk and heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfl_core.methods.base import Method, State
from pfl_core.stacked import Params, own, prefixed, select

EMBED = ("trainable", "fixed", "fixed_columns")
SIGNS = ("descent", "literal")


@dataclass(frozen=True, eq=False)
class PFedHN(Method):
    """A hypernetwork writes all clients' models from one embedding a client (Shamsian et al., 2021)."""

    name = "pfedhn"
    lr: float = 0.01  # alpha; the code's default, the paper's grid is .1, .05, .01, .005
    momentum: float = 0.9  # of the hypernetwork's SGD [code]
    weight_decay: float = 1e-3  # of the hypernetwork's SGD [code]
    clip: float = 50.0  # L2 norm of the hypernetwork's gradient [code]; 0 is no clipping
    embed_lr: float | None = None  # rate of the embeddings; None is lr [code]
    dim: int = 0  # d_e; 0 is floor(1 + K/4) (Sec. 5)
    hidden: int = 100  # width of the trunk (App. B)
    n_hidden: int = 3  # hidden layers of the trunk (App. B; 1 for MNIST); 0 is a linear hypernetwork (Sec. 4.1)
    spectral_norm: bool = False  # every linear layer divided by its top singular value (App. C.3)
    embed: str = "trainable"  # "fixed": v_i = the client's class proportions (App. C.5); "fixed_columns": its share of each class
    hn_sign: str = "descent"  # the authors' code; "literal" is Algorithm 1 as printed
    # Sizes of the clients' networks, as shares of the model's channels; (.25, .5, 1) of 32 kernels is S/M/L (Sec. 5.2, App. B).
    widths: tuple[float, ...] = ()
    novel: str = "mean"  # where embeddings of adopted clients start: "mean" of the trained ones, or "normal" draws

    def check(self):
        bn = sorted(self.task.bn)
        for field, legal in {"embed": EMBED, "hn_sign": SIGNS, "novel": ("mean", "normal")}.items():
            if getattr(self, field) not in legal:
                raise ValueError(f"{self.name}: {field}={getattr(self, field)!r}; use one of {', '.join(legal)}")
        if min(self.dim, self.n_hidden, self.hidden - 1) < 0:
            raise ValueError(
                f"{self.name}: dim={self.dim}, n_hidden={self.n_hidden}, hidden={self.hidden}; allowed: >= 0, hidden >= 1"
            )
        if self.widths and bn:
            raise ValueError(f"{self.name}: widths with BatchNorm ({bn[0]}); use a network without it, or widths=()")
        for width in self.widths:
            narrow = self._narrow(width)
            if not 0 < width <= 1 or any(s != int(s) for shape in narrow.values() for s in shape):
                raise ValueError(
                    f"{self.name}: widths={self.widths}; each in (0, 1], and times every number of channels an integer"
                )

    # -- the hypernetwork ------------------------------------------------------------------------------------------------
    @property
    def generated(self) -> list[str]:
        """Names of the tensors that the hypernetwork writes."""
        return [n for n in self.task.parameters if self.is_shared(n)]

    @property
    def shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """For each size of network, the true shapes {name: shape} of what is written; the model itself if there are no `widths`."""
        sizes = [self._narrow(width) for width in self.widths or (1,)]
        return [{n: tuple(map(int, shapes[n])) for n in self.generated} for shapes in sizes]

    def _narrow(self, width: float) -> dict[str, list[float]]:
        # Convolutions have `width` times the channels; a linear layer reads what the layer before it writes, channels first.
        shapes, channels = {}, False
        for names in self.task.layers.values():
            conv = self.task.initial[names[0]].dim() > 2
            for n in names:
                shape = list(self.task.initial[n].shape)
                scale = [width if conv else 1, width if channels else 1]
                shapes[n] = [s * w for s, w in zip(shape, scale + [1] * len(shape), strict=False)]
            channels = conv
        return shapes

    def _hypernetwork(self) -> Params:
        t = self.task
        fixed = None if self.embed == "trainable" else self._descriptors()
        d = self.dim or 1 + t.K // 4 if fixed is None else fixed.shape[1]
        layers = {f"trunk.{i}": (self.hidden if i else d, self.hidden) for i in range(self.n_hidden + 1)}
        for g, shapes in enumerate(self.shapes):
            layers |= {f"head.{g}.{n}": (self.hidden, torch.Size(s).numel()) for n, s in shapes.items()}
        with t.seeded("hypernetwork"):
            phi = {"v": nn.Embedding(t.K, d).weight.detach()}
            for name, size in layers.items():
                linear = nn.Linear(*size)
                phi |= {f"{name}.{p}": v.detach() for p, v in linear.named_parameters()}
                if self.spectral_norm:
                    u = F.normalize(torch.randn(size[1]), dim=0)
                    for _ in range(15):
                        u, _ = _power(phi[f"{name}.weight"], u)
                    phi[f"{name}.u"] = u
        phi = {n: v.to(t.device, t.dtype) for n, v in phi.items()}
        return phi if fixed is None else phi | {"v": fixed}

    def _descriptors(self) -> Tensor:
        counts = self.task.label_counts.to(self.task.dtype)
        return counts / counts.sum(int(self.embed == "fixed"), keepdim=True).clamp_min(1)

    def _sizes(self, k: int) -> Tensor:
        # Equal parts of a random order of the clients.
        with self.task.seeded("sizes"):
            order = torch.randperm(k)
        size = torch.empty(k, dtype=torch.int64)
        size[order] = torch.arange(k) * len(self.shapes) // k
        return size.to(self.task.device)

    def generate(self, phi: Params, sel: Tensor, size: Tensor) -> Params:
        """h(v_i; phi) of clients `sel` (S,): {name: (S, *shape)}, networks of size[i] < the largest padded with zeros at the far ends."""
        h = _linear(phi, "trunk.0", phi["v"][sel])
        for i in range(self.n_hidden):
            h = _linear(phi, f"trunk.{i + 1}", h.relu())
        shapes, out = self.shapes, {}
        rows = [(size[sel] == g).nonzero().squeeze(1) for g in range(len(shapes))]
        back = torch.argsort(torch.cat(rows))
        for n in self.generated:
            parts = [
                _padded(_linear(phi, f"head.{g}.{n}", h[r]).view(len(r), *shapes[g][n]), self.task.initial[n])
                for g, r in enumerate(rows)
            ]
            out[n] = torch.cat(parts)[back]
        return out

    def embeddings(self, state: State) -> Tensor:
        """The clients' embeddings v, (K, d_e)."""
        return state.extra["phi"]["v"]

    # -- hooks -----------------------------------------------------------------------------------------------------------
    def init(self):
        state = super().init()
        state.server = select(state.server, self.task.buffers)
        phi = self._hypernetwork()
        # What has a momentum is trained.
        still = {n for n in phi if n.endswith(".u")} | ({"v"} if self.embed != "trainable" else set())
        momentum = {n: torch.zeros_like(v) for n, v in phi.items() if n not in still}
        state.extra = {"phi": phi, "momentum": momentum, "size": self._sizes(self.task.K)}
        return state

    def download(self, state, sel):
        return super().download(state, sel) | self.generate(state.extra["phi"], sel, state.extra["size"])

    def serve(self, p):
        return select(p, self.task.names)

    def upload(self, state, sel, start, end, weight):
        state = super().upload(state, sel, start, end, weight)  # averaged buffers, if any
        phi, momentum, size = state.extra["phi"], state.extra["momentum"], state.extra["size"]
        if not momentum:
            return state
        share = (1 if self.hn_sign == "descent" else -1) / len(sel)
        with torch.enable_grad():
            leaves = {n: phi[n].detach().requires_grad_() for n in momentum}
            written = self.generate(phi | leaves, sel, size)
            delta = [share * (start[n] - end[n]) for n in written]
            grad = dict(
                zip(leaves, torch.autograd.grad(list(written.values()), list(leaves.values()), delta), strict=True)
            )
        if "v" in grad:
            grad["v"] *= len(sel)
        frozen = grad.keys() == {"v"}  # then clients do not meet: each one's gradient is clipped alone
        norm = grad["v"].norm(dim=1, keepdim=True) if frozen else torch.stack([g.norm() for g in grad.values()]).norm()
        scale = (self.clip / (norm + 1e-6)).clamp(max=1) if self.clip else torch.ones_like(norm)
        for n in phi:
            if n.endswith(".u") and not frozen:
                phi[n].copy_(_power(phi[f"{n[:-1]}weight"], phi[n])[0])
        for n, g in grad.items():
            # In place: phi is large, and new memory would cost more than the arithmetic.
            step = momentum[n].mul_(self.momentum).addcmul_(g, scale).add_(phi[n], alpha=self.weight_decay)
            phi[n].sub_(step, alpha=self.embed_lr if n == "v" and self.embed_lr is not None else self.lr)
        return state

    def adopt(self, state, k):
        """k novel clients: phi is frozen, their embeddings (all alike, or drawn) are fitted by the same rounds (Sec. 5.3)."""
        phi, fresh = own(state.extra["phi"]), super().adopt(state, k)
        if self.embed != "trainable":
            v, trained = self._descriptors(), {}
            if len(v) != k:
                raise ValueError(
                    f"{self.name}: {k} novel clients, labels of {len(v)} are known; bind the method to their federation"
                )
        else:
            with self.task.seeded("novel clients"):
                drawn = torch.randn(k, phi["v"].shape[1]).to(phi["v"])
            v = drawn if self.novel == "normal" else phi["v"].mean(0).repeat(k, 1)
            trained = {"v": torch.zeros_like(v)}
        fresh.extra = {"phi": phi | {"v": v}, "momentum": trained, "size": self._sizes(k)}
        return fresh

    def traffic(self, state, sel, down, up):
        # Padding is not sent.
        full = sum(self.task.initial[n].numel() for n in self.generated)
        true = torch.tensor([sum(torch.Size(s).numel() for s in shapes.values()) for shapes in self.shapes])
        saved = len(sel) * full - int(true[state.extra["size"][sel].cpu()].sum())
        return tuple(moved - saved for moved in super().traffic(state, sel, down, up))


@dataclass(frozen=True, eq=False)
class PFedHNPC(PFedHN):
    """pFedHN with personal classifiers: the hypernetwork writes the extractor, the head stays with its client (Shamsian et al., 2021)."""

    name = "pfedhn_pc"
    lr: float = 0.05  # alpha [code]
    # Classifiers of the clients' own draws, as in the code, are the experiment's head_init="own"; head_depth=0 is pFedHN.

    def is_shared(self, name):
        return name not in self.task.head

    def is_clipped(self, name):
        return name not in self.task.head  # the code clips the extractor only

    def init(self):
        state = super().init()
        omega = select(state.clients, self.task.parameters)
        # The classifier's optimiser is the client's and lives on between its visits.
        state.clients |= prefixed("opt.", {n: torch.zeros_like(v) for n, v in omega.items()})
        return state


def _linear(phi: Params, name: str, x: Tensor) -> Tensor:
    # With a vector u the weight is divided by its top singular value u^T W v, where u and v count as constants (Miyato et al., 2018).
    w = phi[f"{name}.weight"]
    if f"{name}.u" in phi:
        u, v = _power(w.detach(), phi[f"{name}.u"])
        w = w / (u @ w @ v)
    return F.linear(x, w, phi[f"{name}.bias"])


def _power(w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    v = F.normalize(w.T @ u, dim=0)
    return F.normalize(w @ v, dim=0), v


def _padded(x: Tensor, like: Tensor) -> Tensor:
    # x (S, *small) with zeros at the far end of every axis, as large as `like` (*shape).
    short = [0 if i % 2 == 0 else like.shape[-1 - i // 2] - x.shape[-1 - i // 2] for i in range(2 * like.dim())]
    return F.pad(x, short) if any(short) else x
