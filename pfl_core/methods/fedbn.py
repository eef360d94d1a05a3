"""FedBN: FedAvg in which every BatchNorm stays with its client.

Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021,
Algorithm 1.

    w_k       <- local SGD on all parameters, BatchNorm's too      `local` (the default)
    w^(l)     <- sum_k n_k w_k^(l) / sum_k n_k                     `upload`, layers l but BatchNorm

A client's own are weight, bias and statistics of every BatchNorm module, whatever its name;
`buffers` of the experiment does not touch them. GroupNorm and LayerNorm are shared. A model without
BatchNorm is FedAvg (allowed as its limit).

Differs from the paper
1. Weights are n_k; the authors' code averages uniformly over its five clients.
2. A client that never took part is scored with the initial statistics (mean 0, variance 1).

Differs from the authors' code
1. There BatchNorm is found by "bn" in a name, which misses a ResNet's downsample.1; here by the
   type of the module.
"""

from pfl_core.methods.base import Method, State
from pfl_core.stacked import clone, select


class FedBN(Method):
    """FedAvg with every BatchNorm, statistics included, the client's own (Li et al., 2021).

    Examples
    --------
    Convolutions are shared, BatchNorm is not:

    >>> bn = Experiment(method="fedbn", model="cnn_bn", clients=3, rounds=1, max_samples=60)
    >>> result = run(bn.but(keep_models=True))
    >>> first, second = (result.model(k).state_dict() for k in (0, 1))
    >>> sorted({name.partition(".")[0] for name in first if not first[name].equal(second[name])})
    ['bn1', 'bn2']
    """

    name = "fedbn"

    def is_shared(self, name: str) -> bool:
        return name not in self.task.bn

    def init(self) -> State:
        state = super().init()
        # Also where the experiment resets statistics.
        state.clients |= clone(select(self.task.start(), self.task.bn))
        return state
