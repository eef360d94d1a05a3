"""FedFomo: each client moves towards those models of others that lower its loss on held-out data.

Zhang et al., "Personalized Federated Learning with First Order Model Optimization", ICLR 2021,
arXiv:2012.08565.

    omega_n = (L_i(b_i) - L_i(U_n)) / ||U_n - b_i||     L_i: held-out loss; b_i: "base.*"; U_n: the
                                                        own model and "near.*"
    W_i     <- sum_n omega+_n U_n / sum_n omega+_n      omega+ = max(omega, 0)
    P[i, n] <- P[i, n] + omega_n                        whom client i asks: the M others of largest
                                                        P, at times M at random
    b_i <- W_i;  W_i <- local SGD from W_i;  U_i <- W_i     b_i: what the last training began with

No sample weights, no global model.

Cost: a client weighs M models, so S M D operations a round (S participants, D parameters); the
server's P is K x K numbers.

Differs from the paper
1. If no candidate helps, a client goes on from its own trained model; fallback="start" is the
   paper's rule, b_i.
2. Distances are of trainable parameters; a model is judged with its own BatchNorm statistics, mixed
   only by buffers="average".
Differs from the authors' code
1. The norm is L2 (as in the paper), not L1, and 1e-5 is added to it.
2. An exploring client draws all its M candidates at random (the code: each one on its own).
3. Raw omega enters P, as in the paper; affinity="shares" divides it by |sum_n omega_n| first, as
   the code does, so that early rounds, whose losses fall fastest, do not outweigh all later ones.
4. Candidates are all that ever took part; there, those of the last round. The same at
   participation 1.
5. M is 5; there 8, and weight decay 1e-4, which is the experiment's to set.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pfl_core.methods.base import Batch, Context, Method, State
from pfl_core.stacked import Params, clone, prefixed, put, scalars, select, total, unprefixed
from pfl_core.util.draws import rng
from pfl_core.util.fields import among, choice, number


class FedFomo(Method):
    """Own convex combination of a few others' models, by held-out loss (Zhang et al., 2021).

    Examples
    --------
    Clients compare models on samples that they hold out, and download at most `neighbours` of them:

    >>> fomo = Experiment(method="fedfomo", model="mlp", clients=3, max_samples=60)
    >>> fomo = fomo.but(method_args={"neighbours": 1})
    >>> result = run(fomo.but(holdout=0.2, rounds=2))
    >>> moved = result.history.query("average == 'total' and rounds == 2").set_index("metric").value
    >>> round(float(moved.download_bytes / moved.upload_bytes), 2)  # 0 in round 0, then 1
    0.5
    """

    name = "fedfomo"
    neighbours: int = number(
        5,
        low=0,
        doc="M, models of others that a client downloads (PFLlib, FL-bench); 0 is Local",
        search=among(0, 2, 5, 10),
    )
    explore: float = number(
        0.3,
        doc="chance of M at random instead of the best, less 0.05 a round (authors' code); 0 is "
        "greedy",
    )
    fallback: str = choice(
        "trained",
        "start",
        doc="if nobody helps: the own trained model (PFLlib), or b_i, the start of its training",
    )
    affinity: str = choice(
        "raw", "shares", doc="added to P: omega (raw, the paper), or its shares (authors' code)"
    )

    def check(self) -> None:
        if not self.task.config.holdout > 0:
            raise ValueError(
                "models are compared on held-out samples, of which there are none: "
                f"holdout={self.task.config.holdout}; set it to 0.2"
            )

    def pairs(self, s: int) -> tuple[int, int]:
        return 0, self.task.K**2

    def is_shared(self, name: str) -> bool:
        return False

    def init(self) -> State:
        state, k, device = super().init(), self.task.K, self.task.device
        affinity = torch.eye(k, dtype=self.task.dtype, device=device)
        known = torch.zeros(k, dtype=torch.bool, device=device)
        state.extra = {"models": clone(state.clients), "affinity": affinity, "known": known}
        state.clients |= prefixed("base.", clone(state.clients))
        return state

    def candidates(self, state: State, sel: Tensor) -> tuple[Tensor, Tensor]:
        """Whom clients sel (S,) ask: ids (S, M), and whether the server has them, (S, M) bool."""
        known = state.extra["known"].repeat(len(sel), 1).scatter_(1, sel[:, None], False)
        explores, draw = self._draws(state.round, sel)
        greedy = explores >= self.explore - 0.05 * state.round
        score = torch.where(known, state.extra["affinity"][sel] * greedy, -torch.inf)
        # Ties, and all scores of an exploring client, are in random order.
        order = draw.argsort(1)
        order = order.gather(1, score.gather(1, order).argsort(dim=1, descending=True, stable=True))
        ids = order[:, : min(self.neighbours, int(known.sum(1).max()))]
        return ids, known.gather(1, ids)

    def _draws(self, round: int, sel: Tensor) -> tuple[Tensor, ...]:
        # Uniform numbers of each client's own: (S, 1), whether it explores, and (S, K).
        generators = [rng(self.task.config.seed, "fedfomo", round, k) for k in sel.tolist()]
        drawn = np.stack([g.random(self.task.K + 1) for g in generators])
        return torch.as_tensor(drawn, device=sel.device).split([1, self.task.K], 1)

    def download(self, state: State, sel: Tensor) -> Params:
        ids, known = self.candidates(state, sel)
        near = {n: v[ids] for n, v in state.extra["models"].items()}
        return prefixed("near.", near) | {"near.id": ids, "near.known": known}

    def losses(self, p: Params, batch: Batch) -> dict[str, Tensor]:
        """Of ONE client: summed losses (M + 2,) of its candidates, and the number of samples.

        p is {name: (M + 2, *shape)}.
        """
        count = len(p[self.task.names[0]])
        models = [{n: v[m] for n, v in p.items()} for m in range(count)]
        scores = [self.task.apply(model, batch.x) for model in models]
        loss = torch.stack([F.cross_entropy(s, batch.y, reduction="sum") for s in scores])
        return {"loss": loss, "n": loss.new_full((), len(batch.y))}

    def local(self, ctx: Context, start: Params) -> Params:
        mine = select(start, self.task.names)
        kept = [n for n in mine if "base." + n in start]  # all but statistics that are reset
        # Candidates (S, M + 2, *shape): b_i, the own model, M others.
        candidates = {
            n: torch.cat([start["base." + n][:, None], mine[n][:, None], start["near." + n]], 1)
            for n in kept
        }
        omega = self.omega(ctx, candidates, mine, start["near.known"])
        model = mine | self.mixed(candidates, omega)
        end = ctx.train(self.loss, model)
        base, sent = prefixed("base.", select(model, kept)), prefixed("sent.", select(end, kept))
        return end | base | sent | {"omega": self.told(ctx, omega, start["near.id"])}

    def omega(self, ctx: Context, candidates: Params, mine: Params, known: Tensor) -> Tensor:
        """What each candidate lowers the held-out loss by, over its distance to b_i: (S, M + 2)."""
        several = candidates[self.task.parameters[0]].shape[1]
        reset = {
            n: v[:, None].expand(-1, several, *v.shape[1:])
            for n, v in mine.items()
            if n not in candidates
        }
        got = ctx.measure(self.losses, candidates | reset, "holdout")
        loss = got["loss"] / got["n"].clamp_min(1)[:, None]
        apart = [candidates[n] - candidates[n][:, :1] for n in self.task.parameters]
        distance = total(v.square()[..., None].flatten(2).sum(2) for v in apart).sqrt()
        omega = torch.where(distance > 0, (loss[:, :1] - loss) / (distance + 1e-5), 0)
        omega[:, 2:] *= known
        return omega

    def mixed(self, candidates: Params, omega: Tensor) -> Params:
        """The mix W_i of candidates: {name: (S, *shape)} of parameters, and of averaged buffers."""
        w = omega.clamp_min(0)
        w[:, int(self.fallback == "trained")] += w.sum(1) == 0
        w = w / w.sum(1, keepdim=True)
        averages = self.task.config.buffers == "average"
        return {
            n: torch.einsum("sm,sm...->s...", w, v)
            for n, v in candidates.items()
            if n in self.task.parameters or averages and v.is_floating_point()
        }

    def told(self, ctx: Context, omega: Tensor, ids: Tensor) -> Tensor:
        """omega by clients, (S, K): what the server adds to P; `ids` (S, M) are the candidates'."""
        if self.affinity == "shares":
            omega = omega / omega[:, 1:].sum(1, keepdim=True).abs().clamp_min(1e-9)
        whose = torch.cat([ctx.sel[:, None], ids], 1)
        return omega.new_zeros(len(ids), self.task.K).scatter_(1, whose, omega[:, 1:])

    def upload(
        self, state: State, sel: Tensor, start: Params, end: Params, weight: Tensor
    ) -> State:
        put(state.extra["models"], sel, unprefixed("sent.", end))
        state.extra["affinity"][sel] += end["omega"]
        state.extra["known"][sel] = True
        return state

    def serve(self, p: Params) -> Params:
        return select(p, self.task.names)

    def personal(self, state: State, ctx: Context) -> Params:
        return self.serve(self.begin(state, ctx.sel, {}))

    def traffic(self, state: State, sel: Tensor, down: Params, up: Params) -> tuple[int, int]:
        models = state.extra["models"]
        one = scalars(select(models, lambda n: models[n].is_floating_point()))
        return int(down["near.known"].sum()) * one, super().traffic(state, sel, down, up)[1]
