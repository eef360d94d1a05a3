"""FedFomo, CFL, FedAMP, HeurFedAMP, APPLE: mixes worked by hand, limits, and the identities they reduce to."""

import pytest
import torch

from tests.core.methods.mixing_shared import one_round
from tests.core.methods.setting import assert_same, rounds, setup


@pytest.mark.parametrize("name", ["fedfomo", "cfl", "fedamp", "heurfedamp", "apple"])
def test_order_of_clients_does_not_matter(name):
    states = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        method, data = setup(name)
        state = method.init()
        for _ in range(2):
            state, _ = one_round(method, data, state, torch.tensor(order))
        states.append(state)
    assert_same(*states, exact=False)


@pytest.mark.parametrize("name", ["fedfomo", "cfl", "fedamp", "heurfedamp", "apple"])
def test_a_default_mixes(name):
    _, mine = rounds(name, n=3)
    _, alone = rounds("local", n=3)
    trained = mine.clients | mine.extra["models"] if name == "cfl" else mine.clients
    assert any((trained[n] - v).abs().max() > 1e-4 for n, v in alone.clients.items())


BAD = {
    "fedfomo": [dict(neighbours=-1), dict(fallback="none"), dict(affinity="share")],
    "cfl": [
        dict(linkage="average"),
        dict(weighting="n"),
        dict(warmup=2.0),
        dict(min_size=0),
        dict(still=2.0),
    ],
    "fedamp": [dict(rho=-1.0), dict(rho=100.0), dict(start="u"), dict(share=1.5), dict(sigma=0.0)],
    "heurfedamp": [dict(zeta=1.5), dict(similarity="l2"), dict(start="u")],
    "apple": [dict(schedule="linear"), dict(span=2.0), dict(dr_lr=-1.0)],
}


@pytest.mark.parametrize("name, args", [(n, a) for n, all_args in BAD.items() for a in all_args])
def test_illegal_values_are_named(name, args):
    with pytest.raises(ValueError, match=f"{name}.*{next(iter(args))}.*allowed"):
        setup(name, args=args)
