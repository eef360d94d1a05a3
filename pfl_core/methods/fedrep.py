"""FedRep: a shared representation under personal heads, trained in turn: first the head, then the representation.

Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021, Algorithm 1.

    h_i   <- tau_h epochs on the head, phi as received      `local`, first phase (stream "head")
    phi_i <- tau_b epochs on the representation, h_i fixed  second phase (stream "local")
    phi   <- sum_i n_i phi_i / sum_i n_i                    `upload`; h_i never leaves client i

The head is the experiment's (`head_depth`). FedPer has the same state and trains both parts jointly.

Differs from the paper
1. Weights are n_i; the paper averages uniformly (a recollection), and so does the authors' code on CIFAR.
2. BatchNorm below the head runs on batch statistics in both phases, and they advance in both (as PFLlib's do).

Differs from the authors' code
1. There a last round trains every client's head for 10 epochs or more before scoring, and scores of the last ten rounds are averaged.
   Read such a number from when="after", select="last10".
2. Momentum 0.5 and weight decay 1e-4 are the experiment's to set; what is frozen does not move under them.
"""

from dataclasses import dataclass

from pfl_core.methods.base import Method


@dataclass(frozen=True, eq=False)
class FedRep(Method):
    """Shared representation and personal head, trained one after the other (Collins et al., 2021)."""

    name = "fedrep"
    # 0 is allowed for one of them, as a limit: heads stay as they were drawn, or phi does.
    head_epochs: int = 1  # tau_h (PFLlib: 1; authors on CIFAR: 10)
    body_epochs: int | None = (
        None  # tau_b; None: the experiment's epochs or steps (authors: 1 or 5)
    )

    def check(self):
        tau_h, tau_b = self.head_epochs, self.body_epochs
        if tau_h < 0 or (tau_b is not None and tau_b < 0) or tau_h == tau_b == 0:
            raise ValueError(
                f"fedrep: head_epochs = {tau_h}, body_epochs = {tau_b}; allowed: integers >= 0 of which one is > 0 "
                "(body_epochs None: the experiment's epochs)"
            )

    def is_shared(self, name):
        return name not in self.task.head

    def local(self, c, start):
        head = [n for n in self.task.parameters if n in self.task.head]
        body = [n for n in self.task.parameters if n not in self.task.head]
        start = c.train(self.loss, start, only=head, epochs=self.head_epochs, stream="head")
        return c.train(self.loss, start, only=body, epochs=self.body_epochs)
