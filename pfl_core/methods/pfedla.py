"""pFedLA and HeurpFedLA: a hypernetwork for each client weighs all models, layer by layer.

Ma, Zhang, Guo and Xu, "Layer-wised Model Aggregation for Personalized Federated Learning", CVPR
2022, arXiv:2205.03993, Algorithms 1 and 2.

    alpha_i = HN_i(v_i; psi_i)                       `alpha`: a row of weights over the K clients
                                                     for each layer                           (4)
    alpha_i^l = softmax(z_i^l)                       of the head's outputs z_i^l: `hn_out`
             or relu(z_i^l) / sum_j relu(z_i^{l,j})
    thetabar_i^l = sum_j alpha_i^{l,j} theta_j^l     `download`                          (5), (6)
    theta_i <- local SGD from thetabar_i             `local` (the default)
    Delta_i = theta_i - thetabar_i
    Delta v_i, Delta psi_i = (d thetabar_i)^T Delta_i     `stepped`                     (10), (11)
        where d / d alpha^{l,j} is <theta_j^l, Delta_i^l>
    keep the k layers of largest alpha_i^{l,i}       `retained`; they are theta_i^l itself, which is
                                                     not sent to the client                  (12)

Served is thetabar_i (Algorithm 1's output): when="before".

Cost: the server's step takes S K D operations (S participants, K clients, D parameters): quadratic
where all take part.

Differs from the paper
1. Eq. 10-11 give no sign. v, psi + lr J^T Delta lowers the loss and is the default (Fig. 5 and 6
   show self weights that grow); hn_sign="literal" subtracts, as the papers of this family print it.
2. Not in the text, from third-party code: d_e = hidden = 100, three hidden layers, lr 5e-3 by plain
   SGD, one step a visit.
3. Weights of a layer sum to 1: by softmax. hn_out="relu_norm" is third-party code: ReLU over its
   sum, heads drawn from U(0, 1). Its rate of 5e-3 belongs to those outputs; with softmax and heads
   of zero it leaves all weights at 1/K: set `lr` by validation data.
4. Heads begin at zero, so that the first aggregation is the plain mean; all clients begin with one
   model.
5. A layer is a convolution, BatchNorm or linear module (by="module"); Table 3's megabytes fit that
   count. BatchNorm statistics are never mixed: they follow the experiment's buffer policy.
Differs from third-party code (there is none of the authors'): all participants of a round mix the
same models, those of its beginning.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfl_core.methods.base import Method, State
from pfl_core.stacked import Params, clone, gram, inner, mix, put, select, take
from pfl_core.util.fields import among, choice, log_uniform, number

DEPTH = 3  # hidden layers of a hypernetwork


def alpha(hn: Params, out: str) -> Tensor:
    """Weights (S, L, K) of S hypernetworks {name: (S, *shape)} with their embeddings ("v").

    Rows over the clients sum to 1.
    """
    h = hn["v"]
    for i in range(DEPTH):
        h = F.relu(torch.einsum("soi,si->so", hn[f"{i}.weight"], h) + hn[f"{i}.bias"])
    z = torch.einsum("slkh,sh->slk", hn["head.weight"], h) + hn["head.bias"]
    if out == "softmax":
        return z.softmax(2)
    return z.relu() / z.relu().sum(2, keepdim=True).clamp_min(1e-12)


class PFedLA(Method):
    """Layer-wise weights over all models, from a hypernetwork a client (Ma et al., 2022).

    Examples
    --------
    Each client (row) has a weight for each client's (column) layer; they begin alike:

    >>> la = Experiment(method="pfedla", model="mlp", clients=3, rounds=1, max_samples=60)
    >>> rounds, weights = run(la.but(record=["weights"])).probe("weights")
    >>> {layer: w[0, 0].astype(float).round(2).tolist() for layer, w in weights.items()}
    {'fc1': [0.33, 0.33, 0.33], 'fc': [0.33, 0.33, 0.33]}
    """

    name = "pfedla"
    retain_k = 0  # layers that a client keeps as they are; HeurpFedLA
    lr: float = number(
        5e-3,
        low=0,
        doc="of embeddings and hypernetworks [third-party]; 0 (with softmax) is the plain mean of "
        "all models",
        search=log_uniform(0.005, 1, also=(0.0,)),
    )
    dim: int = number(100, low=1, doc="d_e, size of an embedding [third-party]")
    hidden: int = number(100, low=1, doc="width of the hypernetworks [third-party]")
    by: str = choice("module", "block", "child", "tensor", doc="what a layer is")
    hn_sign: str = choice("descent", "literal", doc="the step that lowers the loss, or the other")
    hn_out: str = choice("softmax", "relu_norm", doc="how outputs are made weights")

    def check(self) -> None:
        if self.retain_k > len(self.layers):
            raise ValueError(
                f"retain_k = {self.retain_k}; allowed: 0 to {len(self.layers)}, the model's layers"
            )

    @property
    def layers(self) -> dict[str, list[str]]:
        """{layer: names of its parameters} in forward order."""
        return self.task.layers_by(self.by)

    def pairs(self, s: int) -> tuple[int, int]:
        return s * self.task.K, len(self.layers) * self.hidden * self.task.K**2

    # -- the hypernetworks -------------------------------------------------------------------------
    def _hypernetworks(self) -> Params:
        # K networks at once, drawn as nn.Linear draws one.
        t, head = self.task, (self.task.K, len(self.layers), self.task.K)
        with t.seeded("hypernetworks"):
            hn = {"v": torch.randn(t.K, self.dim)}
            for i in range(DEPTH):
                linear = nn.Linear(self.hidden if i else self.dim, t.K * self.hidden)
                for p, v in linear.named_parameters():
                    hn[f"{i}.{p}"] = v.detach().unflatten(0, (t.K, self.hidden))
            draw = torch.zeros if self.hn_out == "softmax" else torch.rand
            hn["head.weight"] = draw(*head, self.hidden)
        hn["head.bias"] = torch.zeros(head)
        return {n: v.to(t.device, t.dtype) for n, v in hn.items()}

    def retained(self, a: Tensor, sel: Tensor) -> Tensor:
        """Whether client sel[s] keeps layer l: (S, L) bool.

        It keeps the retain_k largest self weights of a (S, L, K); of equal ones the first.
        """
        mine = a[torch.arange(len(sel), device=sel.device), :, sel]
        top = mine.argsort(dim=1, descending=True, stable=True)[:, : self.retain_k]
        return torch.zeros_like(mine, dtype=torch.bool).scatter_(1, top, True)

    def _used(self, state: State, sel: Tensor) -> tuple[Tensor, Tensor]:
        # The weights that mix, with one-hot rows for retained layers, and which layers those are.
        a = alpha(take(state.extra["hn"], sel), self.hn_out)
        keep = self.retained(a, sel)
        return torch.where(keep[:, :, None], F.one_hot(sel, a.shape[2]).to(a)[:, None], a), keep

    def weights(self, state: State) -> dict[str, Tensor]:
        """{layer: (K, K)}, the weights that mix next: row = receiving client, column = source.

        A retained layer's row is one-hot.
        """
        sel = torch.arange(len(state.extra["hn"]["v"]), device=self.task.device)
        a, _ = self._used(state, sel)
        return dict(zip(self.layers, a.unbind(1), strict=True))

    def embeddings(self, state: State) -> Tensor:
        """The clients' embeddings v, (K, d_e)."""
        return state.extra["hn"]["v"]

    def stepped(self, state: State, sel: Tensor, start: Params, end: Params) -> Params:
        """Hypernetworks of clients `sel` after their step, {name: (S, *shape)} (Eq. 10, 11)."""
        theta, hn = state.extra["theta"], take(state.extra["hn"], sel)
        with torch.enable_grad():
            a = alpha({n: v.requires_grad_() for n, v in hn.items()}, self.hn_out)
        slope = torch.zeros_like(a)  # d / d alpha^{l,j}, by layer
        for i, names in enumerate(self.layers.values()):
            delta = {n: end[n] - start[n] for n in names}
            # <theta_j - thetabar_i, Delta_i>, in float64: models are close, and Delta is small.
            slope[:, i] = gram(delta, select(theta, names)) - inner(delta, start)[:, None]
        slope.masked_fill_(self.retained(a, sel)[:, :, None], 0)
        grads = torch.autograd.grad(a, list(hn.values()), slope)
        rate = self.lr if self.hn_sign == "descent" else -self.lr
        return {n: v + rate * g for (n, v), g in zip(hn.items(), grads, strict=True)}

    # -- hooks -------------------------------------------------------------------------------------
    def init(self) -> State:
        state = super().init()
        state.server = select(state.server, self.task.buffers)
        theta = clone(select(self.task.start(), self.task.parameters))
        state.extra = {"theta": theta, "hn": self._hypernetworks()}
        return state

    def download(self, state: State, sel: Tensor) -> Params:
        # Rows of retained layers hold the client's own copy, which is not sent: see `traffic`.
        a, _ = self._used(state, sel)
        mixed = super().download(state, sel)
        for i, names in enumerate(self.layers.values()):
            mixed |= mix(a[:, i], select(state.extra["theta"], names))
        return mixed

    def upload(
        self, state: State, sel: Tensor, start: Params, end: Params, weight: Tensor
    ) -> State:
        state = super().upload(state, sel, start, end, weight)  # averaged buffers, if any
        put(state.extra["hn"], sel, self.stepped(state, sel, start, end))
        put(state.extra["theta"], sel, select(end, state.extra["theta"]))
        return state

    def traffic(self, state: State, sel: Tensor, down: Params, up: Params) -> tuple[int, int]:
        down_n, up_n = super().traffic(state, sel, down, up)
        _, keep = self._used(state, sel)
        layers = self.layers.values()
        sizes = [sum(self.task.initial[n].numel() for n in names) for names in layers]
        return down_n - int((keep.cpu() * torch.tensor(sizes)).sum()), up_n


class HeurpFedLA(PFedLA):
    """pFedLA whose clients keep their k layers of largest self weight (Ma et al., 2022).

    Examples
    --------
    A client that keeps all layers trains alone:

    >>> heur = Experiment(method="heurpfedla", model="mlp", clients=3, max_samples=60)
    >>> heur = heur.but(method_args={"retain_k": 2})
    >>> heur = heur.but(rounds=1)
    >>> losses = [run(e).arrays["before/test/loss"] for e in (heur, heur.but(method="local"))]
    >>> np.allclose(*losses)
    True
    """

    name = "heurpfedla"
    retain_k: int = number(
        1, low=0, doc="k (Tables 1, 2); 0 is pFedLA, all layers is Local", search=among(0, 1, 2)
    )


def table3_megabytes(scalars: float) -> float:
    """MBytes of pFedLA's Table 3 for the scalars that a client moves in a round, both directions.

    3000 bytes a scalar and 2^20 bytes a MByte give all seven cells; 600 rounds, 10 clients and 4
    bytes would be 24000. True bytes are the rows download_bytes and upload_bytes.
    """
    return scalars * 3000 / 2**20
