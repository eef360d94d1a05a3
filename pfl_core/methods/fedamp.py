"""FedAMP and HeurFedAMP: every client is pulled to its own mix of all clients' models, in which similar models weigh more.

Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021, arXiv:2007.03797, Algorithm 1.

    u_i   = sum_j xi_ij w_j                                                    `download`, "cloud.*"; w_j: last upload of client j
    xi_ij = (alpha / sigma) exp(-||w_i - w_j||^2 / sigma),                     FedAMP, j != i; alpha = share sigma / (K - 1)
    xi_ii = 1 - sum_{j != i} xi_ij
    xi_ij = (1 - zeta) exp(sigma cos_ij) / sum_{h != i} exp(sigma cos_ih),     HeurFedAMP, j != i
    xi_ii = zeta
    w_i  <- argmin F_i(w) + rho / 2 ||w - u_i||^2, rho = lambda / alpha        `loss`: local SGD from w_i

Models mean trainable parameters; BatchNorm statistics stay with their client. No sample weights.

Differs from the paper
1. rho is given itself, for alpha spans orders of magnitude, and sigma is c times the median of ||w_i - w_j||^2 (ours).
2. Attention is over the last models of all clients that ever took part; the pull is off in round 0.
3. HeurFedAMP: cosines of w_i - w_0, as in pFedGraph's code; raw models share their start, so that all cosines are near 1.
4. zeta is 1 / K; the paper's, as I recollect it, is 1 / (clients of the same distribution + 1).
Differs from PFLlib's code (the authors released none)
1. There u_i is never loaded and the pull has no gradient: with its sigma = alpha = 1 it equals Local.
"""

from dataclasses import dataclass

import torch

from pfl_core.methods.base import Method
from pfl_core.methods.fedprox import half_square
from pfl_core.stacked import cosine, distances, mix, own, prefixed, put, select, unprefixed


@dataclass(frozen=True, eq=False)
class Attention(Method):
    """Local models pulled to a mix of all; what FedAMP and HeurFedAMP share."""

    rho: float = 0.1  # lambda / alpha, the pull to u_i (pFedGraph's code: 1); 0 is Local
    start: str = "own"  # local training starts from w_i ("own", the paper) or from u_i ("cloud")

    def check(self):
        if self.start not in ("own", "cloud") or self.rho < 0:
            got = f"rho={self.rho}, start={self.start!r}"
            raise ValueError(f"{self.name}: allowed are rho >= 0 and start 'own' or 'cloud', got {got}")

    def is_shared(self, name):
        return False

    def init(self):
        state, k, device = super().init(), self.task.K, self.task.device
        models = own(select(state.clients, self.task.parameters))
        state.extra = {"models": models, "known": torch.zeros(k, dtype=torch.bool, device=device)}
        return state

    def download(self, state, sel):
        return prefixed("cloud.", mix(self.weights(state)["all"][sel], state.extra["models"]))

    def loss(self, p, anchor, batch):
        return super().loss(p, anchor, batch) + self.rho * half_square(p, anchor, self.task.parameters)
