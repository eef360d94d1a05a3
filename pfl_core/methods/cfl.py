"""CFL: FedAvg inside clusters, which are halved while their members pull in different directions.

Sattler, Mueller, Samek, "Clustered Federated Learning: Model-Agnostic Distributed Multitask
Optimization Under Privacy Constraints", IEEE TNNLS 2020, arXiv:1910.01991.

    Delta_i = theta_i - theta_c              what client i learned from the model of its cluster c
    split c if ||mean_i Delta_i|| < eps1     the cluster stands still,
          and max_i ||Delta_i|| > eps2       some of its members do not
    S_ij    = cos(Delta_i, Delta_j)          two parts by agglomerative clustering, distance 1 - S
    theta_c <- theta_c + mean_{i in c} Delta_i     each part of a cluster just split takes its own

Cost: cosines of S participants' updates take S^2 D operations a round; FedAvg's step takes S D.

Differs from the paper
1. eps1 and eps2 scale with rate, steps and size of the model, so the defaults are relative (ours):
   a cluster stands still when its mean update is at most the share `still` of the largest mean
   update of any cluster so far, and updates are large above a tenth of the largest one of the first
   round. To compare the mean with the updates of the same round (revision 1) asks whether they are
   orthogonal, as they are in the first rounds of any uneven split, and not whether training has
   come to a stand.
2. Complete linkage and uniform means, as in all codes. The paper (a recollection) merges the most
   similar pairs, which is single linkage and minimises the largest similarity between the parts,
   and weighs by samples: linkage="single", weighting="samples".
3. With partial participation a cluster is split only in a round in which all its members took part.
Differs from the authors' code
1. Later splits keep client ids (there, positions inside a cluster are taken for ids).
2. No cache of the models at each split.
3. The rate there is 0.1, falls by 1 % at every call of local training, and has momentum 0.9; here
   they are the experiment's.
"""

from typing import Any

import torch
from torch import Tensor

from pfl_core.methods.base import Method, State
from pfl_core.stacked import Params, clone, expand, gram, mix, put, select, take
from pfl_core.util.fields import choice, number, uniform


def bipartition(s: Tensor, method: str) -> Tensor:
    """The second of two parts (n,) bool of n >= 2 clients with similarities s (n, n).

    `method` is how parts are compared: "complete" or "single" linkage.
    """
    from scipy.cluster.hierarchy import cut_tree, linkage  # late: they take most of a second
    from scipy.spatial.distance import squareform

    distance = (1 - (s + s.T) / 2).fill_diagonal_(0).clamp_min(0)
    tree = linkage(squareform(distance.cpu().numpy(), checks=False), method)
    return torch.as_tensor(cut_tree(tree, 2)[:, 0] == 1, device=s.device)


def _norm(square: Tensor) -> Tensor:
    return square.clamp_min(0).sqrt()  # of inner products, which rounding may leave below 0


class CFL(Method):
    """FedAvg within clusters, halved by the cosine similarity of updates (Sattler et al., 2020).

    Examples
    --------
    Clients take from their cluster alone; before a split that is all of them:

    >>> cfl = Experiment(method="cfl", model="mlp", clients=3, rounds=2, max_samples=60)
    >>> rounds, weights = run(cfl.but(record=["weights"])).probe("weights")
    >>> weights["all"][-1].astype(float).round(2)[0].tolist()
    [0.33, 0.33, 0.33]
    """

    name = "cfl"
    scheduled = True
    revision = 2
    eps1: float | None = number(
        None, doc="split below this norm of the mean update (authors' code: 0.4); None: by `still`"
    )
    eps2: float | None = number(
        None,
        doc="and above this norm of the largest one (authors' code: 1.6; huge is FedAvg); None: a "
        "tenth of the first round's largest",
    )
    still: float = number(
        0.5,
        low=0,
        high=1,
        doc="eps1 as a share of the largest mean update so far (ours); 0 splits only what does not "
        "move at all",
        search=uniform(0.2, 0.9, also=(0.0,)),
    )
    warmup: float = number(
        0.1, low=0, high=1, doc="share of the rounds before any split (authors' code: 20 rounds)"
    )
    min_size: int = number(2, low=1, doc="only larger clusters are split (authors' code)")
    linkage: str = choice("complete", "single", doc="how parts are compared; the paper: single")
    weighting: str = choice("uniform", "samples", doc="of a cluster's members; the paper: samples")

    def pairs(self, s: int) -> tuple[int, int]:
        return s**2, 2 * s**2

    def init(self) -> State:
        state, k = super().init(), self.task.K
        cluster = torch.zeros(k, dtype=torch.int64, device=self.task.device)
        zero = torch.zeros((), dtype=torch.float64, device=self.task.device)
        models = clone(expand(state.server, k))
        state.extra = {"models": models, "cluster": cluster}
        state.extra |= {"first": zero, "fastest": zero.clone()}
        state.server = {}
        return state

    def download(self, state: State, sel: Tensor) -> Params:
        return take(state.extra["models"], sel)

    def share(self, cluster: Tensor, sel: Tensor, count: int) -> Tensor:
        """What each of sel weighs in the mean of each of `count` clusters: (clusters, S).

        Rows sum to 1 or, for a cluster without participants, to 0.
        """
        ids = torch.arange(count, device=cluster.device)
        n = self.task.n if self.weighting == "samples" else torch.ones_like(self.task.n)
        a = (cluster[sel] == ids[:, None]) * n[sel].double()
        return a / a.sum(1, keepdim=True).clamp_min(1)

    def halved(
        self, extra: dict[str, Any], sel: Tensor, g: Tensor, a: Tensor, mean: Tensor
    ) -> tuple[Tensor, int]:
        """Clusters (K,) after splitting, and how many they are.

        Parameters
        ----------
        g : (S, S)
            Inner products of the updates of sel.
        a : (clusters, S)
            What `share` gives.
        mean : (clusters,)
            Norms of the mean updates.
        """
        cluster, norm, member = extra["cluster"].clone(), _norm(g.diagonal()), a > 0
        cosine = g / (norm[:, None] * norm + 1e-12)
        size, count = member.sum(1), len(a)
        ids = torch.arange(count, device=cluster.device)
        present = (size > self.min_size) & (size == (cluster == ids[:, None]).sum(1))
        split = self.splits(extra, mean, (norm * member).amax(1))
        for c, due in enumerate((present & split).tolist()):
            if due:
                here = member[c].nonzero()[:, 0]
                part = bipartition(cosine[here][:, here], self.linkage)
                cluster[sel[here[part]]] = count
                count += 1
        return cluster, count

    def splits(self, extra: dict[str, Any], mean: Tensor, largest: Tensor) -> Tensor:
        """Which clusters are split, whose mean updates and largest ones have these norms (each)."""
        eps1, eps2 = self.eps1, self.eps2
        if eps1 is None:
            # A mean that is 0 but for rounding stands still, also where none was larger so far.
            eps1 = torch.maximum(self.still * extra["fastest"], 1e-6 * largest)
        if eps2 is None:
            eps2 = extra["first"] / 10
        return (mean < eps1) & (largest > eps2)

    def upload(
        self, state: State, sel: Tensor, start: Params, end: Params, weight: Tensor
    ) -> State:
        extra = state.extra
        g = gram({n: end[n] - start[n] for n in self.task.parameters})
        largest = _norm(g.diagonal()).max()
        extra["first"] = torch.where(extra["first"] > 0, extra["first"], largest)
        count = int(extra["cluster"].max()) + 1
        a = self.share(extra["cluster"], sel, count)
        mean = _norm(((a @ g) * a).sum(1))
        extra["fastest"] = torch.maximum(extra["fastest"], mean.max())
        if state.round >= self.warmup * self.task.config.rounds:
            extra["cluster"], count = self.halved(extra, sel, g, a, mean)
        share = self.share(extra["cluster"], sel, count)
        means = mix(share, select(end, extra["models"]))
        # Clients of whose cluster somebody took part.
        seen = share.any(1)[extra["cluster"]].nonzero()[:, 0]
        put(extra["models"], seen, take(means, extra["cluster"][seen]))
        return state

    def weights(self, state: State) -> dict[str, Tensor]:
        """{"all": (K, K)}: what client k (row) takes of client j, 0 outside its cluster."""
        cluster = state.extra["cluster"]
        everyone = torch.arange(self.task.K, device=cluster.device)
        return {"all": self.share(cluster, everyone, int(cluster.max()) + 1)[cluster]}
