"""FedFew: a few models serve all clients, and each client takes the one that fits it best.

Guo, Zhang, Lin, Li, Tang, Zhang, "Few-for-Many Personalized Federated Learning", CVPR 2026,
arXiv:2603.11992. Not read: the equations are those of the authors' code and of two notes on the
paper that agree with each other.

    min  mu log sum_i ( sum_k exp(-L_i(theta_k) / mu) )^-1        k = 1 .. M models at the server
    theta_ik <- local SGD from theta_k, for each k                `local`, "m0.*", "m1.*", ...
    L_ik      = mean training loss of theta_ik                    `risk`
    S_i       = sum_k exp(-q_i L_ik / mu)                         q_i = n_i / sum_j n_j of the round
    a_i       = S_i^-1 / sum_j S_j^-1;  u_ik = exp(-q_i L_ik / mu) / S_i          `weights`
    theta_k  <- theta_k + sum_i a_i u_ik (theta_ik - theta_k)     `upload`
    served:     theta_k of the least L_i(theta_k)                 `serve`; ties: the first

sum_ik a_i u_ik = 1: the M models share one step between them. One model is not FedAvg, for clients
of large loss weigh more; it is with equal n_i and a large mu.

Cost: M times FedAvg's training and traffic, and M forward passes an evaluation.

Differs from the paper
1. The server adds weighted differences of models, as the authors' code does; by the notes, it takes
   a step along weighted gradients.
2. With q_i in the exponent the gradient has one more factor q_i, which is left out, as in the notes
   and in that code. mu means something else for another number of participants: q_i is about 1 / S.

Differs from the authors' code
1. There clients are scored after local training, by the best of their M trained models: read that
   at when="after", beside FedAvg-FT. "before" is the paper's choice among the server's models.
2. There all M models start from one copy, and only the order of batches tells them apart
   (start="same"). Here models after the first begin with the first one's entries, tensor by tensor,
   in random order: another draw by the rule that drew them, whatever it is.
3. L_ik is measured in evaluation mode; there it is the mean over the last epoch's batches, each
   before its step. Weights are computed as logarithms, in float64.
4. Each of the M models has BatchNorm statistics of its own; its networks have none.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pfl_core.methods.base import Batch, Context, Method, State
from pfl_core.stacked import Params, averages, clone, expand, prefixed, select, take, unprefixed
from pfl_core.util.fields import among, choice, log_uniform, number


def few_weights(risk: Tensor, n: Tensor, mu: float) -> Tensor:
    """a_i u_ik (S, M) in float64, which sum to 1, of losses L_ik (S, M) and sizes n_i (S,)."""
    n = n.double()
    x = -(n / n.sum())[:, None] * risk.double() / mu
    log_s = torch.logsumexp(x, 1, keepdim=True)
    return torch.softmax(-log_s, 0) * torch.exp(x - log_s)


class FedFew(Method):
    """A few server models, of which each client is served the one that fits (Guo et al., 2026).

    Examples
    --------
    With one model and a large mu, clients of equal size are averaged as in FedAvg:

    >>> few = Experiment(method="fedfew", method_args={"models": 1, "mu": 1e9}, dtype="float64")
    >>> few = few.but(partition="iid", model="mlp", clients=3, rounds=1, max_samples=60)
    >>> avg = few.but(method="fedavg", method_args={})
    >>> np.allclose(*[run(e).arrays["before/test/loss"] for e in (few, avg)])
    True
    """

    name = "fedfew"
    models: int = number(
        3,
        low=1,
        doc="M, models at the server (paper's tables; authors' code: 5)",
        search=among(1, 3, 5),
    )
    mu: float = number(
        0.01,
        above=0,
        doc="smoothing (authors' code), over losses times q_i, about 1 / participants; large "
        "values weigh all alike",
        search=log_uniform(0.001, 1),
    )
    losses: str = choice(
        "after", "before", doc="L_ik of the trained models (authors' code) or of the received ones"
    )
    start: str = choice(
        "own", "same", doc="each model drawn for itself (ours), or M copies of one (authors' code)"
    )

    def init(self) -> State:
        state = super().init()
        kept = select(expand(self.task.initial, self.task.K), self.task.buffers)
        kept = clone(select(kept, lambda n: n not in state.server))
        one, state.server, state.clients = state.server, {}, {}
        for k in range(self.models):
            state.server |= prefixed(f"m{k}.", self.drawn(one, k))
            state.clients |= prefixed(f"m{k}.", clone(kept))
        return state

    def drawn(self, one: Params, k: int) -> Params:
        """Model k before round 0, from the first {name: (*shape)}."""
        new = {n: v.clone() for n, v in one.items()}
        if k == 0 or self.start == "same":
            return new
        for n in self.task.parameters:
            v = one[n]
            with self.task.seeded(f"fedfew/{k}/{tuple(v.shape)}"):  # whatever the name and order
                order = torch.randperm(v.numel())
            new[n] = v.flatten()[order.to(v.device)].view(v.shape)
        return new

    def begin(self, state: State, sel: Tensor, sent: Params | None = None) -> Params:
        p = take(state.clients, sel) | (self.download(state, sel) if sent is None else sent)
        if self.task.config.buffers != "reset":
            return p
        fresh = expand(select(self.task.initial, self.task.buffers), len(sel))
        return p | {n: v for k in range(self.models) for n, v in prefixed(f"m{k}.", fresh).items()}

    def several(self, p: Params) -> list[Params]:
        """The M models in clients' Params p, under plain names."""
        return [unprefixed(f"m{k}.", p) for k in range(self.models)]

    def summed(self, p: Params, batch: Batch) -> dict[str, Tensor]:
        """Of ONE client's model: the sum of its losses, and the number of samples."""
        loss = F.cross_entropy(self.logits(p, batch.x), batch.y, reduction="sum")
        return {"loss": loss, "n": loss.new_full((), len(batch.y))}

    def risk(self, ctx: Context, models: list[Params]) -> Tensor:
        """L_i(theta_k) of each client and model, (S, M): mean losses on training samples."""
        found = [ctx.measure(self.summed, model) for model in models]
        return torch.stack([sums["loss"] / sums["n"] for sums in found], 1)

    def local(self, ctx: Context, start: Params) -> Params:
        received = self.several(start)
        how: list[dict[str, Any]] = [{}]  # model 0 sees the batches that FedAvg's would
        how += [dict(stream=f"local/{k}") for k in range(1, self.models)]
        ends = [ctx.train(self.loss, p, **h) for p, h in zip(received, how, strict=True)]
        risk = self.risk(ctx, ends if self.losses == "after" else received)
        end = {n: v for k, p in enumerate(ends) for n, v in prefixed(f"m{k}.", p).items()}
        return end | {"risk": risk}

    def upload(
        self, state: State, sel: Tensor, start: Params, end: Params, weight: Tensor
    ) -> State:
        share = few_weights(end["risk"], weight, self.mu)
        for n, v in state.server.items():
            new = end[n]
            if not averages(v):
                state.server[n] = new.amax(0)
                continue
            w = share[:, int(n[1 : n.index(".")])].to(v.dtype)
            # An infinite entry, of a mask among the buffers, has no difference.
            moves = torch.where(new == v, torch.zeros_like(new), new - v)
            state.server[n] = v + torch.tensordot(w, moves, dims=1)
        return state

    def serve(self, p: Params) -> Params:
        models = self.several(p)
        if "risk" not in p:  # of clients that have not looked yet
            return models[0]
        best, rows = p["risk"].argmin(1), torch.arange(len(p["risk"]), device=p["risk"].device)
        return {n: torch.stack([m[n] for m in models], 1)[rows, best] for n in models[0]}

    def personal(self, state: State, ctx: Context) -> Params:
        p = self.begin(state, ctx.sel)
        return self.serve(p | {"risk": self.risk(ctx, self.several(p))})
