"""FedCP: a policy network splits each sample's features between a personal and a global head.

Zhang et al., "FedCP: Separating Feature Information for Personalized Federated Learning via
Conditional Policy", KDD 2023, arXiv:2307.01217.

    z = f_i(x),  c = v_i / ||v_i||                v_i ("context"): sum over classes of h_i's weights
    (r, s) = softmax over halves of phi_i(z c)    `gate`, r + s = 1; phi ("cpn.*"): Linear,
                                                  LayerNorm, ReLU
    scores = h_i(r z) + h_g(s z)                  `logits`; h_i: personal head; h_g ("global.*"):
                                                  frozen
    CE(scores, y) + lambda MMD(z, f_g(x))         `loss`; f_g: the base as received, frozen
    base, phi, h_g <- weighted means over i of f_i, phi_i, (h_i + h_g) / 2    `upload`, weights n_i

v_i is taken when a round begins; before round 1 it is drawn from U(0, 1). The head is the last
linear layer, whatever head_depth says.

Differs from the paper: none known.

Differs from the authors' code
1. The policy's Gumbel noise is drawn in training only, so that evaluation repeats (there it is
   drawn in evaluation too). Only the difference of the two halves' noises matters, which is
   logistic: one draw a feature.
2. f_g runs on the batch's BatchNorm statistics as f_i does, but leaves the running ones alone
   (there they drift).
3. Who is served, sampled or not, has the last base, phi, h_g and its v_i (there, the last base
   alone).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfl_core.methods.base import Batch, Context, Method, State
from pfl_core.methods.terms import mmd
from pfl_core.stacked import Params, clone, expand, prefixed, select, unprefixed, weighted_mean
from pfl_core.util.fields import log_uniform, number


class FedCP(Method):
    """Features gated by sample between a personal and a global head (Zhang et al., 2023).

    Examples
    --------
    A client's class scores need more than its network, and its model is a module around it:

    >>> tiny = Experiment(method="fedcp", model="mlp", clients=3, rounds=1, max_samples=60)
    >>> result = run(tiny.but(keep_models=True))
    >>> type(result.model(0)).__name__, result.predict(0, load("digits").x[:5]).shape
    ('Scores', (5,))
    """

    name = "fedcp"
    lam: float = number(
        1.0,
        low=0,
        doc="lambda, weight of the MMD (PFLlib; authors' script for the 4-layer CNN: 5); 0 leaves "
        "the base free",
        search=log_uniform(0.1, 10, also=(0.0,)),
    )

    @property
    def noise(self) -> tuple[int, ...]:
        return (self.task.value(self.task.initial, self.task.last_linear[0]).shape[1],)

    def check(self) -> None:
        _ = self.task.last_linear  # ValueError for a model without one

    def is_shared(self, name: str) -> bool:
        return name not in self.task.classifier

    def init(self) -> State:
        state, t, (size,) = super().init(), self.task, self.noise
        with t.seeded("fedcp"):
            cpn = nn.Sequential(nn.Linear(size, 2 * size), nn.LayerNorm(2 * size))
            context = torch.rand(t.K, size)
        head = prefixed("global.", {n: t.initial[n].clone() for n in t.classifier})
        state.server |= prefixed("cpn.", dict(cpn.to(t.device, t.dtype).state_dict())) | head
        # The client's copy of h_g, so that it is at hand after training and yet not uploaded.
        state.clients |= clone(expand(head, t.K)) | {"context": context.to(t.device, t.dtype)}
        return state

    def begin(self, state: State, sel: Tensor, sent: Params | None = None) -> Params:
        p = super().begin(state, sel, sent)
        if not state.round:
            return p
        first = self.task.last_linear[0]
        weight = p[first] if first in p else expand(self.task.constants, len(sel))[first]
        return p | {"context": weight.sum(1)}

    def gate(self, p: Params, z: Tensor, noise: Tensor | None = None) -> Tensor:
        """r (B, F) in (0, 1) of ONE client: the part of features z (B, F) for its personal head.

        `noise` is uniform, (B, F).
        """
        h = F.linear(z * F.normalize(p["context"], dim=0), p["cpn.0.weight"], p["cpn.0.bias"])
        h = F.layer_norm(h, h.shape[1:], p["cpn.1.weight"], p["cpn.1.bias"])
        personal, common = F.relu(h).chunk(2, 1)
        drawn = 0 if noise is None else torch.logit(noise, eps=1e-7)
        return torch.sigmoid(personal - common + drawn)

    def heads(self, p: Params, z: Tensor, noise: Tensor | None = None) -> Tensor:
        """Class scores (B, C) of ONE client on features z (B, F)."""
        r, common = self.gate(p, z, noise), unprefixed("global.", p)
        return self.task.classify(p, r * z) + self.task.classify(common, (1 - r) * z)

    def logits(self, p: Params, x: Tensor) -> Tensor:
        return self.heads(p, self.task.features(p, x))

    def loss(self, p: Params, anchor: Params, batch: Batch) -> Tensor:
        z = self.task.features(p, batch.x)
        fit = F.cross_entropy(self.heads(p, z, batch.noise), batch.y)
        if not self.lam:
            return fit
        # BatchNorm writes into its statistics: f_g gets copies.
        frozen = anchor | {n: p[n].clone() for n in self.task.buffers}
        return fit + self.lam * mmd(z, self.task.features(frozen, batch.x))

    def local(self, ctx: Context, start: Params) -> Params:
        trained = [n for n in start if n in self.task.parameters or n.startswith("cpn.")]
        end = ctx.train(self.loss, start, only=trained)
        return end | {"sent." + n: (end[n] + end["global." + n]) / 2 for n in self.task.classifier}

    def upload(
        self, state: State, sel: Tensor, start: Params, end: Params, weight: Tensor
    ) -> State:
        heads = prefixed("global.", unprefixed("sent.", end))
        state.server |= weighted_mean(select(end, state.server) | heads, weight)
        return state
