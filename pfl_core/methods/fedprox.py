"""FedProx: FedAvg whose local training is pulled towards the model that the client received.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, Algorithm 2.

    h_k(w; w^t) = F_k(w) + mu/2 ||w - w^t||^2     `loss`; w is p, w^t is the anchor
    w^{t+1}     = mean of the w_k^{t+1}           `upload`, as in FedAvg

Differs from the paper
1. Participants are drawn uniformly and weighted by n_k; the paper draws them by n_k and averages
   uniformly (a recollection).
2. All participants finish their epochs: the paper's stragglers, and the inexactness gamma that
   measures them, are left out.
3. The term spans all parameters, BatchNorm's scale and shift included, its statistics not.

Differs from the authors' code
1. There mu (v - v*) is added to the gradient; here it is the gradient of the term, the same number.

FedProx-FT is no method of its own: it is FedProx read at when="after"; the term stays on in that
training.
"""

from torch import Tensor

from pfl_core.methods.base import Batch, Method
from pfl_core.methods.terms import half_square
from pfl_core.stacked import Params
from pfl_core.util.fields import log_uniform, number


class FedProx(Method):
    """FedAvg with a proximal term towards the received model (Li et al., 2020).

    Examples
    --------
    The term keeps the model closer to where it was; without it, this is FedAvg:

    >>> prox = Experiment(method="fedprox", model="mlp", clients=3, rounds=1, max_samples=60)
    >>> prox = prox.but(method_args={"mu": 0})
    >>> losses = [run(e).arrays["before/test/loss"] for e in (prox, prox.but(method="fedavg"))]
    >>> np.allclose(*losses)
    True
    """

    name = "fedprox"
    mu: float = number(
        0.01,
        low=0,
        doc="weight of the proximal term (pFedGraph, FL-bench); 0 is FedAvg",
        search=log_uniform(0.001, 1, also=(0.0,)),
    )

    def check(self) -> None:
        if self.mu * self.task.config.lr >= 2:
            raise ValueError(
                f"mu = {self.mu} at lr = {self.task.config.lr}; allowed: mu * lr < 2 (beyond, the "
                "proximal term alone diverges); lower one of them"
            )

    def loss(self, p: Params, anchor: Params, batch: Batch) -> Tensor:
        pull = half_square(p, anchor, self.task.parameters)
        return super().loss(p, anchor, batch) + self.mu * pull
