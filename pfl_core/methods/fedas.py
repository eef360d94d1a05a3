"""FedAS: the received base is aligned with the own one, bases weighed by Fisher information.

Yang, Huang, Ye, "FedAS: Bridging Inconsistency in Personalized Federated Learning", CVPR 2024. Read
from the authors' code, not from the paper.

    m_ic  = mean features of class c by the client's own last base    `sums`; "own.*"
    base <- A epochs of SGD from the received base on                 `aligned`, stream "align"
            sum_{c in batch} mean_{b: y_b = c} ||f(x_b) - m_ic||^2 / F
    base_i, head_i <- E epochs of CE, jointly                         as FedPer
    f_i   = sum over batches ||grad of the batch's mean CE||^2        `informed`, stream "fisher"
    base <- sum_i f_i base_i / sum_i f_i                              `upload`; head_i stays

Features are the input of the last linear layer; the head is the experiment's (`head_depth`).
f_i depends on the batch size and grows with the number of batches and with the loss: n_i is in it
nowhere, and a client of few samples that fit badly may weigh most.

Alignment, features and f_i use the client's running BatchNorm statistics.

"before" is no fresh model: it is the client's own last one, so that of a participant it is the last
round's "after". Clients that never took part have the initial base, and new ones the server's.

Differs from the paper: not known, it was not read.

Differs from the authors' code
1. There alignment works on the server's own model, so that each client finds what the one before
   it left; here, as in PFLlib, on a copy.
2. Clients with less than a batch take part in alignment and in f_i with repeated samples; there
   they are not aligned, their f_i is 0, and their base is ignored.
3. Where all f_i are 0, weights are n_i; there it is 0 / 0.
"""

from typing import Any

import torch
from torch import Tensor

from pfl_core.methods.base import Batch, Context, Method, State, Step
from pfl_core.methods.terms import class_means, class_sums, hot
from pfl_core.stacked import Params, clone, expand, prefixed, select, total, unprefixed
from pfl_core.util.fields import among, choice, log_uniform, number


class FedAS(Method):
    """Aligned base under a personal head, averaged by Fisher information (Yang et al., 2024).

    Examples
    --------
    Without alignment and weighed by samples, it trains as FedPer:

    >>> fedas = Experiment(method="fedas", model="mlp", clients=3, rounds=1, max_samples=60)
    >>> fedas = fedas.but(method_args={"align_epochs": 0, "weigh_by": "samples"}, eval_after=True)
    >>> per = fedas.but(method="fedper", method_args={})
    >>> np.allclose(*[run(e).arrays["after/test/loss"] for e in (fedas, per)])
    True
    """

    name = "fedas"
    align_lr: float = number(
        0.01,
        low=0,
        doc="rate of the alignment (authors' code, PFLlib)",
        search=log_uniform(0.001, 0.1, also=(0.0,)),
    )
    align_epochs: int = number(1, low=0, doc="A (authors' code, PFLlib); 0 is no alignment")
    align_batch: int = number(16, low=1, doc="samples in a batch of it (authors' code, PFLlib)")
    weigh_by: str = choice(
        "fisher",
        "samples",
        doc="bases are averaged by f_i, or by n_i (authors' --wo_global)",
        search=among("fisher", "samples"),
    )

    def check(self) -> None:
        _ = self.task.last_linear  # ValueError for a model without one

    def is_shared(self, name: str) -> bool:
        return name not in self.task.head

    def init(self) -> State:
        state = super().init()
        state.clients |= prefixed("own.", clone(expand(state.server, self.task.K)))
        return state

    def sums(self, p: Params, batch: Batch) -> dict[str, Tensor]:
        """`class_sums` of ONE client's features."""
        return class_sums(self.task.features(p, batch.x), batch.y, self.task.C)

    def aligned(self, p: Params, anchor: Params, batch: Batch) -> Tensor:
        """Of ONE client: distance of features to "mean" (C, F), averaged within each class."""
        z, mean = self.task.features(p, batch.x), anchor["mean"]
        far, known = (z - mean[batch.y]).square().mean(1), hot(batch.y, len(mean), z.dtype)
        return ((known.T @ far) / known.sum(0).clamp_min(1)).sum()

    def informed(self, p: Params, anchor: Params, grad: Any, at: Step) -> tuple[Params, Params]:
        """Add a batch's squared gradient to "fisher"; the model of ONE client stays as it is."""
        g = grad(p)
        square = total(g[n].square().sum() for n in self.task.parameters)
        return p | {"fisher": p["fisher"] + square}, {}

    def local(self, ctx: Context, start: Params) -> Params:
        t = self.task
        model, own = select(start, t.names), unprefixed("own.", start)
        base = [n for n in t.parameters if n not in t.head]
        if self.align_epochs:
            near = {"mean": class_means(ctx.measure(self.sums, model | own))}
            how: dict[str, Any] = dict(epochs=self.align_epochs, lr=self.align_lr, bn="eval")
            how |= dict(batch=self.align_batch, only=base, stream="align")
            model = ctx.train(self.aligned, model, anchor=near, **how)
        end = ctx.train(self.loss, model)
        sent = prefixed("own.", select(end, own))
        if self.weigh_by == "samples":
            return end | sent
        return end | sent | {"fisher": self.fisher(ctx, end)}

    def fisher(self, ctx: Context, model: Params) -> Tensor:
        """f_i (S,): squared gradients of one epoch's batches, summed."""
        some = model[self.task.parameters[0]]
        start = model | {"fisher": some.new_zeros(len(some))}
        how: dict[str, Any] = dict(epochs=1, stream="fisher", bn="eval")
        how |= dict(step=self.informed, aside=True)
        return ctx.train(self.loss, start, only=[*self.task.parameters, "fisher"], **how)["fisher"]

    def upload(
        self, state: State, sel: Tensor, start: Params, end: Params, weight: Tensor
    ) -> State:
        f = end.get("fisher", weight)
        return super().upload(state, sel, start, end, torch.where(f.sum() > 0, f, weight))

    def serve(self, p: Params) -> Params:
        return select(p, self.task.names)

    def personal(self, state: State, ctx: Context) -> Params:
        p = self.begin(state, ctx.sel)
        return self.serve(p | unprefixed("own.", p))
