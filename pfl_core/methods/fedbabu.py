"""FedBABU: the body alone is trained and averaged; the head stays as it was drawn.

Oh, Kim, Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR
2022, arXiv:2106.06042. With one common head h_0, drawn at first:

    body_i <- E epochs of SGD on F_i(body_i, h_0), the body alone      `local`
    body   <- sum_i n_i body_i / sum_i n_i                             the default `upload`
    served: (body, h_0), which each client fine-tunes                  the experiment's `finetune`

Fine-tuning is no part of the method, but a stage of the run, whose result nobody sends back:
Experiment(method="fedbabu", finetune={"epochs": 5}) trains the whole network on, as the paper
does, and its accuracies are those of when="tuned 5"; "only" is "head" or "body" for one part of it.
Without it the model of all clients is scored, under a head that nobody has trained.

The head is the experiment's (`head_depth`), and it must be common: bodies that were trained under
different heads do not average. With head_depth=0 this is FedAvg. FedRep trains the same body with
head_epochs=0. New clients get the head that the server's body was trained under.

Differs from the paper (not read: what follows is from recollection and the codes)
1. BatchNorm statistics follow the experiment's buffer policy, those of the head's layers, too.
2. The paper decays the rate over the rounds (0.1, 0.01, 0.001); here it is constant. Fine-tuning
   has the run's rate where none is given; the paper's is the last of its schedule.
Differs from the authors' code
1. Weights are n_i; there they are uniform, over clients of equal size.
2. There clients fine-tune the model of the round with the best test accuracy; here the last one.
Differs from PFLlib's code
1. There each client fine-tunes the body that it trained in the last round, not the average. That is
   finetune=[{"epochs": 1, "only": "body"}, {"epochs": 10}] for a run of epochs=1.
FL-bench sets the head's gradient to 0, so that momentum and weight decay move it.
"""

from torch import Tensor

from pfl_core.methods.base import Context, Method, State
from pfl_core.stacked import Params, clone, expand, select


class FedBABU(Method):
    """Shared body under a common head that stays as drawn (Oh et al., 2022).

    Examples
    --------
    Fine-tuned for two epochs after the last round, and scored after each:

    >>> babu = Experiment(method="fedbabu", model="mlp", clients=3, rounds=1, max_samples=60)
    >>> result = run(babu.but(finetune={"epochs": 2}))
    >>> [when for when in result.history.when.unique() if when]
    ['before', 'after', 'tuned 1', 'tuned 2']
    """

    name = "fedbabu"

    @property
    def frozen(self) -> list[str]:
        """Names of the head's parameters."""
        return [n for n in self.task.parameters if n in self.task.head]

    def check(self) -> None:
        if self.task.own_heads:
            raise ValueError("head_init = 'own'; allowed: 'common' (all bodies have one head)")
        if len(self.frozen) == len(self.task.parameters):
            raise ValueError(
                "nothing below its head is trained; give a smaller head_depth, name fewer modules "
                "in `head`, or train more of the network"
            )

    def init(self) -> State:
        state = super().init()
        state.clients |= clone(select(self.task.start(), self.frozen))
        return state

    def download(self, state: State, sel: Tensor) -> Params:
        return expand(select(state.server, lambda n: n not in self.frozen), len(sel))

    def local(self, ctx: Context, start: Params) -> Params:
        body = [n for n in self.task.parameters if n not in self.task.head]
        return ctx.train(self.loss, start, only=body)
