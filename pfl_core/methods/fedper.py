"""FedPer: the head stays on the client, the base is averaged.

Arivazhagan et al., "Federated Learning with Personalization Layers", arXiv:1912.00818, Algorithm 1.

    (W_B, W_Pj) <- SGD on both jointly, e epochs             `local`
    W_B         <- sum_j gamma_j W_{B,j},  gamma_j = n_j/n   `upload`; W_Pj never leaves client j

K_P counts personalization layers from the output: the classifier, then basic blocks (Sec. 4.3). It
is the experiment's `head_depth` with head_by="block". K_P = 0 is FedAvg, K_P = all is Local.

Differs from the paper
1. BatchNorm statistics of the base: with buffers="average" they are averaged like the base (the
   papers' preset; the paper is silent).
2. Fine-tuning (App. A.3): the frozen base normalises by batch statistics and keeps its running
   ones; the paper does not say. (With running statistics, which lag behind in early rounds, a run
   over narrow networks diverged.)
"""

from pfl_core.methods.base import Context, Method
from pfl_core.stacked import Params, select
from pfl_core.util.fields import number


class FedPer(Method):
    """Personal head, shared base, trained jointly (Arivazhagan et al., 2019).

    Examples
    --------
    Two clients have one base and heads of their own:

    >>> tiny = Experiment(method="fedper", model="mlp", clients=3, rounds=1, max_samples=60)
    >>> result = run(tiny.but(keep_models=True))
    >>> first, second = (result.model(k).state_dict() for k in (0, 1))
    >>> {name: first[name].equal(second[name]) for name in first if name.endswith("weight")}
    {'fc1.weight': True, 'fc.weight': False}
    """

    name = "fedper"
    finetune_epochs: int = number(
        0, low=0, doc="head-only epochs before the joint ones (App. A.3: 1); 0 is FedPer"
    )

    def is_shared(self, name: str) -> bool:
        return name not in self.task.head

    def local(self, ctx: Context, start: Params) -> Params:
        if epochs := self.finetune_epochs:
            head = [n for n in self.task.parameters if n in self.task.head]
            tuned = ctx.train(self.loss, start, only=head, epochs=epochs, stream="finetune")
            start = start | select(tuned, self.task.head)
        return ctx.train(self.loss, start)
