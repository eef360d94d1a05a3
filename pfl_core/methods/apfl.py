"""APFL: each client mixes a model of its own with the one that it trains for the federation.

Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", arXiv:2003.13461. With vbar_i =
alpha_i v_i + (1 - alpha_i) w_i, on each batch, all gradients at the values before the step:

    w_i     <- w_i - eta grad f_i(w_i)                        `step`
    v_i     <- v_i - eta alpha_i grad f_i(vbar_i)
    alpha_i <- clip(alpha_i - eta (<v_i - w_i, grad f_i(vbar_i)> + c alpha_i), 0, 1)
                                                              once a round, each step or never
    w       <- sum_i n_i w_i / sum_i n_i                      the default `upload`
    vbar_i with the w just received is served                 `serve`

In clients' Params plain names are w, "v." is the own model and "alpha" the weight, both kept
between participations. w takes the course of FedAvg's model for every alpha. alpha = 0 with
adapt="never" is FedAvg, alpha = 1 Local; with adapt="round" or "step" neither stays there.

BatchNorm: a client has one set of statistics. Both gradients of a step advance it, so it is a blend
of those of w and of the mixture.

Momentum, weight decay and clipping would have to be chosen anew for three updates; they are
refused.

Differs from the paper (not read: what follows is from recollection and the codes)
1. Means are weighted by n_i; the paper (a recollection) and the authors' code average uniformly.
2. That alpha moves at the first step of a round is the authors' code's rule; the paper has the
   formula.
3. Who is scored: before local training, the own model mixed with the fresh w.
Differs from the authors' code (FedTorch)
1. There scores are mixed, not weights (the same for linear models only), w is stepped first, and
   the mixture is scored after local training: when="after". alpha is fixed by default.
2. decay=0.02 is the c of all codes, which the paper (a recollection) has not.
Differs from PFLlib's code (mix="end", adapt="step", alpha=1, decay=0.02 is that)
1. v_i is trained alone, alpha_i by the step's old gradients and its new models. v_i <- vbar_i at
   the end of a round, and v_i is scored, which knows nothing of the fresh w.
2. Each of its models has BatchNorm statistics of its own.
FL-bench's w takes every step twice: its gradient is not cleared between two backward passes.
"""

from typing import Any

import torch
from torch import Tensor

from pfl_core.methods.base import Context, Method, State, Step
from pfl_core.stacked import Params, clone, prefixed, select, total, unprefixed
from pfl_core.util.fields import among, choice, number, uniform


def mixture(w: Params, v: Params, alpha: Tensor) -> Params:
    """alpha v + (1 - alpha) w: {name: (*shape)} with alpha (), or stacked with alpha (S,)."""
    return {
        n: torch.lerp(w[n], x, alpha.view(alpha.shape + (1,) * (x.dim() - alpha.dim())))
        for n, x in v.items()
    }


class APFL(Method):
    """A learned mixture of an own model and the federation's (Deng et al., 2020).

    Examples
    --------
    A mixture without the own model is FedAvg's:

    >>> apfl = Experiment(method="apfl", model="mlp", clients=3, rounds=2, max_samples=60)
    >>> apfl = apfl.but(method_args={"alpha": 0, "adapt": "never"})
    >>> losses = [run(e).arrays["before/test/loss"] for e in (apfl, apfl.but(method="fedavg"))]
    >>> np.allclose(*losses)
    True
    """

    name = "apfl"
    alpha: float = number(
        0.5,
        low=0,
        high=1,
        doc="share of the own model at first (authors' README, FL-bench; PFLlib 1); where it "
        "stays, 0 is FedAvg and 1 Local",
        search=uniform(0.1, 0.9, also=(0.0, 1.0)),
    )
    adapt: str = choice(
        "round",
        "step",
        "never",
        doc="when alpha moves: at a round's first step (authors' code), at each (PFLlib), or never",
        search=among("round", "step", "never"),
    )
    decay: float = number(
        0.0, low=0, doc="c, decay of alpha; 0 is the paper (a recollection), 0.02 all codes"
    )
    mix: str = choice(
        "weights",
        "end",
        doc="of the own and the common model: before each gradient (paper), or at the end of a "
        "round alone (PFLlib)",
    )

    def check(self) -> None:
        c = self.task.config
        if c.momentum or c.weight_decay or c.clip:
            raise ValueError(
                f"momentum = {c.momentum}, weight_decay = {c.weight_decay}, clip = {c.clip}; "
                "allowed: all 0 (its three updates are plain gradient steps)"
            )

    def init(self) -> State:
        state, t = super().init(), self.task
        state.clients |= prefixed("v.", clone(select(t.start(), t.parameters)))
        state.clients["alpha"] = torch.full((t.K,), self.alpha, dtype=t.dtype, device=t.device)
        return state

    def step(self, p: Params, anchor: Params, grad: Any, at: Step) -> tuple[Params, Params]:
        """One step of ONE client on its w (plain names), v ("v.") and alpha; `at.lr` is eta."""
        w, v, a = select(p, self.task.parameters), unprefixed("v.", p), p["alpha"]
        at_w = grad(p)
        if self.mix == "weights":
            slope = at_mix = grad(p | mixture(w, v, a))
            new = {n: x - at.lr * a * at_mix[n] for n, x in v.items()}
            apart = {n: x - w[n] for n, x in v.items()}
        else:
            at_v = grad(p | v)
            slope = mixture(at_w, at_v, a)
            new = {n: x - at.lr * at_v[n] for n, x in v.items()}
            apart = {n: x - (w[n] - at.lr * at_w[n]) for n, x in new.items()}
        q = p | prefixed("v.", new)
        if self.adapt != "never":
            rise = total((x * slope[n]).sum() for n, x in apart.items()) + self.decay * a
            now = 1 if self.adapt == "step" else at.t == 0
            q["alpha"] = (a - at.lr * rise * now).clamp(0, 1)
        return q | {n: x.add_(at_w[n], alpha=-at.lr) for n, x in w.items()}, {}

    def local(self, ctx: Context, start: Params) -> Params:
        end = ctx.train(self.loss, start, step=self.step)
        if self.mix == "weights":
            return end
        w, v = select(end, self.task.parameters), unprefixed("v.", end)
        return end | prefixed("v.", mixture(w, v, end["alpha"]))

    def serve(self, p: Params) -> Params:
        w, v = select(p, self.task.parameters), unprefixed("v.", p)
        own = mixture(w, v, p["alpha"]) if self.mix == "weights" else v
        return select(p, self.task.buffers) | own
