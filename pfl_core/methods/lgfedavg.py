"""LG-FedAvg: local representations, a global head: lower layers stay, the upper ones are averaged.

Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global
Representations", arXiv:2001.01523 (2020), Algorithm 1.

    (W_{l,k}, W_{g,k}) <- SGD on both jointly            `local` (the default)
    W_g                <- sum_k n_k W_{g,k} / sum_k n_k   `upload`; W_{l,k} never leaves client k

W_g is the experiment's head: `head_depth` counts its layers from the output (authors: 2 on
CIFAR-10, 3 on MNIST). All layers is FedAvg, 0 is Local; both limits are allowed. The authors start
from a model trained by FedAvg: Experiment(init_from=<that experiment>). From scratch with a
one-layer head expect about Local: the shared head meets representations that nothing aligns.

Differs from the paper
1. The auxiliary losses on the representations (unsupervised, adversarial fairness) are left out, as
   in the authors' image experiments.
2. BatchNorm statistics below the head are always the client's own; the paper's networks have none.

Differs from the authors' code
1. Weights are n_k; there the mean is uniform.
2. There each client keeps its best model by test accuracy; here nothing is selected on test data.
"""

from pfl_core.methods.base import Method


class LGFedAvg(Method):
    """Personal lower layers under a shared head, trained jointly (Liang et al., 2020).

    Examples
    --------
    It is FedPer the other way round: clients share the head.

    >>> tiny = Experiment(method="lgfedavg", model="mlp", clients=3, rounds=1, max_samples=60)
    >>> result = run(tiny.but(keep_models=True))
    >>> first, second = (result.model(k).state_dict() for k in (0, 1))
    >>> {name: first[name].equal(second[name]) for name in first if name.endswith("weight")}
    {'fc1.weight': False, 'fc.weight': True}
    """

    name = "lgfedavg"

    def is_shared(self, name: str) -> bool:
        return name in self.task.head
