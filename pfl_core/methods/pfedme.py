"""pFedMe: personal models are minimisers of a Moreau envelope around local models, which follow them and are averaged.

Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, Algorithm 1. On each of R batches:

    theta ~ argmin f_i(theta; batch) + lambda/2 ||theta - w_i||^2     `step`: K gradient steps at rate `personal_lr`
    w_i <- w_i - eta lambda (w_i - theta)                             eta is the experiment's lr
    w   <- (1 - beta) w + beta mean_i w_i                             `upload`

R is what the experiment says: all batches of its epochs, or `steps`. theta starts a round at w and is not put back between batches.
In clients' dicts, names as they are hold w (and the model in training), "theta." the personal model, kept between participations.

Differs from the paper
1. `decay` nu: gradient steps on theta see nu theta as well. The paper has none, the authors' code and its ports 0.001.
2. Means are weighted by n_k. BatchNorm's scale and shift take part in both levels; its statistics advance on each forward pass
   of theta, and averaged ones (buffers="average") are averaged plainly, without beta.
3. Only participants train; the paper trains all clients and averages a sample of them. With full participation there is no difference.
4. Momentum, weight decay and clipping of the experiment do not act here. Where each theta starts is the code's rule (a recollection
   of the paper: it asks only for an approximate minimiser).

Differs from the authors' code
1. theta is scored. There (and in PFLlib) its storage is the model's, overwritten before scoring: published code scores w_i or w.
   score="local" does so: w before local training, w_i after.
"""

from dataclasses import dataclass

import torch

from pfl_core.methods.base import Method
from pfl_core.stacked import expand, own, prefixed, select, unprefixed


@dataclass(frozen=True, eq=False)
class PFedMe(Method):
    """Personal models on Moreau envelopes around an averaged one (Dinh et al., 2020)."""

    name = "pfedme"
    lam: float = 15.0  # lambda, pull between theta and w_i; lr * lam = 1 sets w_i to theta. 15: authors' code
    inner_steps: int = 5  # K, gradient steps for each theta (authors' code)
    personal_lr: float = (
        0.01  # rate of these steps (PFLlib, FL-bench; authors' scripts 0.01 to 0.1)
    )
    beta: float = 1.0  # rate of the server; 1 is the plain mean (authors' code; 2 when tuned)
    decay: float = 0.001  # nu, weight decay of theta; 0 is the paper. 0.001: authors' code
    score: str = (
        "personal"  # the served model: "personal" theta, or "local" w_i, as published code does
    )

    def check(self):
        lr, pull = self.task.config.lr, self.lam + self.decay
        for name, fine, allowed in (
            ("lam", 0 < self.lam * lr < 2, f"0 < lam * lr < 2 (lr is {lr}; at 0 w freezes)"),
            ("inner_steps", self.inner_steps >= 1, "an integer >= 1"),
            ("decay", self.decay >= 0, "a number >= 0"),
            (
                "personal_lr",
                0 < self.personal_lr * pull < 2,
                f"0 < personal_lr * (lam + decay) < 2 (the sum: {pull})",
            ),
            ("beta", self.beta > 0, "a number > 0; at 0 w freezes"),
            ("score", self.score in ("personal", "local"), "'personal' or 'local'"),
        ):
            if not fine:
                raise ValueError(f"pfedme: {name} = {getattr(self, name)!r}; allowed: {allowed}")

    def init(self):
        state = super().init()
        state.clients |= prefixed("theta.", own(select(self.task.start(), self.task.parameters)))
        return state

    def step(self, p, anchor, grad, at):
        """K steps of ONE client's theta (plain names) on one batch, then the step of its w_i ("w."); `at.lr` is eta."""
        w = unprefixed("w.", p)
        for _ in range(self.inner_steps):
            g = grad(p)
            pull = {n: g[n] + self.lam * (p[n] - w[n]) + self.decay * p[n] for n in w}
            p = p | {n: p[n] - self.personal_lr * pull[n] for n in w}
        return p | {f"w.{n}": w[n] - at.lr * self.lam * (w[n] - p[n]) for n in w}, {}

    def local(self, c, start):
        names = self.task.parameters
        end = c.train(
            self.loss,
            select(start, self.task.names) | prefixed("w.", select(start, names)),
            step=self.step,
        )
        return (
            prefixed("theta.", select(end, names))
            | unprefixed("w.", end)
            | select(end, self.task.buffers)
        )

    def upload(self, state, sel, start, end, weight):
        old = select(state.server, self.task.parameters)
        state = super().upload(state, sel, start, end, weight)
        state.server |= {n: torch.lerp(v, state.server[n], self.beta) for n, v in old.items()}
        return state

    def serve(self, p):
        return select(p, self.task.names) | (
            unprefixed("theta.", p) if self.score == "personal" else {}
        )

    def adopt(self, state, k):
        state = super().adopt(state, k)  # new clients' personal models start at w
        state.clients |= prefixed(
            "theta.", own(expand(select(state.server, self.task.parameters), k))
        )
        return state
