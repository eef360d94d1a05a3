"""Ditto: FedAvg for a global model and, beside it, personal models that are pulled towards it.

Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1.

    v_k <- v_k - eta (grad F_k(v_k) + lambda (v_k - w^t))   `personal_loss`, for s epochs; w^t as received is the anchor
    w   <- FedAvg                                           the default hooks

In clients' dicts "v." is the personal model with BatchNorm statistics of its own, kept between participations; plain names are w.

Differs from the paper
1. Both phases see the same batches and run one after the other; v_k depends on the received w^t alone, so the order does not matter.
2. Means are weighted by n_k. Robust aggregation and attacks are left out.

Differs from the authors' code
1. There clients are drawn by their sizes and averaged uniformly, and lambda may be picked from {0.1, 1, 2} on validation data;
   here it is fixed (tune it).
"""

from dataclasses import dataclass

from pfl_core.methods.base import Method
from pfl_core.methods.terms import half_square
from pfl_core.stacked import expand, own, prefixed, select, unprefixed


@dataclass(frozen=True, eq=False)
class Ditto(Method):
    """FedAvg plus personal models regularised towards its global one (Li et al., 2021)."""

    name = "ditto"
    lam: float = 1.0  # lambda, pull of v_k to w; 0 is Local (allowed as its limit). 1: authors' code, FL-bench
    personal_epochs: int | None = None  # s, on v_k; None: the experiment's epochs or steps
    personal_lr: float | None = None  # rate of v_k; None: lr, as in all codes

    def check(self):
        rate = self.task.config.lr if self.personal_lr is None else self.personal_lr
        for name, fine, allowed in (
            (
                "personal_epochs",
                self.personal_epochs is None or self.personal_epochs >= 1,
                "None or an integer >= 1",
            ),
            ("personal_lr", self.personal_lr is None or rate > 0, "None (lr) or a number > 0"),
            (
                "lam",
                self.lam >= 0 and self.lam * rate < 2,
                f"a number >= 0 with lam * rate < 2 (the rate is {rate})",
            ),
        ):
            if not fine:
                raise ValueError(f"ditto: {name} = {getattr(self, name)!r}; allowed: {allowed}")

    def init(self):
        state = super().init()
        state.clients |= prefixed("v.", own(self.task.start()))
        return state

    def begin(self, state, sel, sent=None):
        p = super().begin(state, sel, sent)
        if self.task.config.buffers == "reset":  # v's statistics too
            p |= prefixed("v.", expand(select(self.task.initial, self.task.buffers), len(sel)))
        return p

    def personal_loss(self, p, anchor, batch):
        """Of ONE client: the loss of v_k (p) with its pull to w (anchor)."""
        return self.loss(p, anchor, batch) + self.lam * half_square(p, anchor, self.task.parameters)

    def local(self, c, start):
        w = select(start, self.task.names)
        how = dict(epochs=self.personal_epochs, lr=self.personal_lr)
        v = c.train(
            self.personal_loss,
            unprefixed("v.", start),
            anchor=select(w, self.task.parameters),
            **how,
        )
        return c.train(self.loss, w) | prefixed("v.", v)

    def serve(self, p):
        return unprefixed("v.", p)

    def adopt(self, state, k):
        state = super().adopt(state, k)  # new clients' personal models start at w
        state.clients |= prefixed("v.", own(expand(select(state.server, self.task.parameters), k)))
        return state
