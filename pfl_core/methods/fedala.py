"""FedALA: before training, every client learns element by element how much of the global head to put into its own.

Zhang et al., "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI 2023, arXiv:2212.01197, Algorithm 1.

    Thetahat_i = Theta_i + (w - Theta_i) * W_i           `blend`, in the head; below it Thetahat_i = w
    W_i <- clip(W_i - eta grad_Thetahat L * (w - Theta_i), 0, 1)    `learn`, a step of `adapt`; L on s % of the client's samples
    Theta_i <- local SGD from Thetahat_i on all tensors   `local`
    w <- sum_i n_i Theta_i / sum_i n_i                    the default `upload`

In clients' dicts "own." is Theta_i's head, "ala." is W_i, and `started` tells whether W_i has once been trained to convergence. The head
(the paper's p top layers) is the experiment's (`head_depth`; 1 is the code's last two tensors).

Differs from the paper (not read; this follows PFLlib's and the authors' code)
1. The start phase ends at 100 epochs at the latest, because the rule can otherwise go on for ever.
2. `threshold` is 0.1 as in all codes; the authors' README says that the paper's runs had 0.01.
Differs from the authors' code
1. The s % are a random subset, not a random contiguous slice; all epochs of one phase see the same batches in the same order, as there.
2. Whether own and global head differ decides if there is something to learn; the code asks if the sum of one tensor's differences is 0.
3. Who is not sampled keeps its head and weights; there all clients adapt in every round. The same at participation 1.
"""

from dataclasses import dataclass

import torch

from pfl_core.methods.base import Method
from pfl_core.stacked import own, prefixed, select


@dataclass(frozen=True, eq=False)
class FedALA(Method):
    """Learned element-wise blend of global and own head as the start of local training (Zhang et al., 2023)."""

    name = "fedala"
    eta: float = 1.0  # rate of the weights W (paper and codes); 0 is FedAvg
    share: float = 0.8  # s, the part of a client's samples that W is learned on (paper and codes)
    threshold: float = (
        0.1  # the start phase ends when the last `window` epochs' losses deviate by less (codes)
    )
    window: int = 10  # and more epochs than this are done (codes)
    max_epochs: int = 100  # of the start phase; ours

    def check(self):
        for field, fine, allowed in (
            ("eta", self.eta >= 0, "a number >= 0"),
            ("share", 0 < self.share <= 1, "a share in (0, 1]"),
            ("threshold", self.threshold >= 0, "a number >= 0"),
            ("window", self.window >= 1, "an integer >= 1"),
            ("max_epochs", self.max_epochs >= 1, "an integer >= 1"),
        ):
            if not fine:
                raise ValueError(f"fedala: {field} = {getattr(self, field)!r}; allowed: {allowed}")

    @property
    def top(self) -> list[str]:
        """Names of the adaptive tensors."""
        return [n for n in self.task.parameters if n in self.task.head]

    def init(self):
        state, head = super().init(), own(select(self.task.start(), self.top))
        state.clients |= prefixed("own.", head) | {
            f"ala.{n}": torch.ones_like(v) for n, v in head.items()
        }
        state.clients["started"] = torch.zeros(
            self.task.K, dtype=torch.bool, device=self.task.device
        )
        return state

    def blend(self, weights, anchor):
        """The head Thetahat {name: (*shape)}, also stacked: W ("ala." in weights), Theta ("own." in anchor), w (plain)."""
        return {n: torch.lerp(anchor[f"own.{n}"], anchor[n], weights[f"ala.{n}"]) for n in self.top}

    def scored(self, p, anchor, batch):
        """Of ONE client: the loss; the gradient of the entry `score`, of value 0, is the loss again."""
        value = self.loss(p, anchor, batch)
        return value + p["score"] * value.detach()

    def learn(self, p, anchor, grad, ctx):
        """One step of ONE client on W; `score` records the loss."""
        g = grad(p)
        slope = {n: g[n] * (anchor[n] - anchor[f"own.{n}"]) for n in self.top}
        weights = {f"ala.{n}": (p[f"ala.{n}"] - self.eta * v).clamp(0, 1) for n, v in slope.items()}
        return p | weights | self.blend(weights, anchor) | {"score": g["score"]}, {}

    def adapt(self, c, start):
        """`start` {name: (S, *shape)} with the blended head and the weights learned for it."""
        p, losses, differs = (
            start | self.blend(start, start),
            [],
            torch.zeros_like(start["started"]),
        )
        for n in self.top:
            differs |= (start[n] != start[f"own.{n}"]).flatten(1).any(1)
        learning, first = differs, ~start["started"]
        learned = [n for name in self.top for n in (name, f"ala.{name}")]
        while learning.any():
            scored = p | {
                "score": torch.zeros(len(c.sel), dtype=self.task.dtype, device=self.task.device)
            }
            how = dict(
                only=[*self.top, "score"],
                epochs=1,
                fraction=self.share,
                stream="ala",
                step=self.learn,
            )
            new = c.train(self.scored, scored, anchor=start, **how)
            p = p | {
                n: torch.where(learning.view(-1, *[1] * (p[n].dim() - 1)), new[n], p[n])
                for n in learned
            }
            losses.append(new["score"])
            settled = torch.full_like(first, len(losses) >= self.max_epochs)
            if len(losses) > self.window:
                settled |= torch.stack(losses[-self.window :]).std(0, correction=0) < self.threshold
            learning = learning & first & ~settled
        return p | {"started": start["started"] | differs}

    def local(self, c, start):
        end = c.train(self.loss, self.adapt(c, start))
        return end | prefixed("own.", select(end, self.top))

    def personal(self, state, c):
        return self.serve(self.adapt(c, self.begin(state, c.sel)))
