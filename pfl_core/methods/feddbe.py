"""FedDBE: FedAvg, with a vector a client that holds what its features differ by from the others'.

Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan, "Eliminating Domain Bias for Federated Learning in
Representation Space", NeurIPS 2023, arXiv:2311.14975. Read from the authors' code (PFLlib's), not
from the paper.

    scores = h(f(x) + z_i)                          `logits`; z_i: the client's own, 0 at first
    m <- (1 - mu) m + mu mean_B f(x)                of a round's batches so far, from 0
    L  = CE(scores, y) + kappa mean_j (m_j - g_j)^2 / 2      `loss`; by this batch's mean alone
    g  = sum_i n_i m_i / sum_i n_i                  of round 0 (`first`), and never again
    f, h <- sum_i n_i (f_i, h_i) / sum_i n_i        the default `upload`

Round 0 makes g and nothing else: participants train without z_i and without the penalty, and send
their m_i; their models are thrown away. With kappa = 0 nobody asks for g, and there is no such
round.

m is trained like a weight: of |m - mean_B f(x)|^2 / 2, SGD at rate mu makes the line above.
The head is the last linear layer, whatever head_depth says.

Differs from the paper: not known, it was not read.

Differs from the authors' code
1. Round 0 is one of the experiment's rounds; there it comes before them. Where not all clients take
   part, g is of those who did.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from pfl_core.methods.base import Batch, Context, Method, State
from pfl_core.stacked import Params, select, weighted_mean
from pfl_core.util.fields import log_uniform, number


class FedDBE(Method):
    """FedAvg whose clients keep the bias of their features in a vector (Zhang et al., 2023).

    Examples
    --------
    With a penalty, round 0 collects mean features and throws its models away:

    >>> dbe = Experiment(method="feddbe", model="mlp", clients=3, rounds=2, max_samples=60)
    >>> dbe = dbe.but(method_args={"kappa": 1.0})
    >>> first, second = np.diff(run(dbe).arrays["before/test/loss"].sum(1)).round(4)
    >>> bool(first == 0), bool(second < 0)
    (True, True)
    """

    name = "feddbe"
    kappa: float = number(
        0.0,
        low=0,
        doc="weight of the penalty (PFLlib; authors' script for a CNN: 50); 0 is none",
        search=log_uniform(0.1, 50, also=(0.0,)),
    )
    mu: float = number(
        0.1,
        above=0,
        high=1,
        doc="share of a batch in m (PFLlib; authors' script: 1)",
        search=log_uniform(0.1, 1),
    )

    def check(self) -> None:
        _ = self.task.last_linear  # ValueError for a model without one
        if self.kappa and not self.task.config.plain_sgd:
            raise ValueError(
                f"kappa = {self.kappa} with {self.task.config.stepping}; allowed: both 0 and sgd, "
                "or kappa = 0 (the mean of features would have them, too)"
            )

    def init(self) -> State:
        state, t = super().init(), self.task
        zero = torch.zeros_like(t.value(t.initial, t.last_linear[0])[0])
        state.clients["z"] = zero.repeat(t.K, 1)
        if self.kappa:
            state.server["g"] = zero
        return state

    def first(self, r: int) -> bool:
        """Whether round r is the one that makes g."""
        return r == 0 and self.kappa > 0

    def logits(self, p: Params, x: Tensor) -> Tensor:
        return self.task.classify(p, self.task.features(p, x) + p["z"])

    def loss(self, p: Params, anchor: Params, batch: Batch) -> Tensor:
        z = self.task.features(p, batch.x)
        fit = F.cross_entropy(self.task.classify(p, z + p["z"]), batch.y)
        if not self.kappa:
            return fit
        mean = z.mean(0)
        m = (1 - self.mu) * p["m"].detach() + self.mu * mean
        follows = (p["m"] - mean.detach()).square().sum() / 2
        return fit + anchor["kappa"] / 2 * F.mse_loss(m, anchor["g"]) + follows

    def local(self, ctx: Context, start: Params) -> Params:
        trained = [*self.task.parameters, "z"]
        if not self.kappa:
            return ctx.train(self.loss, start, only=trained)
        first, g = self.first(ctx.round), start["g"]
        now = torch.as_tensor(0 if first else self.kappa, dtype=g.dtype, device=g.device)
        end = ctx.train(
            self.loss,
            start | {"m": torch.zeros_like(g)},
            anchor={"g": g, "kappa": now.expand(len(g))},
            only=[*(self.task.parameters if first else trained), "m"],
            clipped=trained,
            lr=dict.fromkeys(trained, ctx.lr) | {"m": self.mu},
        )
        return start | {"m": end["m"]} if first else select(end, start)

    def upload(
        self, state: State, sel: Tensor, start: Params, end: Params, weight: Tensor
    ) -> State:
        if self.first(state.round):
            state.server["g"] = weighted_mean({"g": end["m"]}, weight)["g"]
            return state
        return super().upload(state, sel, start, select(end, self.task.names), weight)

    def traffic(self, state: State, sel: Tensor, down: Params, up: Params) -> tuple[int, int]:
        sent = ["m"] if self.first(state.round) else self.task.names
        return super().traffic(state, sel, down, select(up, sent))
