"""FedRep: a shared representation under personal heads, trained in turn, the head first.

Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021,
Algorithm 1.

    h_i   <- tau_h epochs on the head, phi as received       `local`, first phase (stream "head")
    phi_i <- tau_b epochs on the representation, h_i fixed   second phase (stream "local")
    phi   <- sum_i n_i phi_i / sum_i n_i                     `upload`; h_i never leaves client i

The head is the experiment's (`head_depth`). FedPer has the same state and trains both parts
jointly.

Differs from the paper
1. Weights are n_i; the paper averages uniformly (a recollection), and so does the authors' code on
   CIFAR.
2. BatchNorm below the head runs on batch statistics in both phases, and they advance in both (as
   PFLlib's do).

Differs from the authors' code
1. There a last round trains every client's head for 10 epochs or more before scoring, and scores of
   the last ten rounds are averaged. Read such a number from when="after", select="last10".
2. Momentum 0.5 and weight decay 1e-4 are the experiment's to set; what is frozen does not move
   under them.
"""

from pfl_core.methods.base import Context, Method
from pfl_core.stacked import Params
from pfl_core.util.fields import among, number


class FedRep(Method):
    """Shared representation and personal head, trained in turn (Collins et al., 2021).

    Examples
    --------
    With `body_epochs=0` the representation stays as it was drawn, and heads alone are trained:

    >>> args = {"head_epochs": 2, "body_epochs": 0}
    >>> rep = Experiment(method="fedrep", method_args=args, model="mlp", clients=3, max_samples=60)
    >>> one, two = (run(rep.but(rounds=r, keep_models=True)).model(0).state_dict() for r in (1, 2))
    >>> [np.allclose(one[name], two[name], atol=1e-6) for name in ("fc1.weight", "fc.weight")]
    [True, False]
    """

    name = "fedrep"
    head_epochs: int = number(
        1,
        low=0,
        doc="tau_h (PFLlib: 1; authors on CIFAR: 10); 0 leaves heads as they were drawn",
        search=among(1, 2, 5, 10),
    )
    body_epochs: int | None = number(
        None,
        low=0,
        doc="tau_b (authors: 1 or 5); None: the experiment's epochs or steps; 0 keeps phi as drawn",
    )

    def check(self) -> None:
        if self.head_epochs == self.body_epochs == 0:
            raise ValueError("head_epochs = body_epochs = 0; allowed: one of them > 0")

    def is_shared(self, name: str) -> bool:
        return name not in self.task.head

    def local(self, ctx: Context, start: Params) -> Params:
        head = [n for n in self.task.parameters if n in self.task.head]
        body = [n for n in self.task.parameters if n not in self.task.head]
        start = ctx.train(self.loss, start, only=head, epochs=self.head_epochs, stream="head")
        return ctx.train(self.loss, start, only=body, epochs=self.body_epochs)
