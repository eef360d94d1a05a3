"""FedAvg and Local: the two ends of the range that personalization lies in.

FedAvg: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017, Algorithm 1.

    w_k <- local SGD from w on client k            `local` (the default: one phase of E epochs)
    w   <- sum_k n_k w_k / sum_k n_k               `upload`, over the participants

Differs from the paper
1. Weights use all n_k samples of a participant, also where a batch plan leaves some out.
2. BatchNorm statistics follow the experiment's buffer policy (the paper's networks have none).

FedAvg-FT ("fine-tuned") is no method of its own: it is FedAvg read at when="after", each client's
model after its local training. Neither is LP-FT (Kumar et al., "Fine-Tuning can Distort Pretrained
Features and Underperform Out-of-Distribution", ICLR 2022): it is FedAvg with the experiment's
finetune=[{"epochs": 5, "only": "head"}, {"epochs": 10}], read after the last of these epochs.
"""

from pfl_core.methods.base import Method


class FedAvg(Method):
    """One global model, the weighted mean of locally trained copies (McMahan et al., 2017).

    Examples
    --------
    All clients are served one model:

    >>> tiny = Experiment(method="fedavg", model="mlp", clients=3, rounds=1, max_samples=60)
    >>> result = run(tiny.but(keep_models=True))
    >>> first, second = (result.model(k).fc.weight for k in (0, 1))
    >>> bool((first == second).all())
    True
    """

    name = "fedavg"


class Local(Method):
    """Every client trains alone; nothing is communicated.

    Examples
    --------
    Clients' models differ, and nothing travels:

    >>> tiny = Experiment(method="local", model="mlp", clients=3, rounds=1, max_samples=60)
    >>> result = run(tiny.but(keep_models=True))
    >>> bool((result.model(0).fc.weight == result.model(1).fc.weight).all())
    False
    >>> result.history.query("metric == 'upload_bytes'").value.tolist()
    [0.0, 0.0]
    """

    name = "local"

    def is_shared(self, name: str) -> bool:
        return False
