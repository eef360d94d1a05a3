"""GPFL: a valve makes of each feature a generic one, tied to global embeddings, and a personal one.

Zhang et al., "GPFL: Simultaneously Learning Global and Personalized Feature Information for
Personalized Federated Learning", ICCV 2023, arXiv:2308.10279.

    z = f(x)
    CoV(z, u) = ReLU(z (gamma(u) + 1) + beta(u))      `valve`, "cov.*"; gamma, beta: Linear, ReLU,
                                                      LayerNorm
    scores = head_i(CoV(z, p_i))                      `logits`; only the head stays with the client
    L = CE(scores, y) + CE(cos(CoV(z, g), E), y)      `loss`; E^: E as received
        + lambda ||CoV(z, g) - E^_y|| + mu / 2 (||E||^2 + ||CoV||^2)
    g = mean_c E_c,  p_i = sum_c (n_ic / n_i) E_c     `conditions` of the next round; 0 in round 0
    base, E ("gce"), CoV <- means over i              the default `upload`, weights n_i

The norm is over the whole batch, not squared. The head is the last linear layer, whatever
head_depth says. After LayerNorm the head's inputs have a norm near sqrt(F) for F features, so GPFL
wants small rates: at F = 512, 0.05 learned badly on digits, 0.01 well.

Differs from the paper
1. g and p_i are made from the embeddings that the client itself trained last, as in the authors'
   code; the paper (a recollection) takes those just received: condition="global".
Differs from the authors' code
1. A client that was not sampled keeps its g and p_i (there, all clients receive all every round).
2. The label shares n_ic / n_i are of all training samples (PFLlib: without the last, dropped
   batch).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfl_core.methods.base import Batch, Context, Method, State
from pfl_core.stacked import Params, prefixed, unprefixed
from pfl_core.util.fields import choice, log_uniform, number


def branch(size: int) -> nn.Sequential:
    """gamma or beta: (..., size) -> (..., size)."""
    return nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.LayerNorm(size))


class GPFL(Method):
    """Generic features, tied to class embeddings, and personal ones (Zhang et al., 2023).

    Examples
    --------
    Beside the base travel embeddings of 10 classes and the valve's two branches, over 100 features:

    >>> gpfl = Experiment(method="gpfl", model="mlp", clients=3, rounds=1, max_samples=60)
    >>> sent = lambda e: run(e).history.query("metric == 'upload_bytes'").value.max()
    >>> int(sent(gpfl) - sent(gpfl.but(method="fedper"))) // 4 // 3
    21600
    """

    name = "gpfl"
    lam: float = number(
        0.01,
        low=0,
        doc="lambda, pull of generic features to E^ (authors' script: CNN; ResNet-18: 1e-4); 0 is "
        "none",
        search=log_uniform(1e-4, 0.1, also=(0.0,)),
    )
    mu: float = number(
        0.1,
        low=0,
        doc="weight decay of E and CoV alone (authors' script: CNN; ResNet-18: 0); 0 is none",
        search=log_uniform(0.001, 1, also=(0.0,)),
    )
    condition: str = choice(
        "own", "global", doc="g, p_i from the own embeddings trained last, or from those received"
    )

    def check(self) -> None:
        _ = self.task.last_linear  # ValueError for a model without one

    def is_shared(self, name: str) -> bool:
        return name not in self.task.classifier

    def init(self) -> State:
        state, t = super().init(), self.task
        classes, size = t.value(t.initial, t.last_linear[0]).shape
        with t.seeded("gpfl"):
            cov = nn.ModuleDict({"gamma": branch(size), "beta": branch(size)})
            gce = torch.randn(classes, size)
        state.server |= prefixed("cov.", dict(cov.to(t.device, t.dtype).state_dict()))
        state.server["gce"] = gce.to(t.device, t.dtype)
        names = ("generic", "personal", "next.generic", "next.personal")
        state.clients |= {n: torch.zeros(t.K, size, dtype=t.dtype, device=t.device) for n in names}
        return state

    def conditions(self, gce: Tensor, sel: Tensor) -> dict[str, Tensor]:
        """g and p_i (S, F) of clients sel from embeddings (S, C, F)."""
        share = (self.task.label_counts[sel] / self.task.n[sel][:, None]).to(gce.dtype)
        return {"generic": gce.mean(1), "personal": torch.einsum("sc,scf->sf", share, gce)}

    def begin(self, state: State, sel: Tensor, sent: Params | None = None) -> Params:
        p = super().begin(state, sel, sent)
        if self.condition == "own" or not state.round:
            return p | unprefixed("next.", p)
        return p | self.conditions(p["gce"], sel)

    def valve(self, p: Params, z: Tensor, condition: Tensor) -> Tensor:
        """CoV(z, u) of ONE client: features z (B, F), condition u (F,) -> (B, F)."""

        def applied(name: str) -> Tensor:
            q = unprefixed(f"cov.{name}.", p)
            h = F.relu(F.linear(condition, q["0.weight"], q["0.bias"]))
            return F.layer_norm(h, h.shape, q["2.weight"], q["2.bias"])

        return F.relu(z * (applied("gamma") + 1) + applied("beta"))

    def logits(self, p: Params, x: Tensor) -> Tensor:
        return self.task.classify(p, self.valve(p, self.task.features(p, x), p["personal"]))

    def loss(self, p: Params, anchor: Params, batch: Batch) -> Tensor:
        z = self.task.features(p, batch.x)
        scores = self.task.classify(p, self.valve(p, z, p["personal"]))
        generic = self.valve(p, z, p["generic"])
        cosines = F.linear(F.normalize(generic), F.normalize(p["gce"]))
        apart = ((generic - anchor["gce"][batch.y]).square().sum() + 1e-12).sqrt()
        decay = sum(v.square().sum() for n, v in p.items() if n == "gce" or n.startswith("cov."))
        fit = F.cross_entropy(scores, batch.y) + F.cross_entropy(cosines, batch.y)
        return fit + self.lam * apart + self.mu / 2 * decay

    def local(self, ctx: Context, start: Params) -> Params:
        extra = [n for n in start if n == "gce" or n.startswith("cov.")]
        end = ctx.train(self.loss, start, only=[*self.task.parameters, *extra])
        return end | prefixed("next.", self.conditions(end["gce"], ctx.sel))
