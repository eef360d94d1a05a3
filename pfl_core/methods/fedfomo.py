"""FedFomo: each client moves towards those models of others that lower the loss on samples it held out.

Zhang et al., "Personalized Federated Learning with First Order Model Optimization", ICLR 2021, arXiv:2012.08565.

    omega_n = (L_i(b_i) - L_i(U_n)) / ||U_n - b_i||        L_i: held-out loss; b_i: `base.*`; U_n: the own model and `near.*`
    W_i     <- sum_n omega+_n U_n / sum_n omega+_n         omega+ = max(omega, 0)
    P[i, n] <- P[i, n] + omega_n                           whom client i asks: the M others of largest P, at times M at random
    b_i <- W_i;  W_i <- local SGD from W_i;  U_i <- W_i    b_i: what the last local training began with

No sample weights, no global model.

Cost: a client weighs M models, so S M D operations a round (S participants, D parameters); the server's P is K x K numbers.

Differs from the paper
1. If no candidate helps, a client goes on from its own trained model; fallback="start" is the paper's rule, b_i.
2. Distances are of trainable parameters; a model is judged with its own BatchNorm statistics, mixed only by buffers="average".
Differs from the authors' code
1. The norm is L2 (as in the paper), not L1, and 1e-5 is added to it.
2. An exploring client draws all its M candidates at random (the code: each one on its own).
3. Raw omega enters P, as in the paper; affinity="shares" divides it by |sum_n omega_n| first, as the code does, so that early rounds,
   whose losses fall fastest, do not outweigh all later ones.
4. Candidates are all that ever took part; there, those of the last round. The same at participation 1.
5. M is 5; there 8, and weight decay 1e-4, which is the experiment's to set.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from pfl_core.methods.base import Method
from pfl_core.stacked import own, prefixed, put, scalars, select, unprefixed
from pfl_core.util.draws import rng


@dataclass(frozen=True, eq=False)
class FedFomo(Method):
    """Own convex combination of a few others' models, weighed by held-out loss (Zhang et al., 2021)."""

    name = "fedfomo"
    neighbours: int = (
        5  # M, models of others that a client downloads (PFLlib, FL-bench); 0 is Local
    )
    explore: float = 0.3  # chance of M at random instead of the best, less 0.05 a round (authors' code); 0 is greedy
    fallback: str = "trained"  # if nobody helps: the own "trained" model (PFLlib), or b_i, the "start" of its training
    affinity: str = "raw"  # what is added to P: omega as it is ("raw", the paper), or its "shares" (authors' code)

    def check(self):
        if not self.task.config.holdout > 0:
            raise ValueError(
                f"fedfomo compares models on held-out samples: holdout={self.task.config.holdout}; set it to 0.2"
            )
        named = {"fallback": ("trained", "start"), "affinity": ("raw", "shares")}
        if self.neighbours < 0 or any(
            getattr(self, n) not in allowed for n, allowed in named.items()
        ):
            got = f"neighbours={self.neighbours}, fallback={self.fallback!r}, affinity={self.affinity!r}"
            raise ValueError(
                f"fedfomo: got {got}; allowed are neighbours >= 0, fallback 'trained' or 'start', affinity 'raw' or 'shares'"
            )

    def is_shared(self, name):
        return False

    def init(self):
        state, k, device = super().init(), self.task.K, self.task.device
        affinity = torch.eye(k, dtype=self.task.dtype, device=device)
        known = torch.zeros(k, dtype=torch.bool, device=device)
        state.extra = {"models": own(state.clients), "affinity": affinity, "known": known}
        state.clients |= prefixed("base.", own(state.clients))
        return state

    def candidates(self, state, sel):
        """Ids (S, M) of the models that clients sel (S,) ask for, and which of them the server has, (S, M) bool."""
        known = state.extra["known"].repeat(len(sel), 1).scatter_(1, sel[:, None], False)
        draw = np.stack(
            [
                rng(self.task.config.seed, "fedfomo", state.round, k).random(self.task.K + 1)
                for k in sel.tolist()
            ]
        )
        explores, *draw = torch.as_tensor(draw, device=sel.device).split([1, self.task.K], 1)
        greedy = explores >= self.explore - 0.05 * state.round
        score = torch.where(known, state.extra["affinity"][sel] * greedy, -torch.inf)
        order = draw[0].argsort(
            1
        )  # ties, and all scores of an exploring client, are in random order
        order = order.gather(1, score.gather(1, order).argsort(dim=1, descending=True, stable=True))
        ids = order[:, : min(self.neighbours, int(known.sum(1).max()))]
        return ids, known.gather(1, ids)

    def download(self, state, sel):
        ids, known = self.candidates(state, sel)
        near = {n: v[ids] for n, v in state.extra["models"].items()}
        return prefixed("near.", near) | {"near.id": ids, "near.known": known}

    def losses(self, p, batch):
        """Summed losses (M + 2,) of ONE client's candidates p {name: (M + 2, *shape)}, and the number of samples."""
        scores = [
            self.task.apply({n: v[m] for n, v in p.items()}, batch.x)
            for m in range(len(p[self.task.names[0]]))
        ]
        loss = torch.stack([F.cross_entropy(s, batch.y, reduction="sum") for s in scores])
        return {"loss": loss, "n": loss.new_tensor(len(batch.y))}

    def local(self, c, start):
        t, ids = self.task, start["near.id"]
        mine = select(start, t.names)
        kept = [n for n in mine if "base." + n in start]  # all but statistics that are reset
        # Candidates (S, M + 2, *shape): b_i, the own model, M others.
        three = {
            n: torch.cat([start["base." + n][:, None], mine[n][:, None], start["near." + n]], 1)
            for n in kept
        }
        reset = {
            n: v[:, None].expand(-1, ids.shape[1] + 2, *v.shape[1:])
            for n, v in mine.items()
            if n not in kept
        }
        got = c.measure(self.losses, three | reset, "holdout")
        loss = got["loss"] / got["n"].clamp_min(1)[:, None]
        distance = sum(
            (three[n] - three[n][:, :1]).square().flatten(2).sum(2) for n in t.parameters
        ).sqrt()
        omega = torch.where(distance > 0, (loss[:, :1] - loss) / (distance + 1e-5), 0)
        omega[:, 2:] *= start["near.known"]
        w = omega.clamp_min(0)
        w[:, int(self.fallback == "trained")] += w.sum(1) == 0
        w = w / w.sum(1, keepdim=True)
        mixed = [
            n
            for n in kept
            if n in t.parameters or t.config.buffers == "average" and three[n].is_floating_point()
        ]
        model = mine | {n: torch.einsum("sm,sm...->s...", w, three[n]) for n in mixed}
        end = c.train(self.loss, model)
        if self.affinity == "shares":
            omega = omega / omega[:, 1:].sum(1, keepdim=True).abs().clamp_min(1e-9)
        told = omega.new_zeros(len(ids), t.K).scatter_(
            1, torch.cat([c.sel[:, None], ids], 1), omega[:, 1:]
        )
        base, sent = prefixed("base.", select(model, kept)), prefixed("sent.", select(end, kept))
        return end | base | sent | {"omega": told}

    def upload(self, state, sel, start, end, weight):
        put(state.extra["models"], sel, unprefixed("sent.", end))
        state.extra["affinity"][sel] += end["omega"]
        state.extra["known"][sel] = True
        return state

    def serve(self, p):
        return select(p, self.task.names)

    def personal(self, state, c):
        return self.serve(self.begin(state, c.sel, {}))

    def traffic(self, state, sel, down, up):
        one = scalars(
            select(state.extra["models"], lambda n: state.extra["models"][n].is_floating_point())
        )
        return int(down["near.known"].sum()) * one, super().traffic(state, sel, down, up)[1]
