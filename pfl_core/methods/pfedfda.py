"""pFedFDA: a classifier made of the features' distribution, blended of all clients' and the own.

McLaughlin, Su, "Personalized Federated Learning via Feature Distribution Adaptation", NeurIPS 2024,
arXiv:2411.00329. Read from the authors' code and notes, not from the paper.

    LDA(m, V, pi): V' = (1 - e) V + e tr(V) / F I;  W = m V'^-1;                  `discriminant`
                   b_c = log pi_c - <m_c, W_c> / 2;  e = 1e-4
    pi_i  = (n_ic / n_i + e), normalised                          "prior"; never leaves the client
    base <- E epochs of CE under the head LDA(m_g, V_g, pi_i), which stays as it is      `local`
    m_i, V_i: class means of the trained base's features, and scatter / (n_i - 1) + ridge I
    beta  = argmin over [0, 1]^2 of the cross-entropy, each half of the samples under the other's
            LDA(beta_1 m_i + (1 - beta_1) m_g, beta_2 V_i + (1 - beta_2) V_g, pi_i)
    m~_i, V~_i: the blends at beta                                "mean", "cov" of what is uploaded
    base, m_g, V_g <- n_i-weighted means                          the default `upload`
    served: the base under LDA(m~_i, V~_i, pi_i); before local training of the received base

A class of at most two samples at a client has m_g's row as its mean. m_g is drawn from U(0, 1), V_g
is I at first. F is the width of the features; the head is the last linear layer, whatever
head_depth says, and its drawn weights are never used.

Cost: two passes over the features, and 22 systems of F equations a client, in each evaluation, too;
F^2 numbers are sent both ways.

Differs from the paper: not known, it was not read.

Differs from the authors' code
1. Features are those of the trained base in evaluation mode (as in that code's own evaluation); in
   training it collects them from all batches of all epochs, before each step. features="epochs"
   comes close: it takes them at the beginning of each epoch. Both halves then have every image,
   from half of the epochs each. Momentum starts anew in each epoch.
2. beta is the best on a grid of 11 (by 11) values; there L-BFGS takes ten steps from 0.5. Halves
   alternate within each class. Of equal losses the smallest beta is taken.
3. There 1e-4 is added to every entry of V_i, not to its diagonal alone; here to none (see ridge).
4. A class counts as rare by its own number of samples; there by that of all of the client's.
5. With fewer than two samples in a half, beta is 0, so that the client has the global estimates.
6. There features end in a leaky ReLU; a network's activations are the experiment's.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from pfl_core.methods.base import Batch, Context, Method, State
from pfl_core.methods.terms import class_sums
from pfl_core.stacked import Params, select, total
from pfl_core.util.fields import among, choice, log_uniform, number

EPS = 1e-4
RARE = 2  # samples of a class that are too few for a mean of its own
SAME = 1e-9  # of a loss, by which equal ones may differ by rounding


def solved(mean: Tensor, cov: Tensor, eps: float = EPS) -> Tensor:
    """Weights W = m V'^-1 (..., C, F) of means (..., C, F) and covariances (..., F, F)."""
    f = cov.shape[-1]
    trace = cov.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    eye = torch.eye(f, dtype=cov.dtype, device=cov.device)
    return torch.linalg.solve((1 - eps) * cov + eps * trace / f * eye, mean.mT).mT


def discriminant(mean: Tensor, cov: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (..., C, F) and biases (..., C) of LDA; prior (..., C) are class shares > 0."""
    w = solved(mean, cov)
    return w, prior.log() - (mean * w).sum(-1) / 2


def estimated(sums: dict[str, Tensor], known: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Means (..., C, F) and covariances (..., F, F) from `PFedFDA.sums`.

    Rare classes have their row of `known` (..., C, F), in the covariance as well.
    """
    z, n = sums["z"], sums["n"][..., None]
    m = torch.where(n > RARE, z / n.clamp_min(1), known)
    cross = z.mT @ m
    scatter = sums["square"] - cross - cross.mT + (m * n).mT @ m
    eye = torch.eye(m.shape[-1], dtype=m.dtype, device=m.device)
    return m, scatter / (n.sum(-2, keepdim=True) - 1).clamp_min(1) + ridge * eye


def least(losses: Tensor) -> Tensor:
    """Place (S,) of the first of each row's smallest losses (S, n), equal but for rounding.

    Where both halves have rare classes alone, no beta_1 changes a loss: it is 0.
    """
    near = losses <= losses.amin(1, keepdim=True) * (1 + SAME)
    return near.to(torch.uint8).argmax(1)


def blended(beta: Tensor, own: Tensor, others: Tensor) -> Tensor:
    """beta own + (1 - beta) others, with beta (S,) for tensors (S, a, b)."""
    return others + beta[:, None, None] * (own - others)


class PFedFDA(Method):
    """Generative classifier over a shared base, adapted to the client (McLaughlin and Su, 2024).

    Examples
    --------
    Classifiers of the clients' own estimates alone, or blended with those of all:

    >>> fda = Experiment(method="pfedfda", model="mlp", clients=3, rounds=1, max_samples=60)
    >>> own = run(fda.but(method_args={"beta": "local"}))
    >>> both = [r.arrays["before/test/loss"] for r in (run(fda), own)]
    >>> np.allclose(*both)
    False
    """

    name = "pfedfda"
    beta: str = choice(
        "two",
        "one",
        "local",
        doc="blends of means and covariance have a beta each (paper), one for both, or the own "
        "estimates are taken as they are",
        search=among("two", "one", "local"),
    )
    ridge: float = number(
        1.0,
        above=0,
        doc="added to a covariance's diagonal (authors' code); large: nearest mean",
        search=log_uniform(0.1, 10),
    )
    features: str = choice(
        "after",
        "epochs",
        doc="in training the estimates are of the trained base's features, or of those of all "
        "epochs (close to the authors' code)",
    )
    grid: int = number(11, low=2, doc="values of beta that are tried, from 0 to 1 (ours)")

    def check(self) -> None:
        if self.features == "epochs" and self.task.config.steps:
            raise ValueError(
                f"features = 'epochs' with steps = {self.task.config.steps}; count local training "
                "in epochs, or take features = 'after'"
            )
        frozen = [n for n in self.task.last_linear if n not in self.task.parameters]
        if frozen:
            raise ValueError(
                f"{', '.join(frozen)} is frozen, and the last layer is computed from the features "
                "here; train it, or take another method, such as fedper"
            )

    @property
    def head(self) -> tuple[str, str]:
        """Names of the classifier's weights and biases, which a network may not have."""
        weight, *bias = self.task.last_linear
        return weight, bias[0] if bias else "lda.bias"

    def is_shared(self, name: str) -> bool:
        return name not in self.task.last_linear

    def init(self) -> State:
        state, t = super().init(), self.task
        state.clients = select(state.clients, lambda n: n not in t.last_linear)
        like = t.value(t.initial, t.last_linear[0])
        with t.seeded("pfedfda"):
            mean = torch.rand(like.shape).to(like)
        state.server |= {"mean": mean, "cov": torch.eye(like.shape[1]).to(like)}
        return state

    def shares(self, sel: Tensor) -> Tensor:
        """pi_i (S, C) of clients sel."""
        n = self.task.label_counts[sel.to(self.task.label_counts.device)]
        pi = n.to(sel.device, self.task.dtype)
        pi = pi / pi.sum(1, keepdim=True).clamp_min(1) + EPS
        return pi / pi.sum(1, keepdim=True)

    def begin(self, state: State, sel: Tensor, sent: Params | None = None) -> Params:
        return super().begin(state, sel, sent) | {"prior": self.shares(sel)}

    def logits(self, p: Params, x: Tensor) -> Tensor:
        weight, bias = (p[n] for n in self.head)
        return F.linear(self.task.features(p, x), weight, bias)

    def serve(self, p: Params) -> Params:
        made = discriminant(p["mean"].double(), p["cov"].double(), p["prior"].double())
        head = {n: v.to(self.task.dtype) for n, v in zip(self.head, made, strict=True)}
        return select(p, self.task.names) | head

    def local(self, ctx: Context, start: Params) -> Params:
        base = [n for n in self.task.parameters if n not in self.task.last_linear]
        end = self.serve(start)
        if self.features == "after":
            end = ctx.train(self.loss, end, only=base)
            return self.adapted(ctx, start | select(end, start))
        seen = []
        for e in range(self.task.config.epochs):
            seen.append(end)
            end = ctx.train(self.loss, end, only=base, epochs=1, stream=f"local {e}")
        return self.adapted(ctx, start | select(end, start), seen)

    def personal(self, state: State, ctx: Context) -> Params:
        return self.serve(self.adapted(ctx, self.begin(state, ctx.sel)))

    # -- estimates of a client ---------------------------------------------------------------------
    def sums(self, p: Params, batch: Batch) -> dict[str, Tensor]:
        """Of ONE client's features z (B, F): `class_sums`, and the sum of z z^T (F, F)."""
        z = self.task.features(p, batch.x).double()
        return class_sums(z, batch.y, self.task.C) | {"square": z.T @ z}

    def crossed(self, p: Params, batch: Batch) -> Tensor:
        """Of ONE client: summed losses (G, G) under `classifiers`, by beta_1 and beta_2."""
        z = self.task.features(p, batch.x).double()
        ratio = torch.linspace(0, 1, self.grid, dtype=z.dtype, device=z.device)[:, None, None, None]
        own, others = torch.einsum("bf,gkcf->kgbc", z, p["grid.w"])
        scores = others + ratio * (own - others) + p["grid.b"][:, :, None]
        log = scores.log_softmax(-1)  # (G, G, B, C)
        picked = log.gather(-1, batch.y.expand(*log.shape[:2], -1)[..., None])
        return -picked.sum((2, 3))

    def classifiers(self, sums: dict[str, Tensor], p: Params) -> Params:
        """LDA of blends of a half's estimates and the global ones, at all betas of the grid.

        "grid.w" (S, G, 2, C, F) are weights by beta_2, for own and global means; "grid.b" (S, G, G,
        C) biases by beta_1 and beta_2.
        """
        known, shared, pi = (p[n].double() for n in ("mean", "cov", "prior"))
        m, v = estimated(sums, known, self.ridge)
        ratio = torch.linspace(0, 1, self.grid, dtype=m.dtype, device=m.device)
        both = torch.stack([m, known], 1)  # (S, 2, C, F)
        w = [solved(both.flatten(1, 2), shared + r * (v - shared)) for r in ratio]
        w = torch.stack(w, 1).unflatten(2, both.shape[1:3])
        r = ratio[:, None, None]
        means = known[:, None] + r * (m - known)[:, None]  # (S, G, C, F) by beta_1
        own, others = (torch.einsum("sacf,sbcf->sabc", means, w[:, :, k]) for k in range(2))
        square = others + r * (own - others)
        return {"grid.w": w, "grid.b": pi.log()[:, None, None] - square / 2}

    def halves(self, ctx: Context, models: list[Params]) -> list[dict[str, Tensor]]:
        """`sums` of both halves over all models; from model to model an image changes its half."""
        folds = [
            [ctx.measure(self.sums, m, fold=((h + e) % 2, 2)) for e, m in enumerate(models)]
            for h in range(2)
        ]
        return [{n: total(part[n] for part in parts) for n in parts[0]} for parts in folds]

    def betas(
        self, ctx: Context, p: Params, models: list[Params], halves: list[dict[str, Tensor]]
    ) -> list[Tensor]:
        """beta_1 and beta_2 (S,) of clients' Params p, by the features of `models` in `halves`."""
        n = torch.stack([sums["n"].sum(1) for sums in halves], 1)
        if self.beta == "local":
            return [torch.ones_like(n[:, 0])] * 2
        others = [self.classifiers(sums, p) for sums in reversed(halves)]
        losses = total(
            ctx.measure(self.crossed, m | others[(h + e) % 2], fold=(h, 2))
            for h in range(2)
            for e, m in enumerate(models)
        )
        if self.beta == "one":
            best = least(losses.diagonal(dim1=1, dim2=2))
            best = best * (self.grid + 1)
        else:
            best = least(losses.flatten(1))
        enough = (n >= 2).all(1)
        places = (best // self.grid, best % self.grid)
        return [place.to(losses) / (self.grid - 1) * enough for place in places]

    def adapted(self, ctx: Context, p: Params, models: list[Params] | None = None) -> Params:
        """Clients' Params with "mean" and "cov" blended of their own and the received ones.

        The own ones are of the features of `models`, by default of the models in p.
        """
        models = models or [p | self.serve(p)]
        halves = self.halves(ctx, models)
        mean, cov = p["mean"].double(), p["cov"].double()
        m, v = estimated({n: s + halves[1][n] for n, s in halves[0].items()}, mean, self.ridge)
        first, second = self.betas(ctx, p, models, halves)
        blends = {"mean": blended(first, m, mean), "cov": blended(second, v, cov)}
        return p | {n: b.to(self.task.dtype) for n, b in blends.items()}
