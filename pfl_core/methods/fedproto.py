"""FedProto: clients exchange the class means of their features, and keep their models.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: Federated Prototype Learning across Heterogeneous
Clients", AAAI 2022, arXiv:2105.00243.

    L = CE(h_i(z), y) + lambda mean (z - P_y)^2         `loss`, z = f_i(x); over batch and features,
                                                        0 for a class without prototype
    C_ic = mean of z over the client's class c          `local`, by the trained model
    P_c  <- sum_i n_ic C_ic / sum_i n_ic                `upload`, over participants that have c
    argmin_c ||z - P_c||^2 is the answer                `logits`; h_i until there is a P

A class that no participant has keeps its prototype. One that nobody has had yet is never answered:
it scores 1 below the least. A model after local training answers by the P that it was trained with,
before local training by the newest. A client that is new to a trained federation has P and a model
that nobody trained: adopt=False, unless that is meant.

The head is the last linear layer, whatever head_depth says. No weights are shared, so BatchNorm's
statistics stay at home with buffers="average", too.

Differs from the paper (not read: from recollection and the codes)
1. The pull is on each sample's feature, as in all codes; the paper's on the class means.
2. Its equation 6 divides P_c once more by the number of clients that have c, which shrinks
   prototypes towards 0; no code does so, and neither do we.
Differs from the authors' code
1. C_ic is over all samples, in evaluation mode, after training. There it is over batches as they
   were seen in training, of the last epoch: proto="running" with one epoch.
2. P_c is a plain mean over clients there: weights="clients".
3. There a client answers only classes of its own: score="own"; and its printed accuracies run on
   over clients and over two ways of scoring, so published ones are not comparable.
Differs from PFLlib's code (proto="running", weights="clients" is that)
1. Before there is a P nothing is right there, 0 %; here the classifier answers.
FL-bench scores the classifier: score="classifier".
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pfl_core.methods.base import Batch, Context, Method, State
from pfl_core.methods.terms import class_means, class_sums, hot
from pfl_core.stacked import Params, select, unprefixed
from pfl_core.util.fields import among, choice, log_uniform, number

GIVEN = ("proto", "seen")  # what the server sends: P (C, F), and of which classes it knows one


def scores(z: Tensor, proto: Tensor, seen: Tensor, other: Tensor) -> Tensor:
    """-||z - P_c||^2 (B, C) for classes that are `seen` (C,), 1 less than the least for others.

    z (B, F), proto (C, F); `other` (B, C) are the scores where no class is seen.
    """
    near = -(z[:, None] - proto).square().sum(2)
    least = near.masked_fill(~seen, torch.inf).amin(1, keepdim=True)
    return torch.where(seen.any(), torch.where(seen, near, least - 1), other)


class FedProto(Method):
    """Only class means of features travel, and pull features to them (Tan et al., 2022).

    Examples
    --------
    Up go a mean of 100 features for each of 10 classes, and how many samples are in it:

    >>> proto = Experiment(method="fedproto", model="mlp", clients=3, rounds=1, max_samples=60)
    >>> moved = run(proto).history.query("metric == 'upload_bytes'").value.max()
    >>> int(moved) // 4 // 3
    1010
    """

    name = "fedproto"
    lam: float = number(
        1.0,
        low=0,
        doc="lambda, pull of features to the prototypes (authors' code: 1; CIFAR-10: 0.1); 0 "
        "trains as Local does",
        search=log_uniform(0.05, 10, also=(0.0,)),
    )
    proto: str = choice(
        "after",
        "running",
        doc="class means by the trained model (paper), or of features as training saw them "
        "(all codes)",
    )
    weights: str = choice(
        "samples", "clients", doc="of a client's class mean: n_ic (paper), or 1 (all codes)"
    )
    score: str = choice(
        "prototype",
        "classifier",
        "own",
        doc="who answers: the nearest prototype, the classifier (FL-bench), or the nearest "
        "one of a class that the client has (authors' code)",
        search=among("prototype", "classifier", "own"),
    )

    def check(self) -> None:
        _ = self.task.last_linear  # ValueError for a model without one
        tuned = [stage.get("only") for stage in self.task.config.finetune]
        if set(tuned) == {"head"} and self.score != "classifier":
            raise ValueError(
                f"score = {self.score} with finetune of the head only: nearest prototypes answer, "
                "and features stay; allowed: score = classifier, or a stage that trains the body"
            )
        if self.proto == "running" and not self.task.config.plain_sgd:
            raise ValueError(
                f"proto = running with {self.task.config.stepping}; allowed: both 0 and sgd, or "
                "proto = after (the sums of features would have them, too)"
            )

    def is_shared(self, name: str) -> bool:
        return False

    def init(self) -> State:
        state, t = super().init(), self.task
        proto = torch.zeros_like(t.value(t.initial, t.last_linear[0]))
        state.server |= {"proto": proto, "seen": torch.zeros_like(proto[:, 0], dtype=torch.bool)}
        return state

    def begin(self, state: State, sel: Tensor, sent: Params | None = None) -> Params:
        p = super().begin(state, sel, sent)
        if self.score == "own":  # no other one is needed in training, either
            p["seen"] = p["seen"] & (self.task.label_counts[sel] > 0)
        return p

    def logits(self, p: Params, x: Tensor) -> Tensor:
        z = self.task.features(p, x)
        own = self.task.classify(p, z)
        return own if self.score == "classifier" else scores(z, p["proto"], p["seen"], own)

    def loss(self, p: Params, anchor: Params, batch: Batch) -> Tensor:
        z, y = self.task.features(p, batch.x), batch.y
        value = F.cross_entropy(self.task.classify(p, z), y)
        if self.lam:
            far = (z - anchor["proto"][y]).square() * anchor["seen"][y][:, None]
            value = value + self.lam * far.mean()
        if self.proto == "running":  # at rate 1, SGD adds to the sums what they are multiplied by
            known = hot(y, self.task.C, z.dtype)
            counted = (p["sum.n"] * known.sum(0)).sum()
            value = value - counted - (p["sum.z"] * (known.T @ z.detach())).sum()
        return value

    def sums(self, p: Params, batch: Batch) -> dict[str, Tensor]:
        """`class_sums` of ONE client's features."""
        return class_sums(self.task.features(p, batch.x), batch.y, self.task.C)

    def trained(self, ctx: Context, start: Params) -> tuple[Params, Params]:
        """The models after local training, and `class_sums` of their features."""
        near, names = select(start, GIVEN), self.task.parameters
        if self.proto == "after":
            end = ctx.train(self.loss, start, anchor=near)
            return end, ctx.measure(self.sums, end)
        zero = torch.zeros_like(start["proto"])
        tallies = {"sum.z": zero, "sum.n": zero[..., 0].clone()}
        rates: dict[str, Any] = dict.fromkeys(names, ctx.lr)
        rates |= dict.fromkeys(tallies, 1.0)
        end = ctx.train(
            self.loss, start | tallies, anchor=near, only=rates, clipped=names, lr=rates
        )
        return select(end, start), unprefixed("sum.", end)

    def local(self, ctx: Context, start: Params) -> Params:
        end, s = self.trained(ctx, start)
        # Visits count a sample as often as it was seen; one that was left out has not been seen.
        count = self.task.label_counts[ctx.sel].to(s["n"].dtype) * (s["n"] > 0)
        return end | {"mean": class_means(s), "count": count}

    def upload(
        self, state: State, sel: Tensor, start: Params, end: Params, weight: Tensor
    ) -> State:
        count = end["count"]
        n = count if self.weights == "samples" else (count > 0).to(count.dtype)
        every = n.sum(0)
        mean = torch.einsum("sc,scf->cf", n, end["mean"]) / every.clamp_min(1)[:, None]
        held = every > 0
        proto = torch.where(held[:, None], mean, state.server["proto"])
        state.server |= {"proto": proto, "seen": state.server["seen"] | held}
        return state

    def serve(self, p: Params) -> Params:
        return select(p, [*self.task.names, *GIVEN])
