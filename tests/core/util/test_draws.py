"""What torch draws at random is a function of the seed alone, whatever operation draws it."""

import pytest
import torch
import torch.nn.functional as F

from pfl_core.util.draws import Draws

X = torch.full((40,), 0.5)
DRAWS = {
    "rand": lambda: torch.rand(40),
    "rand_like": lambda: torch.rand_like(X),
    "randn": lambda: torch.randn(40),
    "randn_like": lambda: torch.randn_like(X),
    "randint": lambda: torch.randint(1000, (40,)),
    "randint between": lambda: torch.randint(10, 1000, (40,)),
    "randint between, with a type": lambda: torch.randint(10, 1000, (40,), dtype=torch.int32),
    "randint between, no generator": lambda: torch.randint(10, 1000, (40,), generator=None),
    "randint_like": lambda: torch.randint_like(X, 1000),
    "randperm": lambda: torch.randperm(40),
    "bernoulli": lambda: torch.bernoulli(X),
    "bernoulli by place": lambda: X.clone().bernoulli_(0.5),
    "normal": lambda: torch.normal(X, 1.0),
    "normal in place": lambda: X.clone().normal_(),
    "uniform in place": lambda: X.clone().uniform_(0, 1),
    "random in place": lambda: X.clone().random_(0, 1000),
    "exponential": lambda: X.clone().exponential_(),
    "multinomial": lambda: torch.multinomial(X, 20),
    "dropout": lambda: F.dropout(X, 0.5),
    "dropout of channels": lambda: F.dropout2d(X.view(1, 40, 1, 1), 0.5),
}


def drawn(name, seed):
    with Draws(seed) as draws:
        return torch.cat([DRAWS[name]().flatten().float() for _ in range(2)]), draws.count


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_a_function_of_the_seed_alone(name):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first, count = drawn(name, 1)
    torch.manual_seed(8)
    again, _ = drawn(name, 1)
    other, _ = drawn(name, 2)
    torch.manual_seed(7)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert count == 2 and not torch.equal(*first.chunk(2)), "the second draw is another one"
    drawn(name, 1)
    assert torch.equal(torch.get_rng_state(), before), "torch's global generator has moved"
