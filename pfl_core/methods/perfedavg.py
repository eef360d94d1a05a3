"""Per-FedAvg: an initial model that a gradient step on a client's data turns into a personal one.

Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A
Model-Agnostic Meta-Learning Approach", NeurIPS 2020, Algorithm 1. It minimises
F(w) = mean_i f_i(w - alpha grad f_i(w)); for batches D, D', D'' of one client:

    w~ = w - alpha grad f(w; D)                         `step`; grad(p, j) is on the j-th batch
    v  = grad f(w~; D')
    FO:  d = v
    HF:  d = v - alpha [grad f(w + delta v; D'') - grad f(w - delta v; D'')] / (2 delta)
    w  <- w - beta d                                    from w, not from w~
    personal model: w - alpha grad f_i(w)               `personal`

Differs from the paper
1. Weights are n_k; the paper averages uniformly (a recollection).
2. delta is relative: the step delta v has the length of `delta` times ||w||, so that float32 keeps
   its digits where v is small.
3. The personal model is adapted for one epoch at rate alpha: a single batch makes it noisy.
   adapt_steps=1 is the paper's one step.
4. D, D', D'' are consecutive batches of one permutation; a client with fewer batches than that
   meets its samples again in them.
5. BatchNorm runs on batch statistics throughout; running statistics advance on D only.
6. Meta-steps are plain: momentum, weight decay and clipping of the experiment act in the adaptation
   alone.

Differs from others' code (of the authors' own we know none)
1. PFLlib ties beta to alpha and passes twice over batches cut in halves; `passes` gives as many
   updates as FedAvg makes.
2. The pFedMe authors' Per-FedAvg adapts on test batches before scoring; here on the training data
   only.

At when="after" the meta-trained w_i are read as they are (pFedGraph's choice): models made to be
adapted, which nobody has adapted, and near chance once training is under way. "before" is the
method's own number; the comparison of all methods leaves the other blank.
"""

from typing import Any

import torch

from pfl_core.methods.base import Context, Method, State, Step
from pfl_core.stacked import Params, axpy, select
from pfl_core.util.fields import choice, log_uniform, number


def _norm(p: Params) -> torch.Tensor:
    # Of ONE client, kept above 0: it is divided by.
    return torch.cat([v.flatten() for v in p.values()]).norm().clamp_min(1e-12)


class PerFedAvg(Method):
    """FedAvg on the loss after a gradient step, FO or Hessian-free (Fallah et al., 2020).

    Examples
    --------
    "before" reads the adapted models, the method's own number, "after" those made to be adapted:

    >>> perfedavg = Experiment(method="perfedavg", model="mlp", clients=3, rounds=1, lr=0.1)
    >>> table = run(perfedavg.but(method_args={"adapt_epochs": 3})).summary()
    >>> bool(table["last round"].before > table["last round"].after)
    True
    """

    name = "perfedavg"
    version: str = choice(
        "fo", "hf", doc="fo leaves the Hessian out, hf takes it by a central difference"
    )
    alpha: float | None = number(
        None,
        low=0,
        doc="rate of inner step and adaptation; None: lr; 0 is FedAvg on the D'",
        search=log_uniform(0.001, 0.1, also=(0.0,)),
    )
    beta: float | None = number(
        None, above=0, doc="rate of the meta-step (FL-bench: 0.001); None: lr (PFLlib)"
    )
    delta: float = number(
        1e-3, above=0, doc="length of the difference step of hf, relative to ||w|| (ours)"
    )
    passes: int = number(
        1,
        low=1,
        doc="over the experiment's epochs (or steps) a round; 2 (fo) or 3 (hf) makes as many "
        "updates as FedAvg",
    )
    adapt_epochs: int = number(
        1, low=0, doc="of the personal model, at rate alpha (FL-bench: 1); 0 with adapt_steps only"
    )
    adapt_steps: int = number(0, low=0, doc="> 0 replaces adapt_epochs; 1 is the paper")

    @property
    def _alpha(self) -> float:
        return self.task.config.lr if self.alpha is None else self.alpha

    def check(self) -> None:
        if not (self.adapt_epochs or self.adapt_steps):
            raise ValueError("adapt_epochs = adapt_steps = 0; allowed: one of them >= 1")

    def step(self, p: Params, anchor: Params, grad: Any, at: Step) -> tuple[Params, Params]:
        """One meta-step of ONE client; `at.lr` is beta."""
        v = d = grad(p | axpy(-self._alpha, grad(p), p), 1)
        if self.version == "hf":
            h = self.delta * _norm(select(p, v)) / _norm(v)
            ahead, behind = (grad(p | axpy(s, v, p), 2) for s in (h, -h))
            d = {n: v[n] - self._alpha * (ahead[n] - behind[n]) / (2 * h) for n in v}
        return p | {n: p[n].add_(d[n], alpha=-at.lr) for n in d}, {}

    def local(self, ctx: Context, start: Params) -> Params:
        how: dict[str, Any] = dict(
            lr=self.beta, step=self.step, batches=2 if self.version == "fo" else 3
        )
        for i in range(self.passes):
            start = ctx.train(self.loss, start, stream=f"local/{i}" if i else "local", **how)
        return start

    def personal(self, state: State, ctx: Context) -> Params:
        epochs, steps = self.adapt_epochs, self.adapt_steps
        how: dict[str, Any] = dict(lr=self._alpha, epochs=epochs, steps=steps, stream="adapt")
        return ctx.train(self.loss, self.begin(state, ctx.sel), **how)
