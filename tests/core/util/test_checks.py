"""What is refused before anything is trained: numbers that no run can hold, names that no line can, work by the thousand."""

import dataclasses
import gc
import weakref

import numpy as np
import pytest
import torch

from pfl_core import (
    Experiment,
    Federation,
    Method,
    register_dataset,
    register_model,
    register_partition,
    run,
)
from pfl_core.data.client_data import PLANS
from pfl_core.experiments import keys, prepare
from pfl_core.methods.base import METHODS
from pfl_core.util import checks
from pfl_papers.evidence import committed

FEW = dict(clients=2, model="mlp", rounds=1, partition="iid", max_samples=40)

# -- numbers -------------------------------------------------------------------------------------------------------------

HYPER = [
    (name, f.name, f.default)
    for name, method in sorted(METHODS.items())
    for f in dataclasses.fields(method)
    if type(f.default) is float
]


@pytest.mark.parametrize("field", ["lr", "weight_decay", "clip", "momentum"])
@pytest.mark.parametrize("value", [1e39, 3.5e38, 1e-46, 1e-300])
def test_a_number_that_float32_does_not_hold_is_refused(field, value):
    if field == "momentum" and value > 1:
        return
    with pytest.raises(ValueError, match=rf"Experiment\({field}=.*float32 makes (infinity|0) of"):
        Experiment(**{field: value})
    kept = getattr(Experiment(**{field: value}, dtype="float64"), field)
    assert kept == value


@pytest.mark.parametrize("method, name, default", HYPER)
def test_so_is_a_hyper_parameter(method, name, default):
    for value in (1e39, 1e-50):
        with pytest.raises(ValueError, match=rf"{name}.*(float32 makes|allowed is)"):
            Experiment(method=method, method_args={name: value})
    assert Experiment(method=method, method_args={name: default}).method == method


def test_so_are_options_of_a_model_and_numbers_inside_of_lists():
    register_model("options_of_any_kind", lambda shape, classes, **options: torch.nn.Linear(1, 1))
    for options in ({"scale": 1e39}, {"scales": [1.0, {"deep": [1e-50]}]}):
        with pytest.raises(ValueError, match="float32 makes"):
            Experiment(model="options_of_any_kind", model_args=options)
        Experiment(model="options_of_any_kind", model_args=options, dtype="float64")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_largest_and_smallest_number_of_a_dtype_are_held(dtype):
    about = np.finfo(dtype)
    for value in (float(about.max), float(about.smallest_subnormal), 0.0):
        made = Experiment(lr=value, dtype=dtype)
        held = torch.tensor(made.lr, dtype=getattr(torch, dtype))
        assert held.isfinite() and (held == 0) == (value == 0)


INTEGERS = [f.name for f in dataclasses.fields(Experiment) if "int" in str(f.type).split(" | ")]


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [2**64, 10**30 + 1, 10**5000], ids=["65", "100", "many"])
def test_an_integer_has_64_bits(name, value):
    with pytest.raises(ValueError, match=rf"{name}.* bits, allowed are 64"):
        Experiment(**{name: value})


def test_so_has_an_integer_of_a_partition_and_in_place_of_a_float():
    with pytest.raises(ValueError, match="lr.* 100 bits, allowed are 64; write .* as a float"):
        Experiment(lr=10**30 + 1)
    for args in ({"of": 10**30}, {"alpha": 10**30 + 1}):
        with pytest.raises(ValueError, match="allowed are 64"):
            Experiment(partition_args=args)


# -- names and labels ----------------------------------------------------------------------------------------------------

X, Y = np.zeros((4, 2, 2), np.uint8), np.arange(4) % 2


def names_a_method(name):
    type("Named", (Method,), {"name": name, "__module__": __name__})


NAMING = {
    "tag": lambda name: Experiment(tags={"row": name}),
    "method": names_a_method,
    "model": lambda name: register_model(name, lambda input_shape, classes: torch.nn.Linear(1, 1)),
    "partition": lambda name: register_partition(name, lambda pool, clients, rng: None),
    "dataset": lambda name: register_dataset(name, lambda: None),
    "federation": lambda name: Federation(X, Y, train=[[0, 1], [2, 3]], name=name),
    "paper": lambda name: committed.save(None, name, "quick", "digits"),
    "profile": lambda name: committed.save(None, "own", name, "digits"),
}
STEERING = [
    "a\nb",
    "a\x00",
    "\x1b[2Jgone",
    "a\rb",
    "a\tb",
    "\x9b1m",
    "a\u2028b",
    "\u202eabc",
    "\ud800",
]


@pytest.mark.parametrize("kind", NAMING)
@pytest.mark.parametrize("name", STEERING, ids=ascii)
def test_a_name_is_one_printed_line(kind, name):
    with pytest.raises(ValueError, match="without control characters") as seen:
        NAMING[kind](name)
    assert str(seen.value).isprintable()


@pytest.mark.parametrize("name", ["FedAvg, α = 0.1 (ours)", "联邦", "👩\u200d🔬", "a\u00a0b"])
def test_a_name_in_any_script_is_taken(name):
    assert Experiment(tags={"row": name}).tags["row"] == name
    assert NAMING["federation"](name).name == name


@pytest.mark.parametrize("name", ["../up", "a/b", "a\\b", "C:x", ".hidden", ""])
def test_rows_are_kept_in_a_folder_of_their_own(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "runs"))
    with pytest.raises(ValueError, match="allowed is a"):
        committed.save(None, name, "quick", "digits")
    assert not list(tmp_path.iterdir())


# -- batches that repeat samples without an end --------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
def test_a_batch_far_above_all_samples_is_refused(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "build_method", lambda *args: pytest.fail("it went on"))
    e = Experiment(**FEW, plan=plan, batch=10**6)
    said = r"batch=1000000\): no client trains on more than 40 samples.*batch=40 has all"
    with pytest.raises(ValueError, match=said):
        run(e, store=tmp_path)
    with pytest.raises(ValueError, match="no client trains on more than 36 samples"):
        run(e.but(holdout=0.1), store=tmp_path)


@pytest.mark.parametrize("batch", [40, 64, 1024])
def test_a_batch_somewhat_above_is_taken(batch, tmp_path):
    assert run(Experiment(**FEW, batch=batch), store=tmp_path).ok


# -- long chains of init_from --------------------------------------------------------------------------------------------


def chain(links):
    e = Experiment(clients=3, rounds=1)
    for i in range(links):
        e = Experiment(clients=3, rounds=1, seed=i, init_from=e)
    return e


def calls(monkeypatch, owner, name, does):
    """How often a function is called while `does()` runs."""
    seen, whole = [], getattr(owner, name)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, lambda *args: seen.append(1) or whole(*args))
        does()
    return len(seen)


@pytest.mark.parametrize("links", [0, 1, 20])
def test_each_link_of_a_chain_is_looked_at_once(links, monkeypatch):
    e, again = chain(links), Experiment.read(chain(links).plain())
    for does in (lambda: e.id, e.canonical, lambda: e.course_for("")):
        assert calls(monkeypatch, keys, "canonical", does) == links + 1
    another = lambda: e.but(lr=0.5)  # noqa: E731
    assert calls(monkeypatch, Experiment, "__post_init__", another) == 1
    assert calls(monkeypatch, Experiment, "_alone", another) == 1
    assert calls(monkeypatch, Experiment, "__post_init__", again.checked) == links + 1
    assert again.id == e.id


def test_a_chain_of_hundreds_has_an_id():
    e = chain(400)
    assert Experiment.from_plain(e.plain()).id == Experiment.read(e.plain()).id == e.id
    assert e.init_from.but(keep_models=True).id != e.init_from.id
    assert e.but(init_from=e.init_from.but(keep_models=True)).id == e.id


# -- whole numbers of any library ----------------------------------------------------------------------------------------

WHOLE = [int, np.int64, np.uint8, torch.tensor]
NOT_WHOLE = [True, np.True_, 1.0, np.float64(1), "1", None, [1], np.array([1]), torch.tensor(1.0)]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    e = Experiment(**FEW, keep_models=True)
    return run(e, store=tmp_path_factory.mktemp("runs"), device="cpu")


@pytest.mark.parametrize("kind", WHOLE)
def test_a_client_has_a_number_of_any_library(kind, kept, tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (3, 28, 28), dtype=np.uint8)
    np.testing.assert_array_equal(kept.predict(kind(1), x), kept.predict(1, x))
    kept.save(kind(1), tmp_path / "model.pt")
    for n, v in kept.model(kind(1)).state_dict().items():
        assert torch.equal(v, kept.model(1).state_dict()[n]), n


@pytest.mark.parametrize("client", [*NOT_WHOLE, -1, 2], ids=repr)
def test_what_is_no_client_is_refused(client, kept, tmp_path):
    for use in (kept.model, lambda k: kept.save(k, tmp_path / "model.pt")):
        with pytest.raises(ValueError, match=r"is unknown; this run has clients 0\.\.1"):
            use(client)


@pytest.mark.parametrize("workers", [w for w in NOT_WHOLE if w is not None], ids=repr)
def test_a_count_is_a_whole_number(workers):
    with pytest.raises(ValueError, match="allowed is an integer >= 1"):
        run(Experiment(**FEW), workers=workers)


def test_what_a_function_takes_is_known_without_keeping_it():
    def scheme(pool, clients, rng, share: float = 0.5):
        return None

    class NoHash:
        __hash__ = None

        def __call__(self, pool, share: float = 0.5):
            return None

    for given in (scheme, NoHash()):
        for _ in range(2):
            assert [*checks.parameters(given)][-1] == "share"
    kept = weakref.ref(scheme)
    del scheme, given
    gc.collect()
    assert kept() is None
