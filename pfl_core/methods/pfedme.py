"""pFedMe: personal models minimise a Moreau envelope around local models, which follow them.

Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, Algorithm
1. On each of R batches:

    theta ~ argmin f_i(theta; batch) + lambda/2 ||theta - w_i||^2     `step`: K gradient steps at
                                                                      rate `personal_lr`
    w_i <- w_i - eta lambda (w_i - theta)                             eta is the experiment's lr
    w   <- (1 - beta) w + beta mean_i w_i                             `upload`

R is what the experiment says: all batches of its epochs, or `steps`. theta starts a round at w and
is not put back between batches. In clients' Params, names as they are hold w (and the model in
training), "theta." the personal model, kept between participations.

Differs from the paper
1. `decay` nu: gradient steps on theta see nu theta as well. The paper has none, the authors' code
   and its ports 0.001.
2. Means are weighted by n_k. BatchNorm's scale and shift take part in both levels; its statistics
   advance on each forward pass of theta, and averaged ones (buffers="average") are averaged
   plainly, without beta.
3. Only participants train; the paper trains all clients and averages a sample of them. With full
   participation there is no difference.
4. Momentum, weight decay and clipping of the experiment do not act here. Where each theta starts is
   the code's rule (a recollection of the paper: it asks only for an approximate minimiser).

Differs from the authors' code
1. theta is scored. There (and in PFLlib) its storage is the model's, overwritten before scoring:
   published code scores w_i or w. score="local" does so: w before local training, w_i after.
"""

from typing import Any

import torch
from torch import Tensor

from pfl_core.methods.base import Context, Method, State, Step
from pfl_core.stacked import Params, clone, prefixed, select, unprefixed
from pfl_core.util.fields import choice, log_uniform, number


class PFedMe(Method):
    """Personal models on Moreau envelopes around an averaged one (Dinh et al., 2020).

    Examples
    --------
    Where lr * lam is 1, a client's local model after training is its personal one:

    >>> pfedme = Experiment(method="pfedme", model="mlp", clients=3, rounds=1, max_samples=60)
    >>> pfedme = pfedme.but(lr=1 / 15)
    >>> scored = [pfedme.but(method_args={"score": which}) for which in ("personal", "local")]
    >>> np.allclose(*[run(e).arrays["after/test/loss"] for e in scored])
    True
    """

    name = "pfedme"
    untuned = ("lr",)  # w_i's, which hangs on lam; what is served has `personal_lr`
    lam: float = number(
        15.0,
        above=0,
        doc="lambda, pull between theta and w_i (authors' code); lr * lam = 1 sets w_i to theta",
        search=log_uniform(1, 19),
    )
    inner_steps: int = number(5, low=1, doc="K, gradient steps for each theta (authors' code)")
    personal_lr: float = number(
        0.01,
        above=0,
        doc="rate of these steps (PFLlib, FL-bench; authors' scripts: 0.01 to 0.1)",
        search=log_uniform(0.005, 0.1),
    )
    beta: float = number(
        1.0, above=0, doc="rate of the server; 1 is the plain mean (authors' code; 2 when tuned)"
    )
    decay: float = number(
        0.001, low=0, doc="nu, weight decay of theta (authors' code); 0 is the paper"
    )
    score: str = choice(
        "personal", "local", doc="the served model: theta, or w_i, as published code does"
    )

    def check(self) -> None:
        lr, pull = self.task.config.lr, self.lam + self.decay
        if not 0 < self.lam * lr < 2:
            raise ValueError(
                f"lam = {self.lam} at lr = {lr}; allowed: 0 < lam * lr < 2 (at 0 w freezes)"
            )
        if self.personal_lr * pull >= 2:
            raise ValueError(
                f"personal_lr = {self.personal_lr}; allowed: personal_lr * (lam + decay) < 2 (the "
                f"sum: {pull})"
            )

    def init(self) -> State:
        state = super().init()
        theta = clone(select(self.task.start(), self.task.parameters))
        state.clients |= prefixed("theta.", theta)
        return state

    def step(self, p: Params, anchor: Params, grad: Any, at: Step) -> tuple[Params, Params]:
        """K steps of ONE client's theta (plain names) on one batch, then the step of its w_i.

        w_i is in p, too ("w."); `at.lr` is eta.
        """
        w = unprefixed("w.", p)
        for _ in range(self.inner_steps):
            g = grad(p)
            pull = {n: g[n] + self.lam * (p[n] - w[n]) + self.decay * p[n] for n in w}
            p = p | {n: p[n] - self.personal_lr * pull[n] for n in w}
        return p | {f"w.{n}": w[n] - at.lr * self.lam * (w[n] - p[n]) for n in w}, {}

    def local(self, ctx: Context, start: Params) -> Params:
        names = self.task.parameters
        both = select(start, self.task.names) | prefixed("w.", select(start, names))
        end = ctx.train(self.loss, both, step=self.step)
        theta, buffers = prefixed("theta.", select(end, names)), select(end, self.task.buffers)
        return theta | unprefixed("w.", end) | buffers

    def upload(
        self, state: State, sel: Tensor, start: Params, end: Params, weight: Tensor
    ) -> State:
        old = select(state.server, self.task.parameters)
        state = super().upload(state, sel, start, end, weight)
        state.server |= {n: torch.lerp(v, state.server[n], self.beta) for n, v in old.items()}
        return state

    def serve(self, p: Params) -> Params:
        theta = unprefixed("theta.", p) if self.score == "personal" else {}
        return select(p, self.task.names) | theta
