"""APPLE: every client learns how much to take of each client's core model, and improves its own.

Luo, Wu, "Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning", IJCAI
2022, arXiv:2110.08394.

    w_i  = sum_j p_ij c_j                                 served; c_j: cores of the round's start,
                                                          "all.*"
    L_i  = F_i(w_i) + lambda(r) mu / 2 ||p_i - p_0||^2    `loss`; SGD on c_i ("core.*"), p_i ("dr"):
    c_i  <- c_i - eta_c p_ii G,  G = grad F_i(w_i)
    p_ij <- p_ij - eta_p (<G, c_j> + lambda(r) mu (p_ij - p_0j))
    lambda(r) falls from 1 to 0 in the first LR = floor(span R) rounds
    p_0j = n_j / sum_k n_k, where p_i begins

Only c_i is uploaded, and nothing is averaged. p_i is not confined to the simplex. BatchNorm
statistics stay with their client.

Cost: each of S participants mixes all K cores, K S D operations a round and a step; downloads grow
as K, too.

Differs from the paper
1. Every client downloads all cores; the paper allows for fewer, keeping old copies of the others.
Differs from the authors' code
1. eta_c is K lr, as in PFLlib: it makes up for p_ii near 1 / K. There it is 0.01, and c_i and p_i
   alike have momentum 0.9, afresh every round: core_lr=0.01 with the experiment's momentum=0.9,
   which acts on both here, too.
2. The pull to p_0 is halved, as in the paper; mu=0.2 is the code's 0.1.
3. What is scored there is w_i after local training with the round's downloads: when="after".
Differs from PFLlib's code
1. There clients see cores already changed in the same round, w_i is uploaded in place of c_i, and
   p_i never moves.
"""

import math

import torch
from torch import Tensor
from torch.func import vmap

from pfl_core.methods.base import Batch, Context, Method, State
from pfl_core.stacked import Params, clone, prefixed, put, scalars, select, unprefixed
from pfl_core.util.fields import choice, log_uniform, number


class APPLE(Method):
    """Personal models as learned linear combinations of all core models (Luo and Wu, 2022).

    Examples
    --------
    Each visit uploads one core model and downloads those of all others:

    >>> apple = Experiment(method="apple", model="mlp", clients=3, rounds=1, max_samples=60)
    >>> moved = run(apple).history.query("average == 'total'").groupby("metric").value.max()
    >>> float(moved.download_bytes / moved.upload_bytes)
    2.0
    """

    name = "apple"
    scheduled = True
    core_lr: float | None = number(None, doc="eta_c, rate of the own core; None: K lr (PFLlib)")
    dr_lr: float = number(
        0.001,
        low=0,
        doc="eta_p (authors' code); 0 keeps p_i at p_0",
        search=log_uniform(1e-4, 0.01, also=(0.0,)),
    )
    mu: float = number(
        0.1,
        low=0,
        doc="pull of p_i to p_0 (authors' code); 0 is no pull",
        search=log_uniform(0.01, 1, also=(0.0,)),
    )
    span: float = number(0.1, low=0, high=1, doc="share of rounds with a pull (authors' code)")
    schedule: str = choice(
        "exp", "cos", doc="lambda(r): 0.001^(r / LR) (authors' code), or (1 + cos(pi r / LR)) / 2"
    )

    def pairs(self, s: int) -> tuple[int, int]:
        return s * self.task.K, self.task.K**2

    def is_shared(self, name: str) -> bool:
        return False

    def init(self) -> State:
        state, t = super().init(), self.task
        cores = select(state.clients, t.parameters)
        state.extra = {"cores": clone(cores)}
        p0 = (t.n / t.n.sum()).to(t.dtype)
        state.clients |= prefixed("core.", clone(cores)) | {"dr": p0.repeat(t.K, 1)}
        return state

    def cores(self, state: State) -> Params:
        """All core models as the server has them, {name: (K, *shape)}."""
        return state.extra["cores"]

    def decay(self, round: int) -> float:
        """lambda(r) of a round, from 1 to 0."""
        rounds = math.floor(self.span * self.task.config.rounds)
        if round >= rounds:
            return 0.0
        if self.schedule == "exp":
            return 0.001 ** (round / rounds)
        return (1 + math.cos(math.pi * round / rounds)) / 2

    def combine(self, p: Params, near: Params) -> Params:
        """w_i {name: (*shape)} of ONE client.

        p has its "core.*" and "dr" (K,), `near` all cores and "id" (K,), which is one-hot.
        """
        others, self_weight = p["dr"] * (1 - near["id"]), p["dr"] @ near["id"]
        cores = unprefixed("all.", near)
        return {
            n: torch.tensordot(others, v, dims=1) + self_weight * p["core." + n]
            for n, v in cores.items()
        }

    def models(self, p: Params, near: Params) -> Params:
        """w_i of S clients, {name: (S, *shape)}."""
        # Cores are the same for all clients: passed once, not S times.
        dims = {n: 0 if n == "id" else None for n in near}
        once = {n: v if n == "id" else v[0] for n, v in near.items()}
        return vmap(self.combine, (0, dims))(p, once)

    def download(self, state: State, sel: Tensor) -> Params:
        t = self.task
        cores = {"all." + n: v.expand(len(sel), *v.shape) for n, v in state.extra["cores"].items()}
        return cores | {"id": torch.eye(t.K, dtype=t.dtype, device=t.device)[sel]}

    def near(self, p: Params) -> Params:
        """What p has of the download."""
        return select(p, lambda n: n == "id" or n.startswith("all."))

    def begin(self, state: State, sel: Tensor, sent: Params | None = None) -> Params:
        p = super().begin(state, sel, sent)
        return p | self.models(p, self.near(p))

    def loss(self, p: Params, anchor: Params, batch: Batch) -> Tensor:
        fit = super().loss(p | self.combine(p, anchor), anchor, batch)
        return fit + anchor["pull"] / 2 * (p["dr"] - anchor["p0"]).square().sum()

    def local(self, ctx: Context, start: Params) -> Params:
        near = self.near(start)
        mine = {n: v for n, v in start.items() if n not in near}
        p0 = self.task.n / self.task.n.sum()
        pull = {"p0": p0.to(near["id"].dtype).expand_as(near["id"])}
        pull["pull"] = near["id"].new_full((len(ctx.sel),), self.mu * self.decay(ctx.round))
        core_lr = self.task.K * ctx.lr if self.core_lr is None else self.core_lr
        rates = {n: core_lr for n in mine if n.startswith("core.")} | {"dr": self.dr_lr}
        end = ctx.train(self.loss, mine, anchor=near | pull, only=rates, lr=rates)
        return end | self.models(end, near) | prefixed("sent.", unprefixed("core.", end))

    def upload(
        self, state: State, sel: Tensor, start: Params, end: Params, weight: Tensor
    ) -> State:
        put(state.extra["cores"], sel, unprefixed("sent.", end))
        return state

    def serve(self, p: Params) -> Params:
        return select(p, self.task.names)

    def traffic(self, state: State, sel: Tensor, down: Params, up: Params) -> tuple[int, int]:
        _, uploaded = super().traffic(state, sel, down, up)
        return len(sel) * (self.task.K - 1) * scalars(state.extra["cores"]), uploaded
