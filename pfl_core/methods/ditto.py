"""Ditto: FedAvg for a global model and, beside it, personal models that are pulled towards it.

Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML
2021, Algorithm 1.

    v_k <- v_k - eta (grad F_k(v_k) + lambda (v_k - w^t))    `personal_loss`, s epochs; anchor: w^t
    w   <- FedAvg                                            the default hooks

In clients' Params "v." is the personal model with BatchNorm statistics of its own, kept between
participations; plain names are w.

Differs from the paper
1. Both phases see the same batches and run one after the other; v_k depends on the received w^t
   alone, so the order does not matter.
2. Means are weighted by n_k. Robust aggregation and attacks are left out.

Differs from the authors' code
1. There clients are drawn by their sizes and averaged uniformly, and lambda may be picked from
   {0.1, 1, 2} on validation data; here it is fixed (tune it).
"""

from typing import Any

from torch import Tensor

from pfl_core.methods.base import Batch, Context, Method, State
from pfl_core.methods.terms import half_square
from pfl_core.stacked import Params, clone, expand, prefixed, select, unprefixed
from pfl_core.util.fields import log_uniform, number


class Ditto(Method):
    """FedAvg plus personal models regularised towards its global one (Li et al., 2021).

    Examples
    --------
    Without a pull to the global model, personal models are those of clients that train alone:

    >>> ditto = Experiment(method="ditto", model="mlp", clients=3, rounds=1, max_samples=60)
    >>> ditto = ditto.but(method_args={"lam": 0})
    >>> losses = [run(e).arrays["before/test/loss"] for e in (ditto, ditto.but(method="local"))]
    >>> np.allclose(*losses)
    True
    """

    name = "ditto"
    lam: float = number(
        1.0,
        low=0,
        doc="lambda, pull of v_k to w (authors' code, FL-bench); 0 is Local",
        search=log_uniform(0.05, 1.9, also=(0.0,)),
    )
    personal_epochs: int | None = number(
        None, low=1, doc="s, epochs on v_k; None: the experiment's epochs or steps"
    )
    personal_lr: float | None = number(
        None, above=0, doc="rate of v_k; None: the experiment's lr, as in all codes"
    )

    def check(self) -> None:
        rate = self.task.config.lr if self.personal_lr is None else self.personal_lr
        if self.lam * rate >= 2:
            raise ValueError(
                f"lam = {self.lam} at rate {rate}; allowed: lam * rate < 2 (beyond, the pull alone "
                "diverges)"
            )

    def init(self) -> State:
        state = super().init()
        state.clients |= prefixed("v.", clone(self.task.start()))
        return state

    def begin(self, state: State, sel: Tensor, sent: Params | None = None) -> Params:
        p = super().begin(state, sel, sent)
        if self.task.config.buffers == "reset":  # v's statistics too
            p |= prefixed("v.", expand(select(self.task.initial, self.task.buffers), len(sel)))
        return p

    def personal_loss(self, p: Params, anchor: Params, batch: Batch) -> Tensor:
        """Of ONE client: the loss of v_k (p) with its pull to w (anchor)."""
        return self.loss(p, anchor, batch) + self.lam * half_square(p, anchor, self.task.parameters)

    def local(self, ctx: Context, start: Params) -> Params:
        w, v = select(start, self.task.names), unprefixed("v.", start)
        how: dict[str, Any] = dict(epochs=self.personal_epochs, lr=self.personal_lr)
        received = select(w, self.task.parameters)
        v = ctx.train(self.personal_loss, v, anchor=received, **how)
        return ctx.train(self.loss, w) | prefixed("v.", v)

    def serve(self, p: Params) -> Params:
        return unprefixed("v.", p)
