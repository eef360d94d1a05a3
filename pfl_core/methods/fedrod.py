"""FedRoD: a generic head that learns under a balanced loss, and a personal one for what is left.

Chen, Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR
2022, arXiv:2107.00778.

    z = f(x; theta),  s = psi(z)                       base, and the generic head's scores
    L = CE(s + gamma log n_i, y)                       `loss`, balanced softmax: trains theta, psi
        + CE(sg(s) + phi_i(sg(z)), y)                  trains phi_i alone; sg: held constant
    theta, psi <- sum_i n_i (theta_i, psi_i) / sum_i n_i        the default `upload`
    s + phi_i(z) is served                             `logits`

n_i are the client's numbers of training samples of each class: a class that it has not gets the
score -inf in the first term, and with gamma = 0 that term is plain cross-entropy. One step on L is
a step on each of its terms, since they share no trained tensor. In clients' Params "own." is phi_i,
of the last linear layer's shape, whatever head_depth says; it never leaves the client.

A client of one class learns nothing for the server: its first term is 0 with gradient 0, and it
uploads what it received, at its full weight n_i.

The experiment's clipping counts the gradients of theta and psi alone and leaves phi_i's as they
are: so the server knows nothing of phi_i.

Differs from the paper (not read: this follows PFLlib's code and a recollection)
1. Where phi_i begins is left open there: a copy of psi, as in PFLlib and FL-bench (its first scores
   are 2 s), or 0.
2. The paper's second form, in which a hypernetwork writes phi_i from label shares, is left out.
The authors published no code.
Differs from PFLlib's code
1. n_i counts all training samples (those held out, too); there a shuffled loader's, without the
   last incomplete batch. A class that is missed so makes the loss infinite when it turns up.
Differs from FL-bench's code: there phi_i's term trains the base, too, and phi_i is scored alone.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from pfl_core.methods.base import Batch, Context, Method, State
from pfl_core.stacked import Params, clone, prefixed, select
from pfl_core.util.fields import among, choice, number, uniform


class FedRoD(Method):
    """Balanced generic head, plus a personal one on its scores (Chen and Chao, 2022).

    Examples
    --------
    Without its balance, the generic model is FedAvg's:

    >>> rod = Experiment(method="fedrod", model="mlp", clients=3, rounds=2, max_samples=60)
    >>> rod = rod.but(method_args={"gamma": 0, "score": "generic"})
    >>> losses = [run(e).arrays["before/test/loss"] for e in (rod, rod.but(method="fedavg"))]
    >>> np.allclose(*losses)
    True
    """

    name = "fedrod"
    gamma: float = number(
        1.0,
        low=0,
        doc="power of the class counts in the balanced softmax (paper, a recollection; all codes); "
        "0 trains base and generic head as FedAvg does",
        search=uniform(0.25, 2, also=(0.0,)),
    )
    start: str = choice(
        "copy",
        "zero",
        doc="phi before its first round: the generic head (PFLlib), or 0 (ours)",
        search=among("copy", "zero"),
    )
    score: str = choice(
        "personal", "generic", doc="the served scores: with phi, or the paper's generic model"
    )

    def check(self) -> None:
        _ = self.task.last_linear  # ValueError for a model without one

    def init(self) -> State:
        state, t = super().init(), self.task
        head = clone(select(t.start(), t.classifier))
        if self.start == "zero":
            head = {n: torch.zeros_like(v) for n, v in head.items()}
        state.clients |= prefixed("own.", head)
        return state

    def personal_scores(self, p: Params, z: Tensor) -> Tensor:
        """phi(z) (B, C) of ONE client on features z (B, F)."""
        return self.task.classify({n: p[f"own.{n}"] for n in self.task.classifier}, z)

    def logits(self, p: Params, x: Tensor) -> Tensor:
        z = self.task.features(p, x)
        generic = self.task.classify(p, z)
        return generic if self.score == "generic" else generic + self.personal_scores(p, z)

    def loss(self, p: Params, anchor: Params, batch: Batch) -> Tensor:
        z = self.task.features(p, batch.x)
        generic = self.task.classify(p, z)
        both = generic.detach() + self.personal_scores(p, z.detach())
        balanced = F.cross_entropy(generic + anchor["prior"], batch.y)
        return balanced + F.cross_entropy(both, batch.y)

    def prior(self, sel: Tensor) -> Tensor:
        """gamma log n_i (S, C) of clients sel; -inf for a class that a client has not."""
        n = self.task.label_counts[sel].to(self.task.dtype)
        return self.gamma * n.log() if self.gamma else torch.zeros_like(n)

    def local(self, ctx: Context, start: Params) -> Params:
        shared = self.task.parameters
        own = [f"own.{n}" for n in self.task.classifier]
        near = {"prior": self.prior(ctx.sel)}
        return ctx.train(self.loss, start, anchor=near, only=[*shared, *own], clipped=shared)
