"""Per-FedAvg: learn an initial model that one gradient step on a client's data turns into a good personal one.

Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach",
NeurIPS 2020, Algorithm 1. It minimises F(w) = mean_i f_i(w - alpha grad f_i(w)); for batches D, D', D'' of one client:

    w~ = w - alpha grad f(w; D)                                                      `step`; grad(p, j) is on the j-th batch
    v  = grad f(w~; D')
    FO:  d = v
    HF:  d = v - alpha [grad f(w + delta v; D'') - grad f(w - delta v; D'')] / (2 delta)
    w  <- w - beta d                                                                 from w, not from w~
    personal model: w - alpha grad f_i(w)                                            `personal`

Differs from the paper
1. Weights are n_k; the paper averages uniformly (a recollection).
2. delta is relative: the step delta v has the length of `delta` times ||w||, so that float32 keeps its digits where v is small.
3. The personal model is adapted for one epoch at rate alpha: a single batch makes it noisy. adapt_steps=1 is the paper's one step.
4. D, D', D'' are consecutive batches of one permutation; a client with fewer batches than that meets its samples again in them.
5. BatchNorm runs on batch statistics throughout; running statistics advance on D only.
6. Meta-steps are plain: momentum, weight decay and clipping of the experiment act in the adaptation alone.

Differs from others' code (of the authors' own we know none)
1. PFLlib ties beta to alpha and passes twice over batches cut in halves; `passes` gives as many updates as FedAvg makes.
2. The pFedMe authors' Per-FedAvg adapts on test batches before scoring; here on the training data only.

At when="after" the meta-trained w_i are read as they are (pFedGraph's choice): models made to be adapted, which nobody has adapted, and
near chance once training is under way. "before" is the method's own number; the comparison of all methods leaves the other blank.
"""

from dataclasses import dataclass

import torch

from pfl_core.methods.base import Method
from pfl_core.stacked import Params, axpy, select


def _norm(p: Params) -> torch.Tensor:
    # Of ONE client, kept above 0: it is divided by.
    return torch.cat([v.flatten() for v in p.values()]).norm().clamp_min(1e-12)


@dataclass(frozen=True, eq=False)
class PerFedAvg(Method):
    """FedAvg on the loss after one gradient step, first-order or Hessian-free (Fallah et al., 2020)."""

    name = "perfedavg"
    version: str = "fo"  # "fo" leaves the Hessian out, "hf" takes it by a central difference
    alpha: float | None = (
        None  # rate of inner step and adaptation; None: lr. 0 is FedAvg on the D' (a limit)
    )
    beta: float | None = None  # rate of the meta-step; None: lr (PFLlib); FL-bench 0.001
    delta: float = 1e-3  # length of the difference step of "hf", relative to ||w||
    # Runs over the experiment's epochs (or steps) a round; 2 ("fo") or 3 ("hf") makes as many updates as FedAvg.
    passes: int = 1
    adapt_epochs: int = 1  # of the personal model, at rate alpha (FL-bench: 1)
    adapt_steps: int = 0  # > 0 replaces adapt_epochs

    @property
    def _alpha(self) -> float:
        return self.task.config.lr if self.alpha is None else self.alpha

    def check(self):
        for name, fine, allowed in (
            ("version", self.version in ("fo", "hf"), "'fo' or 'hf'"),
            ("alpha", self.alpha is None or self.alpha >= 0, "None (lr) or a number >= 0"),
            (
                "beta",
                self.beta is None or self.beta > 0,
                "None (lr) or a number > 0; at 0 nothing is learned",
            ),
            ("delta", self.delta > 0, "a number > 0"),
            ("passes", self.passes >= 1, "an integer >= 1"),
            ("adapt_steps", self.adapt_steps >= 0, "an integer >= 0"),
            (
                "adapt_epochs",
                self.adapt_epochs >= (not self.adapt_steps),
                "an integer >= 1; 0 if adapt_steps >= 1",
            ),
        ):
            if not fine:
                raise ValueError(f"perfedavg: {name} = {getattr(self, name)!r}; allowed: {allowed}")

    def step(self, p, anchor, grad, at):
        """One meta-step of ONE client; `at.lr` is beta."""
        v = d = grad(p | axpy(-self._alpha, grad(p), p), 1)
        if self.version == "hf":
            h = self.delta * _norm(select(p, v)) / _norm(v)
            ahead, behind = (grad(p | axpy(s, v, p), 2) for s in (h, -h))
            d = {n: v[n] - self._alpha * (ahead[n] - behind[n]) / (2 * h) for n in v}
        return p | {n: torch.add(p[n], d[n], alpha=-at.lr) for n in d}, {}

    def local(self, c, start):
        batches = 2 if self.version == "fo" else 3
        for i in range(self.passes):
            stream = f"local/{i}" if i else "local"
            start = c.train(
                self.loss, start, lr=self.beta, step=self.step, batches=batches, stream=stream
            )
        return start

    def personal(self, state, c):
        how = dict(lr=self._alpha, epochs=self.adapt_epochs, steps=self.adapt_steps, stream="adapt")
        return c.train(self.loss, self.begin(state, c.sel), **how)
