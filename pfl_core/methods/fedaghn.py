"""FedAGHN: for every client and layer a graph over all clients, weighted by how alike they moved.

Song, Shen, Hou, Wang, Wang, Tang, Lv, "FedAGHN: Personalized Federated Learning with Attentive
Graph HyperNetworks", arXiv:2501.16379, Eq. 4-6 and App. Eq. 1; the authors' code.

    s_ij^l = cos(Delta_i^l, Delta_j^l)               extra["s"] (K, L, K); Delta: the last updates,
                                                     which begin as ones
    a_ij^l = softmax over j != i of q_i^l s_ij^l     `attention`                                 (4)
    a_ii^l = p_i^l
    w_ij^l = a_ij^l / (1 + p_i^l)                    `attention`, `weights`                      (5)
    thetabar_i^l = sum_j w_ij^l theta_j^l            `download`                                  (6)
    theta_i <- local SGD from thetabar_i             `local` (the default)
    Delta_i = theta_i - thetabar_i
    p <- max(0, p - h <d thetabar / d p, Delta>)     `upload`; q likewise; autograd of
                                                     sum_j w_ij <theta_j, Delta_i>          (App. 1)

A layer is a convolution, BatchNorm or linear module, weight and bias together. Served is thetabar
before training, theta after it.

Cost: mixing and similarities take S K D operations each (S participants, K clients): quadratic
where all take part.

Differs from the paper (whose formulas are missing in the text we had: equations are those of the
authors' code)
1. The step on p and q in the authors' code raises the loss (the text says gradient descent; its
   formula is missing). hn_sign="literal" does as the code and is the default: a small simulation
   of ours shows the published fall of the self weight with this sign only (inferred). "descent" is
   the corrected sign.
2. The paper begins with random updates; code and we with ones, so that round 0 weighs all others
   alike.
3. The ablations are named there, not defined; the definitions in `ABLATIONS` are ours.
Differs from the authors' code
1. That code trains once more after the last round; rounds are the experiment's.
2. A zero update has cosine 0 with all others (there NaN). Who was never sampled keeps an update of
   ones.
3. Its switch for a separate p0 of the classifier, off in the published example, is left out.
BatchNorm statistics are in no graph; they follow the experiment's buffer policy ("local" in code).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pfl_core.methods.base import Method, State
from pfl_core.stacked import Params, clone, cosine, gram, mix, put, select
from pfl_core.util.fields import choice, log_uniform, number

ABLATIONS = {  # App. Table 1: which of p, q are trained
    "": "pq",
    "no_pq": "",  # softmax of s over all clients, s_ii = 1
    "frozen": "",  # p0, q0 kept
    "no_p": "q",  # the client is an ordinary node of the softmax, s_ii = 1
    "no_q": "p",  # q = 1
    "shared": "pq",  # one p, q a client: gradients summed over layers; s stays layer-wise
}


class FedAGHN(Method):
    """Layer-wise attention over all models by the likeness of updates (Song et al., 2025).

    Examples
    --------
    What each client (row) takes of each other (column), layer by layer:

    >>> aghn = Experiment(method="fedaghn", model="mlp", clients=3, rounds=1, max_samples=60)
    >>> rounds, weights = run(aghn.but(record=["weights"])).probe("weights")
    >>> weights["fc"][0, 0].astype(float).round(3).tolist()  # round 0: p0 = 0.03, others alike
    [0.029, 0.485, 0.485]
    """

    name = "fedaghn"
    p0: float = number(
        0.03,
        low=0,
        doc="strength of the own model (authors' example, Table 4); 0 leaves it out of its mean",
        search=log_uniform(0.003, 0.3, also=(0.0,)),
    )
    q0: float = number(
        0.5,
        doc="sharpness (authors' example; the case study is fitted by 3 [inferred]); 0 weighs all "
        "others alike",
        search=log_uniform(0.05, 5, also=(0.0,)),
    )
    h: float = number(0.005, low=0, doc="rate of p and q (authors' code); 0 keeps them")
    hn_sign: str = choice("literal", "descent", doc="sign of the step on p and q: see above")
    ablation: str = choice(*ABLATIONS, doc="what is left out: see `ABLATIONS`")
    by: str = choice(
        "module",
        "model",
        doc="a graph for each module, or one for the whole model (pFedLA's Figure 1)",
    )

    @property
    def layers(self) -> dict[str, list[str]]:
        """{layer: names of its parameters} in forward order; with by="model" the layer "model"."""
        return self.task.layers if self.by == "module" else {"model": list(self.task.parameters)}

    def pairs(self, s: int) -> tuple[int, int]:
        return self.task.K**2, 2 * len(self.layers) * self.task.K**2  # s, and what replaces it

    def attention(self, p: Tensor, q: Tensor, s: Tensor, sel: Tensor) -> Tensor:
        """Weights (S, L, K) of clients sel (S,) from p, q (S, L) and s (S, L, K).

        Rows over the last axis sum to 1.
        """
        logits = q[..., None] * s
        if self.ablation in ("no_p", "no_pq"):
            return logits.softmax(2)
        me = F.one_hot(sel, s.shape[2])[:, None]
        # The smallest number instead of -inf: a single client has weight 1 on itself, without NaN.
        others = logits.masked_fill(me.bool(), torch.finfo(s.dtype).min).softmax(2)
        return (others + p[..., None] * me) / (1 + p[..., None])

    def _rows(self, state: State, sel: Tensor) -> Tensor:
        p, q, s = (state.extra[n][sel] for n in "pqs")
        return self.attention(p, q, s, sel)

    def weights(self, state: State) -> dict[str, Tensor]:
        """{layer: (K, K)}, the weights that mix next: row = receiving client, column = source."""
        everyone = torch.arange(len(state.extra["p"]), device=self.task.device)
        return dict(zip(self.layers, self._rows(state, everyone).unbind(1), strict=True))

    def init(self) -> State:
        state, t = super().init(), self.task
        state.server = select(state.server, t.buffers)
        theta = clone(select(t.start(), t.parameters))
        ones = torch.ones(t.K, len(self.layers), device=t.device, dtype=t.dtype)
        q0 = self.q0 if self.ablation not in ("no_q", "no_pq") else 1.0
        state.extra = {"theta": theta, "delta": {n: torch.ones_like(v) for n, v in theta.items()}}
        state.extra |= {"p": self.p0 * ones, "q": q0 * ones, "s": ones[..., None].repeat(1, 1, t.K)}
        return state

    def download(self, state: State, sel: Tensor) -> Params:
        sent = super().download(state, sel)  # averaged buffers, if any
        for w, names in zip(self._rows(state, sel).unbind(1), self.layers.values(), strict=True):
            sent |= mix(w, select(state.extra["theta"], names))
        return sent

    def upload(
        self, state: State, sel: Tensor, start: Params, end: Params, weight: Tensor
    ) -> State:
        state = super().upload(state, sel, start, end, weight)
        x, layers = state.extra, self.layers.values()
        delta = {n: end[n] - start[n] for n in x["theta"]}
        self.learn(x, sel, delta)
        put(x["theta"], sel, select(end, x["theta"]))
        put(x["delta"], sel, delta)
        similar = [cosine(select(x["delta"], names)).fill_diagonal_(1) for names in layers]
        x["s"] = torch.stack(similar, 1).to(x["s"])
        return state

    def learn(self, x: dict, sel: Tensor, delta: dict[str, Tensor]) -> None:
        """The step on p and q of clients sel (S,), in place in x = `extra`, from their updates."""
        # Rows of w sum to 1, so that all theta_j may be taken relative to one of them: exact zeros
        # where they are equal.
        theta = {n: v - v[:1] for n, v in x["theta"].items()}
        layers, s = self.layers.values(), x["s"][sel]
        pull = [gram(select(delta, names), select(theta, names)) for names in layers]
        pull = torch.stack(pull, 1)  # <Delta_i, theta_j>, (S, L, K)
        moved = torch.func.grad(lambda pq: (self.attention(pq[0], pq[1], s, sel) * pull).sum())
        rate = self.h if self.hn_sign == "descent" else -self.h
        for n, g in zip("pq", moved((x["p"][sel], x["q"][sel])), strict=True):
            if n in ABLATIONS[self.ablation]:
                g = g.sum(1, keepdim=True).expand_as(g) if self.ablation == "shared" else g
                new = x[n][sel] + rate * g
                x[n][sel] = new.clamp_min(0) if n == "p" else new
