"""Every method on a pretend accelerator: nothing is left on the wrong device, and the host waits for little."""

import pytest
import torch

from benchmarks.pretend import DEVICE, Accelerator, Pretend
from benchmarks.waits import SMALL, counted, trained
from tests.core.methods.setting import OURS, assert_same, leaves

pytestmark = pytest.mark.slow

MOST = 3  # waits of a round
# What a method's next step is hangs on values that only the device knows.
DECIDES = {
    "cfl": (5, "whether a cluster is split, and into how many"),
    "fedala": (4, "whether the mixing weights have settled"),
    "fedfomo": (5, "who is sampled, for draws by client, and how many models are known"),
    "fedpac": (4, "whether the quadratic programme has a feasible point"),
}


@pytest.mark.parametrize("name", OURS)
def test_rounds_there_end_as_on_a_cpu_and_the_host_waits_for_little(name):
    small = SMALL.but(method=name, max_samples=15)
    got, ended = counted(small)
    there = dict(leaves(ended.state))
    assert all(isinstance(v, Pretend) for v in there.values())
    here = trained(small, "cpu", executor="batched").state
    assert_same({p: v.held for p, v in there.items()}, dict(leaves(here)), exact=False)

    most, why = DECIDES.get(name, (MOST, "nothing"))
    assert got["waits"] <= most, f"{why} needs the host"
    assert got["while steps run"] == 0
    assert got["waits of an evaluation"] <= 2 + 2 * (name in DECIDES)
    assert got["numbers uploaded"] < 1e4, "images are there, only who is in which batch is sent"


def test_fine_tuning_there_ends_as_on_a_cpu():
    stages = [{"epochs": 2, "only": "head"}, {"epochs": 1, "lr": 0.02}]
    small = SMALL.but(max_samples=15, momentum=0.9, finetune=stages)
    _, ended = counted(small)
    there = dict(leaves(ended.tuned))
    assert there and all(isinstance(v, Pretend) for v in there.values())
    here = trained(small, "cpu", executor="batched").tuned
    assert_same({p: v.held for p, v in there.items()}, dict(leaves(here)), exact=False)


def test_two_devices_do_not_mix():
    with Accelerator() as accelerator:
        there = torch.ones(3, device=DEVICE)
        with pytest.raises(RuntimeError, match="tensors on two devices"):
            there + torch.ones(3)
        assert not accelerator.seen, "made there, nothing was moved"
        assert float((there + torch.tensor(1.0)).sum()) == 6, "a number may come from the CPU"
        assert there[there > 0].cpu().tolist() == [1, 1, 1]
        torch.tensor([1.0, 2.0], device=DEVICE)
    assert accelerator.seen == {"asks": 2, "downloads": 1, "uploads": 1, "numbers": 2}
