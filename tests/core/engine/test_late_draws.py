"""Draws of a user's loss are seeded for each client, in whatever round, step or client they begin."""

import pytest
import torch
import torch.nn.functional as F

from pfl_core import Experiment, Method
from pfl_core.experiments.run import run

TINY = dict(
    clients=4, partition_args={"alpha": 0.1}, max_samples=60, model="mlp", batch=4, rounds=3
)


def noisy(batch):
    return batch.x + torch.randn_like(batch.x)


class Late(Method):
    """Noise from round 1 on."""

    name = "late_noise_for_test"

    def local(self, ctx, start):
        round = torch.full((len(ctx.sel),), float(ctx.round))
        end = ctx.train(self.loss, start | {"round": round})
        return {n: v for n, v in end.items() if n != "round"}

    def loss(self, p, anchor, batch):
        x = noisy(batch) if p["round"] >= 1 else batch.x
        return F.cross_entropy(self.logits(p, x), batch.y)


class Rare(Method):
    """Noise on batches with class 9, which only some clients have."""

    name = "rare_noise_for_test"

    def loss(self, p, anchor, batch):
        x = noisy(batch) if (batch.y == 9).any() else batch.x
        return F.cross_entropy(self.logits(p, x), batch.y)


def history(e, store, workers=None):
    found = run(e, device="cpu", workers=workers, store=store, executor="threads").history
    return found[found.metric != "train_s"]


@pytest.mark.parametrize("method", [Late, Rare], ids=lambda m: m.name)
def test_draws_that_begin_late_are_seeded_for_each_client(method, tmp_path):
    e, before = Experiment(method=method.name, **TINY), torch.get_rng_state()
    one, two, again = (history(e, tmp_path / str(i), n) for i, n in enumerate((1, 2, 1)))
    assert one.equals(two) and one.equals(again)
    assert torch.equal(before, torch.get_rng_state())
    assert not history(e.but(method="fedavg"), tmp_path).value.equals(one.value)
