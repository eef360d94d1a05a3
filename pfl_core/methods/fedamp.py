"""FedAMP and HeurFedAMP: every client is pulled to its own mix of all clients' models, in which similar models weigh more.

Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021, arXiv:2007.03797.

    u_i   = sum_j xi_ij w_j                                                    `download`, "cloud.*"; w_j: last upload of client j
    xi_ij = (alpha / sigma) exp(-||w_i - w_j||^2 / sigma),                     FedAMP, j != i; alpha = share sigma / (K - 1)
    xi_ii = 1 - sum_{j != i} xi_ij
    xi_ij = (1 - zeta) exp(sigma cos_ij) / sum_{h != i} exp(sigma cos_ih),     HeurFedAMP, j != i
    xi_ii = zeta
    w_i  <- argmin F_i(w) + rho / 2 ||w - u_i||^2, rho = lambda / alpha        `loss`: local SGD from w_i

Models mean trainable parameters; BatchNorm statistics stay with their client. No sample weights.

Cost: the server's step takes K S D operations (K clients, S participants, D parameters): quadratic where all take part.

Differs from the paper
1. rho is given itself, for alpha spans orders of magnitude, and sigma is c times the round's median of ||w_i - w_j||^2 (ours);
   with a fixed sigma FedAMP tends to Local, as distances grow.
2. Attention is over the last models of all clients that ever took part; the pull is off in round 0.
3. HeurFedAMP: cosines of w_i - w_0, as in pFedGraph's code; raw models share their start, so that all cosines are near 1.
4. zeta is 1 / K; the paper's (a recollection) is 1 / (clients of the same distribution + 1).
Differs from PFLlib's code
1. There u_i is never loaded and the pull has no gradient: with its sigma = alpha = 1 it equals Local.
"""

from dataclasses import dataclass

import torch

from pfl_core.methods.base import Method
from pfl_core.methods.terms import half_square
from pfl_core.stacked import cosine, distances, mix, own, prefixed, put, select, unprefixed


@dataclass(frozen=True, eq=False)
class Attention(Method):
    """Local models pulled to a mix of all; what FedAMP and HeurFedAMP share."""

    rho: float = 1.0  # lambda / alpha, the pull to u_i (pFedGraph's code); 0 is Local
    start: str = "own"  # local training starts from w_i ("own", the paper) or from u_i ("cloud")

    def check(self):
        if self.start not in ("own", "cloud") or not 0 <= self.rho * self.task.config.lr < 2:
            got = f"rho={self.rho} at lr={self.task.config.lr}, start={self.start!r}"
            raise ValueError(
                f"{self.name}: got {got}; allowed are 0 <= rho * lr < 2 and start 'own' or 'cloud'"
            )

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
        return super().loss(p, anchor, batch) + self.rho * half_square(
            p, anchor, self.task.parameters
        )

    def local(self, c, start):
        mine, cloud = select(start, self.task.names), unprefixed("cloud.", start)
        loss = self.loss if c.round else super().loss
        end = c.train(loss, mine | cloud if self.start == "cloud" else mine, anchor=cloud)
        return end | prefixed("sent.", select(end, cloud))

    def upload(self, state, sel, start, end, weight):
        put(state.extra["models"], sel, unprefixed("sent.", end))
        state.extra["known"][sel] = True
        return state

    def serve(self, p):
        return select(p, self.task.names)

    def personal(self, state, c):
        return self.serve(self.begin(state, c.sel, {}))

    def weights(self, state):
        """{"all": (K, K)}: what the cloud model of client i (row) takes of client j (column); rows sum to 1."""
        known = state.extra["known"]
        others = known & ~torch.eye(len(known), dtype=torch.bool, device=known.device)
        xi = self.attention(state.extra["models"], others) if others.any() else others.double()
        return {"all": xi + torch.diag(1 - xi.sum(1))}


@dataclass(frozen=True, eq=False)
class FedAMP(Attention):
    """Attention by a Gaussian kernel of the distance between models (Huang et al., 2021)."""

    name = "fedamp"
    share: float = (
        0.5  # most that all others together can weigh, alpha (K - 1) / sigma; 0 is no mixing
    )
    scale: float = 1.0  # c, sigma over the median squared distance between two clients' models
    sigma: float | None = None  # a fixed sigma instead (PFLlib: 1)
    alpha: float | None = None  # a fixed alpha instead (PFLlib: 1)

    def check(self):
        super().check()
        if not 0 <= self.share <= 1 or any(
            v is not None and v <= 0 for v in (self.scale, self.sigma, self.alpha)
        ):
            got = f"share={self.share}, scale={self.scale}, sigma={self.sigma}, alpha={self.alpha}"
            raise ValueError(
                f"fedamp: got {got}; allowed are share in [0, 1] and the others > 0 (or sigma, alpha None)"
            )

    def attention(self, models, others):
        """xi_ij for j != i, (K, K); `others` (K, K) bool: whom the server knows."""
        d = distances(models)
        sigma = self.scale * d[others].median() if self.sigma is None else d.new_tensor(self.sigma)
        ratio = self.share / (len(d) - 1) if self.alpha is None else self.alpha / sigma
        xi = ratio * torch.exp(-d / sigma.clamp_min(1e-30)) * others
        return xi / xi.sum(1, keepdim=True).clamp_min(
            1
        )  # a large alpha may not make xi_ii negative


@dataclass(frozen=True, eq=False)
class HeurFedAMP(Attention):
    """Attention by a softmax of cosine similarities, with a fixed weight of the own model (Huang et al., 2021)."""

    name = "heurfedamp"
    zeta: float | None = (
        None  # weight of the own model; None: 1 / K (FedAGHN, App. Tab. 2); 1 is no mixing
    )
    sigma: float = 10.0  # sharpness (pFedGraph's code); 0 weighs all others alike
    similarity: str = (
        "delta"  # cosines of w_i - w_0 ("delta", pFedGraph's code) or of w_i ("params", the paper)
    )

    def check(self):
        super().check()
        if not 0 <= (self.zeta or 0) <= 1 or self.similarity not in ("delta", "params"):
            got = f"zeta={self.zeta}, similarity={self.similarity!r}"
            raise ValueError(
                f"heurfedamp: got {got}; allowed are zeta in [0, 1] or None, similarity 'delta' or 'params'"
            )

    def attention(self, models, others):
        """xi_ij for j != i, (K, K); `others` (K, K) bool: whom the server knows."""
        zeta = 1 / len(others) if self.zeta is None else self.zeta
        models = {
            n: v - (self.similarity == "delta") * self.task.initial[n] for n, v in models.items()
        }
        scores = (self.sigma * cosine(models)).masked_fill(~others, -torch.inf)
        return (1 - zeta) * torch.softmax(scores, 1).nan_to_num(
            0
        )  # nobody known: all weight on the own model
