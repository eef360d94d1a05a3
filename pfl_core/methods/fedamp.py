"""FedAMP and HeurFedAMP: every client is pulled to a mix of all models, more to those like its own.

Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021,
arXiv:2007.03797.

    u_i   = sum_j xi_ij w_j                             `download`, "cloud.*"; w_j: j's last upload
  FedAMP, for j != i
    xi_ij = (alpha / sigma) exp(-||w_i - w_j||^2 / sigma)          alpha = share sigma / (K - 1)
    xi_ii = 1 - sum_{j != i} xi_ij
  HeurFedAMP, for j != i
    xi_ij = (1 - zeta) exp(sigma cos_ij) / sum_{h != i} exp(sigma cos_ih)
    xi_ii = zeta
  both
    w_i  <- argmin F_i(w) + rho / 2 ||w - u_i||^2       `loss`: SGD from w_i; rho = lambda / alpha

Models mean trainable parameters; BatchNorm statistics stay with their client. No sample weights.

Cost: the server's step takes K S D operations (K clients, S participants, D parameters): quadratic
where all take part.

Differs from the paper
1. rho is given itself, for alpha spans orders of magnitude, and sigma is c times the round's median
   of ||w_i - w_j||^2 (ours); with a fixed sigma FedAMP tends to Local, as distances grow.
2. Attention is over the last models of all clients that ever took part; the pull is off in round 0.
3. HeurFedAMP: cosines of w_i - w_0, as in pFedGraph's code; raw models share their start, so that
   all cosines are near 1.
4. zeta is 1 / K; the paper's (a recollection) is 1 / (clients of the same distribution + 1).
Differs from PFLlib's code
1. There u_i is never loaded and the pull has no gradient: with its sigma = alpha = 1 it equals
   Local.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from pfl_core.methods.base import Batch, Context, Method, State
from pfl_core.methods.terms import half_square
from pfl_core.stacked import (
    Params,
    clone,
    cosine,
    distances,
    mix,
    prefixed,
    put,
    select,
    unprefixed,
)
from pfl_core.util.fields import choice, log_uniform, number, uniform


class Attention(Method):
    """Local models pulled to a mix of all; what FedAMP and HeurFedAMP share.

    They give `attention(models, others)`: xi_ij for j != i, (K, K), from the clients' models
    {name: (K, *shape)}; `others` (K, K) bool is whom the server knows.
    """

    attention: ClassVar[Callable[..., Tensor]]
    rho: float = number(
        1.0,
        low=0,
        doc="lambda / alpha, pull to u_i (pFedGraph's code); 0 is Local",
        search=log_uniform(0.005, 1.9, also=(0.0,)),
    )
    start: str = choice(
        "own", "cloud", doc="local training starts from w_i (own, the paper) or u_i (cloud)"
    )

    def check(self) -> None:
        if self.rho * self.task.config.lr >= 2:
            raise ValueError(
                f"rho = {self.rho} at lr = {self.task.config.lr}; allowed: rho * lr < 2 (beyond, "
                "the pull alone diverges)"
            )

    def pairs(self, s: int) -> tuple[int, int]:
        return self.task.K**2, 4 * self.task.K**2  # xi, and what it is made of

    def is_shared(self, name: str) -> bool:
        return False

    def init(self) -> State:
        state, k, device = super().init(), self.task.K, self.task.device
        models = clone(select(state.clients, self.task.parameters))
        state.extra = {"models": models, "known": torch.zeros(k, dtype=torch.bool, device=device)}
        return state

    def download(self, state: State, sel: Tensor) -> Params:
        return prefixed("cloud.", mix(self.weights(state)["all"][sel], state.extra["models"]))

    def loss(self, p: Params, anchor: Params, batch: Batch) -> Tensor:
        pull = half_square(p, anchor, self.task.parameters)
        return super().loss(p, anchor, batch) + self.rho * pull

    def local(self, ctx: Context, start: Params) -> Params:
        mine, cloud = select(start, self.task.names), unprefixed("cloud.", start)
        loss = self.loss if ctx.round else super().loss
        end = ctx.train(loss, mine | cloud if self.start == "cloud" else mine, anchor=cloud)
        return end | prefixed("sent.", select(end, cloud))

    def upload(
        self, state: State, sel: Tensor, start: Params, end: Params, weight: Tensor
    ) -> State:
        put(state.extra["models"], sel, unprefixed("sent.", end))
        state.extra["known"][sel] = True
        return state

    def serve(self, p: Params) -> Params:
        return select(p, self.task.names)

    def personal(self, state: State, ctx: Context) -> Params:
        return self.serve(self.begin(state, ctx.sel, {}))

    def weights(self, state: State) -> dict[str, Tensor]:
        """{"all": (K, K)}: what client i's cloud model (row) takes of client j; rows sum to 1."""
        known = state.extra["known"]
        others = known & ~torch.eye(len(known), dtype=torch.bool, device=known.device)
        xi = self.attention(state.extra["models"], others) if others.any() else others.double()
        return {"all": xi + torch.diag(1 - xi.sum(1))}


class FedAMP(Attention):
    """Attention by a Gaussian kernel of the distance between models (Huang et al., 2021).

    Examples
    --------
    What each client's cloud model (row) takes of each client (column):

    >>> amp = Experiment(method="fedamp", model="mlp", clients=3, rounds=1, max_samples=60)
    >>> rounds, weights = run(amp.but(record=["weights"])).probe("weights")
    >>> weights["all"][-1].shape, np.allclose(weights["all"].sum(2), 1)
    ((3, 3), True)
    """

    name = "fedamp"
    share: float = number(
        0.5,
        low=0,
        high=1,
        doc="most that all others together can weigh, alpha (K - 1) / sigma; 0 is no mixing",
        search=uniform(0.1, 0.9, also=(0.0,)),
    )
    scale: float = number(
        1.0, above=0, doc="c, sigma over the median squared distance between two clients' models"
    )
    sigma: float | None = number(None, above=0, doc="a fixed sigma instead (PFLlib: 1)")
    alpha: float | None = number(None, above=0, doc="a fixed alpha instead (PFLlib: 1)")

    def attention(self, models: Params, others: Tensor) -> Tensor:
        d = distances(models)
        if self.sigma is None:
            sigma = self.scale * d.masked_fill(~others, torch.nan).nanmedian()
        else:
            sigma = d.new_full((), self.sigma)
        ratio = self.share / (len(d) - 1) if self.alpha is None else self.alpha / sigma
        xi = ratio * torch.exp(-d / sigma.clamp_min(1e-30)) * others
        # A large alpha may not make xi_ii negative.
        return xi / xi.sum(1, keepdim=True).clamp_min(1)


class HeurFedAMP(Attention):
    """Attention by a softmax of cosines, the own model's weight fixed (Huang et al., 2021).

    Examples
    --------
    The weight of the own model is given; that of others follows from cosines:

    >>> amp = Experiment(method="heurfedamp", model="mlp", clients=3, max_samples=60)
    >>> amp = amp.but(method_args={"zeta": 0.4})
    >>> rounds, weights = run(amp.but(rounds=1, record=["weights"])).probe("weights")
    >>> weights["all"][-1].diagonal().astype(float).round(6).tolist()
    [0.4, 0.4, 0.4]
    """

    name = "heurfedamp"
    zeta: float | None = number(
        None,
        low=0,
        high=1,
        doc="weight of the own model; None: 1 / K (FedAGHN, App. Tab. 2); 1 is no mixing",
    )
    sigma: float = number(
        10.0,
        doc="sharpness (pFedGraph's code); 0 weighs all others alike",
        search=log_uniform(1, 100, also=(0.0,)),
    )
    similarity: str = choice(
        "delta",
        "params",
        doc="cosines of w_i - w_0 (delta, pFedGraph's code) or of w_i (the paper)",
    )

    def attention(self, models: Params, others: Tensor) -> Tensor:
        zeta = 1 / len(others) if self.zeta is None else self.zeta
        if self.similarity == "delta":
            models = {n: v - self.task.initial[n] for n, v in models.items()}
        scores = (self.sigma * cosine(models)).masked_fill(~others, -torch.inf)
        # Nobody known: all weight is on the own model.
        return (1 - zeta) * torch.softmax(scores, 1).nan_to_num(0)
