"""FedPAC: features are aligned across clients class by class, and each gets the best mix of heads.

Xu, Tong, Huang, "Personalized Federated Learning with Feature Alignment and Classifier
Collaboration", ICLR 2023, arXiv:2306.11867.

    H_i[c] = n_ic mu_ic / n_i                      `sums`, by the received base; mu_ic: class means
    V_i    = (mean ||z||^2 - ||H_i||^2) / n_i
    head:  one epoch of CE
    base:  CE + lambda mean (z - target_y)^2       target: c_y ("proto"), own mu_iy where unknown
    c_y    <- sum_i n_iy mu'_iy / sum_i n_iy       mu': class means by the trained base
    base   <- sum_i n_i base_i / sum_i n_i
    head_i <- sum_j alpha_ij head_j                alpha_i = argmin over the simplex of
                                                   alpha^T Q_i alpha: `collaboration`
    Q_i[j, k] = V_j [j = k] + <H_i - H_j, H_i - H_k>, over participants; alpha_ij < cut becomes 0

The server keeps each client's mixed head until it comes back. The head is the last linear layer,
whatever head_depth says.

Cost: distances of class means take S^2 C d operations a round, mixing of heads S^2 times a head,
the programmes S^3 each.

Differs from the paper
1. Heads are trained with the experiment's rate; head_lr=0.1 is the authors' code's. No alignment in
   round 0 (as in that code).
2. A class that no participant holds keeps its prototype.
Differs from the authors' code
1. Q_i is positive semidefinite as it is and no eigenvalue is cut off; an exact pivoting method
   takes the place of cvxpy.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pfl_core.methods.base import Batch, Context, Method, State
from pfl_core.methods.terms import class_means, class_sums, simplex_qp
from pfl_core.stacked import Params, expand, gram, mix, put, select, take
from pfl_core.util.fields import among, log_uniform, number, value


class FedPAC(Method):
    """Aligned features, and each client's own combination of all heads (Xu et al., 2023).

    Examples
    --------
    Without alignment and with heads of their own, it is FedRep:

    >>> pac = Experiment(method="fedpac", model="mlp", clients=3, rounds=1, max_samples=60)
    >>> pac = pac.but(method_args={"lam": 0, "combine": False})
    >>> losses = [run(e).arrays["before/test/loss"] for e in (pac, pac.but(method="fedrep"))]
    >>> np.allclose(*losses)
    True
    """

    name = "fedpac"
    lam: float = number(
        1.0,
        low=0,
        doc="lambda, weight of the alignment (authors' code); 0 is none",
        search=log_uniform(0.1, 10, also=(0.0,)),
    )
    head_epochs: int = number(1, low=0, doc="on the head, before the base (paper, authors' code)")
    head_lr: float | None = number(
        None, doc="rate of the head in them (authors' code: 0.1); None: lr (PFLlib)"
    )
    combine: bool = value(
        True,
        doc="False: clients keep their own heads; with lam=0 it is FedRep",
        search=among(True, False),
    )
    cut: float = number(1e-3, low=0, below=1, doc="smaller head weights become 0 (authors' code)")

    def check(self) -> None:
        _ = self.task.last_linear  # ValueError for a model without one

    def pairs(self, s: int) -> tuple[int, int]:
        return s**2, 2 * s**3  # each client's quadratic programme is over all others

    def is_shared(self, name: str) -> bool:
        return name not in self.task.classifier

    def init(self) -> State:
        state, fc = super().init(), self.task.classifier
        proto = torch.zeros_like(self.task.value(self.task.initial, self.task.last_linear[0]))
        state.extra = {n: state.clients.pop(n) for n in fc}
        state.server |= {"proto": proto, "seen": torch.zeros_like(proto[:, 0], dtype=torch.bool)}
        return state

    def download(self, state: State, sel: Tensor) -> Params:
        return expand(state.server, len(sel)) | take(state.extra, sel)

    def sums(self, p: Params, batch: Batch) -> dict[str, Tensor]:
        """Of ONE client's features z (B, F): `class_sums`, and the sum of ||z||^2."""
        z = self.task.features(p, batch.x)
        return class_sums(z, batch.y, self.task.C) | {"square": z.square().sum()}

    def aligned(self, p: Params, anchor: Params, batch: Batch) -> Tensor:
        """Of ONE client: cross-entropy, and the features' squared distance to "target" (C, F)."""
        z = self.task.features(p, batch.x)
        fit = F.cross_entropy(self.task.classify(p, z), batch.y)
        return fit + self.lam * F.mse_loss(z, anchor["target"][batch.y])

    def local(self, ctx: Context, start: Params) -> Params:
        model, fc = select(start, self.task.names), self.task.classifier
        base = [n for n in self.task.parameters if n not in fc]
        s = ctx.measure(self.sums, model)
        n = s["n"].sum(1)
        h = s["z"] / n[:, None, None]
        v = ((s["square"] / n - h.square().sum((1, 2))) / n).clamp_min(0)
        target = torch.where(start["seen"][..., None], start["proto"], class_means(s))
        how: dict[str, Any] = dict(lr=self.head_lr, epochs=self.head_epochs, stream="head")
        model = ctx.train(self.loss, model, only=fc, **how)
        loss = self.aligned if ctx.round and self.lam else self.loss
        end = ctx.train(loss, model, only=base, anchor={"target": target})
        s = ctx.measure(self.sums, end)
        return end | {"mean": class_means(s), "count": s["n"], "h": h, "v": v}

    def collaboration(self, h: Tensor, v: Tensor) -> Tensor:
        """alpha (S, S): what client i (row) takes of others' heads, from h (S, C, F) and v (S,)."""
        g = gram({"h": h - h.mean(0)})
        d = g.diagonal()
        q = d[:, None, None] - g[:, :, None] - g[:, None] + g + torch.diag(v.double())
        a = simplex_qp(q)
        a = a * (a >= a.amax(1, keepdim=True).clamp_max(self.cut))
        return a / a.sum(1, keepdim=True)

    def upload(
        self, state: State, sel: Tensor, start: Params, end: Params, weight: Tensor
    ) -> State:
        heads, count = select(end, self.task.classifier), end["count"].sum(0)
        mean = torch.einsum("sc,scf->cf", end["count"], end["mean"]) / count.clamp_min(1)[:, None]
        proto = torch.where((count > 0)[:, None], mean, state.server["proto"])
        state = super().upload(state, sel, start, end, weight)
        state.server |= {"proto": proto, "seen": state.server["seen"] | (count > 0)}
        mixed = mix(self.collaboration(end["h"], end["v"]), heads) if self.combine else heads
        put(state.extra, sel, mixed)
        return state

    def serve(self, p: Params) -> Params:
        return select(p, self.task.names)
