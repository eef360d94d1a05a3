"""FedALA: every client learns, element by element, how much of the global head to put into its own.

Zhang et al., "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI 2023,
arXiv:2212.01197, Algorithm 1.

    Thetahat_i = Theta_i + (w - Theta_i) * W_i       `blend`, in the head; below it Thetahat_i = w
    W_i <- clip(W_i - eta (w - Theta_i) * grad L(Thetahat_i), 0, 1)    `learn`, a step of `adapt`
                                                     L: the loss on s % of the client's samples
    Theta_i <- local SGD from Thetahat_i             `local`, on all tensors
    w <- sum_i n_i Theta_i / sum_i n_i               the default `upload`

In clients' Params "own." is Theta_i's head, "ala." is W_i, and `started` tells whether W_i has once
been trained to convergence. The head (the paper's p top layers) is the experiment's (`head_depth`;
1 is the code's last two tensors).

Differs from the paper (not read; this follows PFLlib's and the authors' code)
1. The start phase ends at 100 epochs at the latest, because the rule can otherwise go on for ever.
2. `threshold` is 0.1 as in all codes; the authors' README says that the paper's runs had 0.01.
Differs from the authors' code
1. The s % are a random subset, not a random contiguous slice; all epochs of one phase see the same
   batches in the same order, as there.
2. Whether own and global head differ decides if there is something to learn; the code asks if the
   sum of one tensor's differences is 0.
3. Who is not sampled keeps its head and weights; there all clients adapt in every round. The same
   at participation 1.
"""

from typing import Any

import torch
from torch import Tensor

from pfl_core.methods.base import Batch, Context, Method, State, Step
from pfl_core.stacked import Params, clone, prefixed, select
from pfl_core.util.fields import log_uniform, number


class FedALA(Method):
    """Local training starts from a learned blend of global and own head (Zhang et al., 2023).

    Examples
    --------
    Weights that learn at rate 0 leave the received head as it is, which is FedAvg:

    >>> ala = Experiment(method="fedala", model="mlp", clients=3, rounds=2, max_samples=60)
    >>> ala = ala.but(method_args={"eta": 0})
    >>> losses = [run(e).arrays["before/test/loss"] for e in (ala, ala.but(method="fedavg"))]
    >>> np.allclose(*losses)
    True
    """

    name = "fedala"
    eta: float = number(
        1.0,
        low=0,
        doc="rate of the weights W (paper and codes); 0 is FedAvg",
        search=log_uniform(0.1, 2, also=(0.0,)),
    )
    share: float = number(
        0.8, above=0, high=1, doc="s, part of a client's samples that W is learned on (all codes)"
    )
    threshold: float = number(
        0.1,
        low=0,
        doc="the start phase ends when the last `window` epochs' losses deviate by less (codes)",
    )
    window: int = number(10, low=1, doc="and more epochs than this are done (codes)")
    max_epochs: int = number(100, low=1, doc="of the start phase, at most (ours)")

    @property
    def top(self) -> list[str]:
        """Names of the adaptive tensors."""
        return [n for n in self.task.parameters if n in self.task.head]

    def init(self) -> State:
        state, t = super().init(), self.task
        head = clone(select(t.drawn(), self.top))
        ones = {n: torch.ones_like(v) for n, v in head.items()}
        state.clients |= prefixed("own.", head) | prefixed("ala.", ones)
        state.clients["started"] = torch.zeros(t.K, dtype=torch.bool, device=t.device)
        return state

    def blend(self, weights: Params, anchor: Params) -> Params:
        """The head Thetahat {name: (*shape)}, also stacked.

        `weights` has W ("ala."), `anchor` has Theta ("own.") and w (plain).
        """
        return {n: torch.lerp(anchor[f"own.{n}"], anchor[n], weights[f"ala.{n}"]) for n in self.top}

    def scored(self, p: Params, anchor: Params, batch: Batch) -> Tensor:
        """Of ONE client: the loss; the gradient of the entry `score`, of value 0, is it again."""
        value = self.loss(p, anchor, batch)
        return value + p["score"] * value.detach()

    def learn(self, p: Params, anchor: Params, grad: Any, at: Step) -> tuple[Params, Params]:
        """One step of ONE client on W; `score` records the loss."""
        g = grad(p)
        slope = {n: g[n] * (anchor[n] - anchor[f"own.{n}"]) for n in self.top}
        weights = {f"ala.{n}": (p[f"ala.{n}"] - self.eta * v).clamp(0, 1) for n, v in slope.items()}
        return p | weights | self.blend(weights, anchor) | {"score": g["score"]}, {}

    def adapt(self, ctx: Context, start: Params) -> Params:
        """`start` {name: (S, *shape)} with the blended head and the weights learned for it."""
        p, losses = start | self.blend(start, start), []
        differs = torch.zeros_like(start["started"])
        for n in self.top:
            differs |= (start[n] != start[f"own.{n}"])[..., None].flatten(1).any(1)
        learning, first = differs, ~start["started"]
        learned = [n for name in self.top for n in (name, f"ala.{name}")]
        while learning.any():
            new = self.epoch(ctx, p, start)
            keep = {n: learning.view(-1, *[1] * (p[n].dim() - 1)) for n in learned}
            p = p | {n: torch.where(keep[n], new[n], p[n]) for n in learned}
            losses.append(new["score"])
            learning = learning & first & ~self.settled(losses)
        return p | {"started": start["started"] | differs}

    def epoch(self, ctx: Context, p: Params, start: Params) -> Params:
        """p after an epoch on W, with each client's last loss as its `score` (S,)."""
        score = torch.zeros(len(ctx.sel), dtype=self.task.dtype, device=self.task.device)
        how: dict[str, Any] = dict(only=[*self.top, "score"], epochs=1, fraction=self.share)
        how |= dict(step=self.learn, aside=True, stream="ala")
        return ctx.train(self.scored, p | {"score": score}, anchor=start, **how)

    def settled(self, losses: list[Tensor]) -> Tensor:
        """Whose start phase is over, (S,) bool, by the losses (S,) of its epochs."""
        done = torch.full_like(losses[0], len(losses) >= self.max_epochs, dtype=torch.bool)
        if len(losses) > self.window:
            done |= torch.stack(losses[-self.window :]).std(0, correction=0) < self.threshold
        return done

    def local(self, ctx: Context, start: Params) -> Params:
        end = ctx.train(self.loss, self.adapt(ctx, start))
        return end | prefixed("own.", select(end, self.top))

    def personal(self, state: State, ctx: Context) -> Params:
        return self.serve(self.adapt(ctx, self.begin(state, ctx.sel)))
