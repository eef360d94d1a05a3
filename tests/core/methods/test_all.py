"""One suite over the whole registry: what every method must do, whatever its rule. Named exceptions are in EXCEPT, with their reason."""

import copy
import dataclasses
import inspect
import io
import itertools
import re

import pytest
import torch
from torch import nn

from pfl_core.anatomy import examined
from pfl_core.engine.context import Context
from pfl_core.engine.engine import Engine
from pfl_core.engine.participation import sample
from pfl_core.engine.simulate import FINISH, simulate
from pfl_core.methods.base import METHODS, State, check_adopts, make_method
from pfl_core.methods.task import Task
from pfl_core.util.draws import seeded
from tests.core.methods.setting import OURS, assert_same, client_data, joined, leaves, rounds, setup

OWN_DRAW = "what a client starts from (embedding, hypernetwork) or its noise is drawn by its id"
# (method, check): why the check does not apply
EXCEPT: dict[tuple[str, str], str] = {
    (m, "relabelled"): OWN_DRAW for m in ("fedcp", "pfedhn", "pfedhn_pc", "pfedla", "heurpfedla")
}


def applies(method, check):
    if (method, check) in EXCEPT:
        assert EXCEPT[method, check]
        return False
    return True


@pytest.mark.parametrize("name", OURS)
def test_documented(name):
    doc, module = (
        METHODS[name].__doc__,
        __import__(METHODS[name].__module__, fromlist=["x"]).__doc__,
    )
    assert doc and doc.splitlines()[0].endswith((".", ")."))
    assert "Differs from" in module and (
        name in ("local",) or any(w in module for w in ("arXiv", "20"))
    )


@pytest.mark.parametrize("name", OURS)
def test_hyper_parameters_say_what_they_are(name):
    for f in dataclasses.fields(METHODS[name]):
        assert f.metadata["doc"] and not f.metadata["doc"].endswith("."), f.name
        assert f.metadata["doc"] in inspect.getdoc(METHODS[name]), "help() shows it"
        fits = f.metadata.get("allowed")
        default = getattr(METHODS[name](), f.name)
        assert fits is None or default is None or default in fits, f.name
        if isinstance(fits, tuple) or fits is not None and str(fits):
            bad = "no such choice" if isinstance(fits, tuple) else beyond(fits)
            with pytest.raises(ValueError, match=rf"^{name}\({f.name}=.*\): allowed is "):
                make_method(name, **{f.name: int(bad) if "int" in str(f.type) else bad})


def beyond(fits):
    """A number outside of a range."""
    return next(v for v in (-1e9, 1e9) if v not in fits)


@pytest.mark.parametrize("name", OURS)
def test_who_keeps_no_state_for_clients_that_it_knows_takes_in_new_ones(name):
    method, state = rounds(name, n=1)
    if method.init().extra and not method.adopts:
        with pytest.raises(ValueError, match=f"{name} keeps state for each client it knows"):
            check_adopts(method)
        return
    check_adopts(method)
    before = copy.deepcopy(state)
    new, fresh = joined(method, state, 2)
    assert fresh.round == state.round and fresh.clients.keys() == state.clients.keys()
    assert_same(fresh.server, before.server)
    for n, v in fresh.clients.items():
        assert len(v) == 2 and torch.equal(v[0], v[1]), n
    served = new.serve(new.begin(fresh, torch.arange(2)))
    assert set(new.task.names) <= served.keys() and all(len(v) == 2 for v in served.values())
    assert_same(state, before)


@pytest.mark.parametrize("name", OURS)
def test_executors_agree(name):
    if applies(name, "executors"):
        (_, a), (_, b) = (
            rounds(name, executor=x, participation=0.75) for x in ("threads", "batched")
        )
        assert_same(a, b, exact=False)


LINEAR = set("fedas fedcp feddbe fedpac fedproto fedrod gpfl pfedfda".split())


class Shapes(nn.Module):
    """Parameters of any shape: single numbers, no number at all, and a layer without a bias."""

    def __init__(self, classes, hot):
        super().__init__()
        if hot:  # of the head
            self.heat = nn.Parameter(torch.tensor(2.0))
        self.scale, self.none = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(0, 2))
        self.body, self.fc = nn.Linear(256, 4, bias=False), nn.Linear(4, classes)

    def forward(self, x):
        scores = self.fc((self.scale * self.body(x.flatten(1))).tanh())
        return scores * self.heat if hasattr(self, "heat") else scores


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize("executor", ["threads", "batched"])
@pytest.mark.parametrize("name", OURS)
def test_parameters_of_any_shape(name, executor, hot):
    method, data = setup(name)
    with seeded(0):
        net = Shapes(3, hot).to(data.dtype)
    t, anatomy = method.task, examined("shapes", net, data.extremes(), 3, 6)
    task = Task(net, t.n, t.label_counts, t.config, anatomy=anatomy)
    if hot and name in LINEAR:  # the scores are no Linear's
        with pytest.raises(ValueError, match="last layer is an nn.Linear that gives the scores"):
            method.bind(task)
        return
    method = method.bind(task)
    state, history, *_ = simulate(method, data, executor=executor, workers=1)
    assert history.rounds == [0, 1, 2, 3]
    for path, v in leaves(state):
        assert not v.is_floating_point() or v.isfinite().all(), path


class Named(nn.Module):
    """Layers side by side, each times a number, and buffers that shift their sum, under names of one's own."""

    def __init__(self, modules=("first",), parameters=("scale",), buffers=("shift",)):
        super().__init__()
        self.names = modules, parameters, buffers
        for name in parameters:
            self.register_parameter(name, nn.Parameter(torch.tensor([0.5])))
        for name in buffers:
            self.register_buffer(name, torch.zeros(4))
        for name in modules:
            self.add_module(name, nn.Linear(256, 4))
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        layers, scales, shifts = ([getattr(self, n) for n in names] for names in self.names)
        sides = [s * layer(x.flatten(1)) for s, layer in zip(scales, layers, strict=True)]
        return self.fc((sum(sides) + sum(shifts)).tanh())


USUAL = [[f"{kind}{i}" for i in range(n)] for kind, n in (("a", 10), ("b", 10), ("c", 3))]
# Each name of each kind once, and no name twice in one network.
OTHERS = [
    ("own v w m0 global cpn sent opt all core", "m alpha acc count mean proto seen risk dr gce"),
    (
        "theta base near mask flayer cov cloud sum next head",
        "h v w context id known p q n z",
        "alpha count mean",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_names_of_layers_change_nothing(name):
    """A network with names under which a method keeps things is refused, or trained as another one."""

    def losses(names):
        method, data = setup(name, rounds=2, finetune=[{"epochs": 1}])
        with seeded(0):
            net, t = Named(*names).to(data.dtype), method.task
        method = method.bind(Task(net, t.n, t.label_counts, t.config))
        history = simulate(method, data, workers=1)[1]
        return {k: torch.stack(v) for k, v in history.evals.items()} | history.tuned

    usual = losses(USUAL)
    for others in OTHERS:
        names = [n.split() for n in others] + USUAL[len(others) :]
        found = None
        while found is None:
            try:
                found = losses(names)
            except ValueError as error:
                said = re.search("keeps something of its own under the name '(.+?)'", str(error))
                assert said and said[1] in itertools.chain(*names), error
                names = [  # the others may be trained
                    [u if n == said[1] else n for n, u in zip(*pair, strict=True)]
                    for pair in zip(names, USUAL, strict=True)
                ]
        for key, v in usual.items():
            torch.testing.assert_close(found[key], v, msg=f"{names}: {key}")


@pytest.mark.parametrize("name", OURS)
def test_usual_names_of_layers_are_no_methods_own(name):
    method, data = setup(name)
    t = method.task
    for module in ("base", "body", "head", "features", "model", "encoder", "layer1", "m1"):
        method.bind(Task(Named([module]).to(data.dtype), t.n, t.label_counts, t.config))


@pytest.mark.parametrize("name", OURS)
def test_state_survives_a_checkpoint(name):
    method, data = setup(name)
    whole = simulate(method, data, workers=1)
    half, *_ = simulate(
        method, data, workers=1, on_round=lambda r, history: FINISH if r == 2 else None
    )
    file = io.BytesIO()
    torch.save(vars(half), file)
    file.seek(0)
    resumed = simulate(method, data, workers=2, state=State(**torch.load(file, weights_only=True)))
    assert_same(whole[0], resumed[0])
    for key, series in resumed[1].evals.items():
        assert torch.equal(whole[1].evals[key][-1], series[-1]), key


@pytest.mark.parametrize("name", OURS)
def test_who_is_not_sampled_keeps_its_state(name):
    method, data = setup(name, participation=0.5, rounds=2, eval_after=False)
    _, state = rounds(name, n=1)
    before = copy.deepcopy(state)
    idle = sorted(set(range(4)) - set(sample(method.task.config, 4, 1).tolist()))
    after, *_ = simulate(method, data, state=state, workers=1)
    for n, v in after.clients.items():
        assert torch.equal(v[idle], before.clients[n][idle]), n


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("buffers", ["local", "average", "reset"])
def test_buffer_policies(name, buffers):
    method, state = rounds(name, n=1, buffers=buffers)
    for path, v in leaves(state):
        assert not v.is_floating_point() or torch.isfinite(v).all(), path


@pytest.mark.parametrize("name", OURS)
def test_one_participant_and_one_client(name):
    method, data = setup(name, data=client_data(sizes=(9,)))
    state, history, *_ = simulate(method, data, workers=1)
    method, data = setup(name, participation=0.25)
    state, history, *_ = simulate(method, data, workers=1)
    assert history.rounds == [0, 1, 2, 3]


@pytest.mark.parametrize("name", OURS)
def test_evaluation_changes_nothing(name):
    method, state = rounds(name, n=1)
    _, data = setup(name)
    engine = Engine(method, data, "threads", 1)
    before = copy.deepcopy(state)
    c = Context(engine, state, torch.arange(4), 1)
    with torch.no_grad():
        first = {n: v.clone() for n, v in method.personal(state, c).items()}
        second = method.personal(state, c)
    assert_same(before, state)
    assert all(torch.equal(first[n], second[n]) for n in method.task.names)
    assert all(len(v) == 4 for v in first.values())


@pytest.mark.parametrize("name", OURS)
def test_local_leaves_start_alone(name):
    method, state = rounds(name, n=1)
    _, data = setup(name)
    engine = Engine(method, data, "threads", 1)
    before = copy.deepcopy(state)
    with torch.no_grad():
        start = method.begin(state, torch.arange(4))
        kept = {n: v.clone() for n, v in start.items()}
        method.local(Context(engine, state, torch.arange(4), 1), start)
    assert all(torch.equal(start[n], v) for n, v in kept.items())
    assert_same(before, state)


@pytest.mark.parametrize("name", OURS)
def test_traffic_counts_whole_scalars(name):
    method, data = setup(name)
    _, history, *_ = simulate(method, data, workers=1)
    for series in (history.download, history.upload):
        assert series[0] == 0 and all(int(v) == v for v in series)
        assert (series[-1] == 0) == (name == "local")


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_learns(name):
    if not applies(name, "learns"):
        return
    # Easy data: a bar's height is the label. Chance is 33 %; who learns nothing stays there.
    method, data = setup(
        name,
        bn=False,
        data=client_data(sizes=(40, 30, 36, 24), dtype=torch.float32),
        rounds=12,
        epochs=2,
        lr=0.1,
        eval_every=12,
    )
    _, history, before, after, _ = simulate(method, data, workers=2)
    n = sum(len(i) for i in data.index["test"])
    best = max(float(history.evals[f"{w}/test/correct"][-1].sum()) / n for w in ("before", "after"))
    assert best > 0.6, f"{name}: {100 * best:.0f} % on data that are easy"


ORDER = [2, 0, 3, 1]


def relabelled(data):
    """The same clients under other ids: client k here is client ORDER[k] there, with its data and its random draws."""
    other, indices = copy.copy(data), data.batch_indices
    other.index = {s: [lists[k] for k in ORDER] for s, lists in data.index.items()}
    other.n, other.label_counts = data.n[ORDER], data.label_counts[ORDER]
    other.batch_indices = lambda k, *a, **kw: indices(ORDER[k], *a, **kw)
    return other


@pytest.mark.parametrize("name", OURS)
def test_relabelled_clients_get_the_same_models(name):
    if not applies(name, "relabelled"):
        return
    data = client_data()
    served = []
    for d in (data, relabelled(data)):
        method, _ = setup(name, data=d, rounds=2)
        served.append(simulate(method, d, workers=2)[2])
    for n in method.task.parameters:
        torch.testing.assert_close(
            served[0][n][ORDER], served[1][n], rtol=1e-7, atol=1e-9, msg=lambda m, n=n: f"{n}: {m}"
        )
