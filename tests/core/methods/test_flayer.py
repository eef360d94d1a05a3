"""FLAYER: its rule, beside plain loops and what it reduces to."""

import copy
import math

import pytest
import torch
from torch import nn

from pfl_core import models
from pfl_core.engine.context import Context
from pfl_core.engine.engine import Engine
from pfl_core.engine.simulate import simulate
from pfl_core.methods.base import Batch, State, Step, check_adopts
from pfl_core.methods.flayer import FORMS, INNER, SORTED, accuracy, largest
from pfl_core.stacked import clone, flat, prefixed, select, unprefixed
from tests.core.methods.layers_shared import ALL, context, on, random_updates
from tests.core.methods.setting import CONFIG, assert_same, joined, rounds, setup


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


CNN = dict(input_shape=(3, 32, 32), classes=10)


def cnn(**args):
    return on(models.build("cnn", **CNN), "flayer", **args)


def changes(method, k=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        n: torch.rand(k, *method.task.initial[n].shape, generator=g) for n in method.task.parameters
    }


def factors(method, g):
    """Rates over eta as the method's mode has them."""
    return FORMS[method.mode][0](g, method.task, method.middle)


def masks_of(method, change):
    """What the method's mode uploads."""
    return FORMS[method.mode][1](change, method.task, method.fix_1x1)


class Deep(nn.Module):
    """Twenty layers of 7 x 3 weights and 3 biases (none in `fc`)."""

    def __init__(self):
        super().__init__()
        for i in range(19):
            self.add_module(f"l{i}", nn.Linear(7, 3))
        self.fc = nn.Linear(7, 3, bias=False)


@pytest.mark.parametrize("inner", INNER)
def test_flayer_without_its_parts_is_the_method_inside(inner):
    off = dict(inner=inner, mixing=False, rates=False, masking=False)
    (a, x), (b, y) = rounds("flayer", 3, args=off), rounds(inner, 3)
    assert_same(x, y)
    state = copy.deepcopy(x)
    assert_same(
        a.personal(x, context(a, x, round=3)), b.personal(state, context(b, state, round=3))
    )


def test_flayer_heads_begin_between_global_and_own():
    method, state = rounds("flayer", 2)
    head = [n for n in method.task.parameters if n in method.task.head]
    assert set(unprefixed("flayer.", state.clients)) == {*head, "acc"}
    state.clients["flayer.acc"].copy_(torch.tensor([0.0, 1.0, 0.25, 0.5]))
    p = method.begin(state, ALL)
    for n, v in state.server.items():
        mine = state.clients.get("flayer." + n)
        for k, a in enumerate((0.0, 1.0, 0.25, 0.5)):
            if n not in head or a == 0:
                assert torch.equal(p[n][k], v), n
            elif a == 1:
                assert torch.equal(p[n][k], mine[k])
            else:
                torch.testing.assert_close(p[n][k], a * mine[k] + (1 - a) * v)
    assert_same(
        select(method.personal(state, context(method, state)), method.task.names),
        select(p, method.task.names),
    )


@pytest.mark.parametrize("where", ["auto", "val", "test"])
def test_flayer_accuracy_is_that_of_the_last_round(where):
    args = {"acc_on": where}
    method, state = rounds("flayer", 0, args=args)
    assert (state.clients["flayer.acc"] == 0).all() and method.leaks_test == (where == "test")
    c = context(method, state, round=0)
    end = method.local(c, method.begin(state, ALL))
    split = "train" if where == "auto" else where
    got = c._engine.evaluate(select(end, method.task.names), split)
    hits = torch.tensor(
        [h / n if n else 0.0 for h, n in zip(got["correct"], got["n"], strict=True)]
    )
    torch.testing.assert_close(end["flayer.acc"], hits.double())
    assert torch.equal(end["flayer.fc.weight"], end["fc.weight"])


def test_flayer_reads_test_data_only_where_it_says_so():
    method, data = setup("flayer", args={"mode": "official"})
    assert (
        method.leaks_test
        and not setup("flayer", args={"mode": "official", "acc_on": "train"})[0].leaks_test
    )
    assert not setup("flayer", args={"mode": "official", "mixing": False})[0].leaks_test
    simulate(method, data, workers=1)
    object.__setattr__(method, "mixing", False)  # declares no leak now, but would read
    with pytest.raises(ValueError, match="leaks_test"):
        accuracy(
            method.logits,
            context(method, method.init()),
            method.begin(method.init(), ALL),
            method.split,
        )


def test_flayer_paper_rates():
    method = cnn()
    g = {n: torch.randn(v.shape) for n, v in method.task.initial.items()}
    f = factors(method, g)
    for i, layer in enumerate(("conv1", "conv2", "fc1", "fc"), 1):
        norm = math.sqrt(
            sum(float(g[f"{layer}.{part}"].square().sum()) for part in ("weight", "bias"))
        )
        for part in ("weight", "bias"):
            assert float(f[f"{layer}.{part}"]) == pytest.approx(
                1 + math.log(1 + 1 / norm) * i / 4, rel=1e-5
            )
    sizes = [
        factors(method, {n: v * a for n, v in g.items()}) for a in (0, 1e-6, 1e-3, 1.0, 1e3, 1e9)
    ]
    for n in g:
        series = [float(s[n]) for s in sizes]
        assert series == sorted(series, reverse=True) and all(1 <= v < math.inf for v in series)
        assert series[-1] == pytest.approx(1, abs=1e-6)
    assert set(factors(method, select(g, ["fc.weight"]))) == {"fc.weight"}


def test_flayer_step_keeps_the_rates_of_the_first_batch():
    method = on(models.build("mlp", (4,), 3, hidden=2).double(), "flayer")
    p = {n: v + 1 for n, v in method.task.initial.items()} | {
        "v.extra": torch.ones(2, dtype=torch.float64)
    }
    g = {n: torch.full_like(v, 0.3) for n, v in p.items()}
    f = factors(method, g)

    def step(p, factor, at):  # it writes into what it is given
        return method.step(clone(p), {}, lambda _: {n: factor * v for n, v in g.items()}, at)

    q, memory = step(p, 1, Step(0, 0.1, {}))
    r, _ = step(q, 5, Step(1, 0.1, memory))
    for n in p:
        rate = 0.1 * float(f.get(n, 1.0))
        torch.testing.assert_close(q[n], p[n] - rate * g[n])
        torch.testing.assert_close(r[n], q[n] - 5 * rate * g[n])
    by_name, _ = step(p, 1, Step(0, {n: 0.2 for n in p}, {}))
    torch.testing.assert_close(by_name["fc.bias"], p["fc.bias"] - 0.2 * f["fc.bias"] * g["fc.bias"])


@pytest.mark.parametrize("executor", ["threads", "batched"])
def test_flayer_trains_every_client_with_its_own_rates(executor):
    args = dict(mixing=False, masking=False)
    method, data = setup(
        "flayer", bn=False, args=args, batch=100
    )  # one full batch: one step a round
    state = method.init()
    start = method.begin(state, ALL)
    end = method.local(Context(Engine(method, data, executor, 1), state, ALL, 0), start)
    for k in range(4):
        batch = Batch(*data.batch(torch.as_tensor(data.batch_indices(k, 0, batch=100))[0, 0]))
        mine = {n: v[k] for n, v in start.items()}
        g = torch.func.grad(lambda q, b=batch: method.loss(q, q, b))(mine)
        f = factors(method, g)
        for n in g:
            torch.testing.assert_close(
                end[n][k], mine[n] - CONFIG.lr * f[n] * g[n], rtol=1e-9, atol=1e-12
            )


def test_flayer_official_rates():
    for middle in (20.0, 1.0):
        method = cnn(mode="official", middle=middle)
        g = {n: torch.randn(v.shape) for n, v in method.task.initial.items()}
        f = factors(method, g)
        assert f["conv1.weight"] == f["conv1.bias"] == 1 and float(f["fc.weight"]) == pytest.approx(
            0.2
        )
        for idx, layer in ((1, "conv2"), (2, "fc1")):
            logs = [
                math.log(1 + 1 / float(g[f"{layer}.{part}"].norm())) for part in ("weight", "bias")
            ]
            by_hand = sum(middle * (1 + idx / 3 * v) for v in logs) / 2
            assert float(f[f"{layer}.weight"]) == pytest.approx(by_hand, rel=1e-5)
    # FLAYER, Eq. 3 and 4: eta = .005 at norm 1.
    unit = {n: torch.zeros_like(v) for n, v in method.task.initial.items()}
    for n in unit:
        unit[n].view(-1)[0] = 1.0
    f = factors(cnn(mode="official"), unit)
    assert [round(0.005 * float(f[n]), 2) for n in ("conv2.bias", "fc1.bias")] == [0.12, 0.15]


def test_flayer_paper_masks_keep_the_upper_layers_share():
    method = cnn()
    change = changes(method)
    masks = masks_of(method, change)
    for i, (layer, names) in enumerate(method.task.layers_by("child").items(), 1):
        m, d = flat(select(masks, names)), flat(select(change, names))
        assert (m.sum(1) == math.ceil(i * m.shape[1] / 4)).all(), layer
        assert all(d[k][m[k]].min() > d[k][~m[k]].max() for k in range(2) if not m[k].all())
    share = sum(int(m[0].sum()) for m in masks.values()) / sum(v[0].numel() for v in masks.values())
    assert round(100 * share, 1) == 73.5
    deep = on(Deep(), "flayer")
    kept = [
        int(flat(select(masks_of(deep, changes(deep)), v))[0].sum())
        for v in deep.task.layers_by("child").values()
    ]
    assert (
        kept[:4] == [3, 3, 4, 5] and kept[9] == 12 and kept[-2:] == [23, 21]
    )  # of 24, the last of 21


def test_flayer_ties_go_to_the_lower_index():
    x = torch.tensor(
        [[1.0, 2.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0], [5.0, 4.0, 3.0, 2.0, 1.0]]
    )
    expected = [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0]]
    assert largest(x, 3).int().tolist() == expected
    assert not largest(x, 0).any() and largest(x, 5).all()


@pytest.mark.parametrize("size", [50, SORTED, SORTED + 1])
@pytest.mark.parametrize("values", [1, 2, 5])
def test_the_largest_are_those_of_a_stable_sort(values, size):
    x = torch.randint(0, values, (3, 4, size), generator=torch.Generator().manual_seed(0)).double()
    x[0] = x[0].sqrt() * (x[0] > values - 2)  # most did not move
    for keep in (1, size // 2, size - 1):
        order = x.argsort(dim=-1, descending=True, stable=True)[..., :keep]
        assert torch.equal(
            largest(x, keep), torch.zeros_like(x, dtype=torch.bool).scatter_(-1, order, True)
        )


def test_flayer_official_masks_keep_what_the_code_keeps():
    method = cnn(mode="official")
    masks = masks_of(method, changes(method))
    per_kernel = {
        n: set(masks[n].flatten(3).sum(-1).view(-1).tolist())
        for n in ("conv1.weight", "conv2.weight")
    }
    assert per_kernel == {"conv1.weight": {3}, "conv2.weight": {6}}
    kept = {
        n: masks[n].flatten(1).sum(1).unique().tolist()
        for n in ("conv1.bias", "conv2.bias", "fc1.bias")
    }
    assert kept == {"conv1.bias": [4], "conv2.bias": [24], "fc1.bias": [320]}
    assert all(masks[n].all() for n in ("fc1.weight", "fc.weight", "fc.bias"))
    share = sum(int(m[0].sum()) for m in masks.values()) / sum(v[0].numel() for v in masks.values())
    assert round(100 * share, 1) == 95.3
    text = on(models.build("fasttext", (6,), 4, vocab=50), "flayer", mode="official")
    assert sum(int((~m[0]).sum()) for m in masks_of(text, changes(text)).values()) == 19


def test_flayer_official_bug_of_1x1_kernels():
    net = models.build("resnet18", (3, 32, 32), 100)
    change = changes(on(net, "flayer"), k=1)
    for fix in (True, False):
        masks = masks_of(on(net, "flayer", mode="official", fix_1x1=fix), change)
        down = [n for n in masks if n.endswith("downsample.0.weight")]
        assert len(down) == 3 and all(
            bool(masks[n].all()) == fix and bool(masks[n].any()) == fix for n in down
        )
    share = sum(int(m.sum()) for m in masks.values()) / sum(v.numel() for v in masks.values())
    assert round(100 * share, 1) == 75.3


def uploaded(agg, masks=None, seed=3):
    """The server before and after an upload of random models under masks {name: (3, *shape)}, and those models."""
    method = on(models.build("mlp", (4,), 3, hidden=2).double(), "flayer", agg=agg, mixing=False)
    state, sel = method.init(), torch.arange(3)
    start = method.begin(state, sel)
    end = start | random_updates(start, method.task.parameters, seed)
    before = {n: v.clone() for n, v in state.server.items()}
    masks = {n: torch.ones_like(end[n], dtype=torch.bool) for n in state.server} | (masks or {})
    after = method.upload(
        state, sel, start, end | prefixed("mask.", masks), torch.tensor([1.0, 2.0, 5.0]).double()
    )
    return before, after.server, end


def test_flayer_full_masks_are_fedavg():
    (_, a, end), (_, b, _) = uploaded("contributors"), uploaded("literal")
    mean = on(models.build("mlp", (4,), 3, hidden=2).double(), "fedavg")
    w = torch.tensor([1.0, 2.0, 5.0]).double()
    c = mean.upload(
        State({n: v[0] for n, v in end.items()}, {}), torch.arange(3), {}, end, w
    ).server
    assert_same(a, b)
    assert_same(a, c)


def test_flayer_server_averages_contributors_and_keeps_what_nobody_sent():
    masks = {
        "fc.bias": torch.tensor([[True, False, False], [True, True, False], [False, True, False]])
    }
    before, a, end = uploaded("contributors", masks)
    x, w = end["fc.bias"], (1.0, 2.0, 5.0)
    by_hand = torch.stack(
        [(x[0, 0] + 2 * x[1, 0]) / 3, (2 * x[1, 1] + 5 * x[2, 1]) / 7, before["fc.bias"][2]]
    )
    torch.testing.assert_close(a["fc.bias"], by_hand, rtol=1e-14, atol=0)
    _, b, _ = uploaded("literal", masks)
    zeros = torch.stack([(x[0, 0] + 2 * x[1, 0]) / 8, (2 * x[1, 1] + 5 * x[2, 1]) / 8, 0 * x[0, 0]])
    torch.testing.assert_close(b["fc.bias"], zeros)
    assert sum(w) == 8 and torch.equal(a["fc.weight"], b["fc.weight"])


def test_flayer_literal_rule_shrinks_the_base_and_contributors_do_not():
    sel, sizes = torch.arange(3), {}
    for agg in ("contributors", "literal"):
        method = cnn(agg=agg)
        state = method.init()
        start = method.begin(state, sel)
        one = {n: v[:1] for n, v in random_updates(start, method.task.parameters).items()}
        end = start | {n: v.expand(3, *v.shape[1:]) for n, v in one.items()}  # three equal clients
        masks = masks_of(method, {n: (end[n] - start[n]).abs() for n in one})
        after = method.upload(
            state, sel, start, end | prefixed("mask.", masks), torch.ones(3)
        ).server
        m, v = masks["conv1.weight"][0], one["conv1.weight"][0]
        expected = v * m if agg == "literal" else torch.where(m, v, start["conv1.weight"][0])
        torch.testing.assert_close(after["conv1.weight"], expected)
        sizes[agg] = float(after["conv1.weight"].abs().mean())
        kept = float(v.abs()[m].mean())
    assert (
        sizes["literal"] == pytest.approx(0.25 * kept, rel=0.02)
        and sizes["contributors"] > 1.5 * sizes["literal"]
    )


def test_flayer_traffic_counts_what_the_masks_let_through():
    method, data = setup("flayer")
    _, history, *_ = simulate(method, data, workers=1)
    layers = [
        sum(method.task.initial[n].numel() for n in v)
        for v in method.task.layers_by("child").values()
    ]
    kept = sum(math.ceil(max(i / len(layers), 0.1) * n - 1e-9) for i, n in enumerate(layers, 1))
    assert history.upload[1:] == [4 * kept * r for r in (1, 2, 3)]
    assert history.download[1] == 4 * sum(layers)


def test_flayer_masks_compare_with_where_clients_began():
    method, state = rounds("flayer", 2)
    start = method.begin(state, ALL)
    end = method.local(context(method, state, round=2), start)
    masks = unprefixed("mask.", end)
    assert set(masks) == set(method.task.parameters)
    again = masks_of(method, {n: (end[n] - start[n]).abs() for n in masks})
    assert_same(masks, again)
    flipped = masks_of(method, {n: (start[n] - end[n]).abs() for n in masks})
    assert_same(masks, flipped)


def test_flayer_official_trains_the_head_before_it_is_tested():
    method, state = rounds("flayer", 1, args={"mode": "official"})
    c = context(method, state)
    start = method.begin(state, ALL)
    served = method.personal(state, c)
    head = [n for n in method.task.parameters if n in method.task.head]
    assert len(c.calls) == 1 and c.calls[0]["only"] == head and c.calls[0]["epochs"] == 1
    for n in method.task.parameters:
        assert torch.equal(served[n], start[n]) == (n not in head), n
    c = context(method, state)
    end = method.local(c, start)
    assert len(c.calls) == 2 and all(torch.equal(c.calls[0]["end"][n], served[n]) for n in head)
    got = c._engine.evaluate(select(served, method.task.names), "test")
    torch.testing.assert_close(end["flayer.acc"], torch.tensor(got["correct"] / got["n"]))
    for n in masks_of(method, {n: end[n] for n in method.task.parameters}):
        changed = masks_of(method, {n: (end[n] - c.calls[0]["end"][n]).abs()})
        assert torch.equal(changed[n], end["mask." + n])


@pytest.mark.parametrize("part", [None, "rates", "masking"])
def test_flayer_official_trains_heads_that_are_not_mixed(
    part,
):  # Fig. 3: else one global model would be served
    args = dict.fromkeys(("mixing", "rates", "masking"), False) | ({part: True} if part else {})
    method, state = rounds("flayer", 1, args=args | {"mode": "official"})
    c = context(method, state)
    start, served = method.begin(state, ALL), method.personal(state, c)
    head = {n for n in method.task.parameters if n in method.task.head}
    assert not any(n.startswith("flayer.") for n in start) and not method.leaks_test
    for n in method.task.parameters:
        assert torch.equal(start[n][0], start[n][1]), "all clients begin with the global model"
        assert torch.equal(served[n], start[n]) == (n not in head)
    assert not torch.equal(served["fc.weight"][0], served["fc.weight"][1])
    c = context(method, state)
    method.local(c, start)
    assert [call.get("only") and set(call["only"]) for call in c.calls] == [head, None]
    assert all(torch.equal(c.calls[0]["end"][n], served[n]) for n in head)


PARTS = {"mixing": "flayer.", "rates": None, "masking": "mask."}


@pytest.mark.parametrize("part", PARTS)
def test_flayer_parts_alone(part):  # Fig. 3
    method, state = rounds("flayer", 2, args={p: p == part for p in PARTS})
    c = context(method, state, round=2)
    end = method.local(c, method.begin(state, ALL))
    for p, prefix in PARTS.items():
        if prefix:
            assert bool(unprefixed(prefix, end)) == (p == part)
    assert ("step" in c.calls[0]) == (part == "rates")
    assert not all(
        torch.equal(v, rounds("fedavg", 2)[1].server[n]) for n, v in state.server.items()
    )


MIXED = {"fedavg", "ditto", "fedamp"}  # methods whose server sends a head that nothing else adapts


@pytest.mark.parametrize("inner", INNER)
def test_flayer_around_other_methods(inner):
    args = {"inner": inner}
    method, state = rounds("flayer", 2, args=args)
    plain, other = rounds(inner, 2)
    extras = {f"flayer.{n}" for n in method.task.parameters if n in method.task.head} | {
        "flayer.acc"
    }
    assert set(state.clients) - set(other.clients) == (extras if inner in MIXED else set())
    assert state.server.keys() == other.server.keys() and isinstance(
        method.inner_method, type(plain)
    )
    c = context(method, state, round=2)
    start = method.begin(state, ALL)
    end = method.local(c, start)
    stepped = [call for call in c.calls if call.get("step") == method.step]
    assert len(stepped) == (2 if inner in ("ditto", "fedrep") else 1)
    masks = unprefixed("mask.", end)
    assert set(masks) == {
        n for n in end if n not in state.clients and method.carried(n) and "mask." not in n
    }
    for i, names in enumerate(method.task.layers_by("child").values(), 1):
        if part := {n: m for n, m in masks.items() if method.carried(n) in names}:
            m = flat(part)
            assert (
                m.sum(1) == max(math.ceil(i * m.shape[1] / 7), math.ceil(m.shape[1] / 10))
            ).all()
    assert all(v.shape[0] == 4 for v in method.personal(state, c).values())


@pytest.mark.parametrize(
    "args", [{"mode": "official"}, {"agg": "literal"}, *({"inner": n} for n in INNER[1:])], ids=str
)
def test_flayer_variants_agree_between_executors(args):
    (_, a), (_, b) = (rounds("flayer", 2, x, args=args) for x in ("threads", "batched"))
    assert_same(a, b, exact=False)


@pytest.mark.parametrize("inner", INNER)
def test_flayer_gives_new_clients_a_beginning(inner):
    method, state = rounds("flayer", 1, args={"inner": inner})
    if inner == "fedamp":
        with pytest.raises(ValueError, match="flayer keeps state for each client"):
            check_adopts(method)
        return
    check_adopts(method)
    method, new = joined(method, copy.deepcopy(state), 2)
    assert new.clients.keys() == state.clients.keys() and all(
        len(v) == 2 for v in new.clients.values()
    )
    p = method.begin(new, torch.arange(2))
    for n, v in new.server.items():
        assert torch.equal(p[n][0], v) or not v.is_floating_point(), (
            "A = 0: the global model as it is"
        )


@pytest.mark.parametrize(
    "name, bad",
    [
        ("fedala", {"eta": -1}),
        ("fedala", {"share": 0}),
        ("fedala", {"window": 0}),
        ("fedala", {"max_epochs": 0}),
        ("fedala", {"threshold": -1}),
        ("fedaghn", {"hn_sign": "up"}),
        ("fedaghn", {"ablation": "x"}),
        ("fedaghn", {"p0": -0.1}),
        ("fedaghn", {"h": -1}),
        ("flayer", {"mode": "new"}),
        ("flayer", {"agg": "mean"}),
        ("flayer", {"acc_on": "all"}),
        ("flayer", {"inner": "flayer"}),
        ("flayer", {"middle": 0}),
        ("flayer", {"mode": "official", "inner": "fedper"}),
        ("flayer", {"inner_args": {"nonsense": 1}}),
    ],
)
def test_illegal_values_are_refused_before_training(name, bad):
    with pytest.raises(
        ValueError, match=next(iter(bad)) if "inner_args" not in bad else "nonsense"
    ):
        setup(name, args=bad)
