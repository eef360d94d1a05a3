"""What an Experiment starts from is trained on the data that are said, or refused (docs/new_clients.md)."""

import doctest
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import pfl_core
from pfl_core import Experiment, Federation, run, sweep, tune
from pfl_core.experiments.store import load_result, said_to_be
from pfl_core.methods.base import METHODS, Method
from tests.core.methods.setting import OURS

SMALL = dict(model="mlp", model_args={"hidden": 8}, batch=8, lr=0.1, holdout=0.2)
OWN = Experiment(dataset="own", rounds=6, **SMALL)
DIGITS = Experiment(clients=2, partition="iid", max_samples=8, rounds=1, **SMALL)


def federation(flipped=False, k=3, d=6, val=False):
    """Two classes that a small network learns at once; `flipped`, with the opposite labels."""
    rng = np.random.default_rng(k)
    y = rng.integers(0, 2, 30 * k)
    x = rng.normal(size=(30 * k, d)).astype(np.float32) + 2 * (2 * y[:, None] - 1)
    each = np.arange(30 * k).reshape(k, 30)
    held = list(each[:, 16:20]) if val else None
    return Federation(x, 1 - y if flipped else y, list(each[:, :16]), held, list(each[:, 20:]))


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    return tmp_path / "store"


def accuracy(result):
    h = result.history
    at = (h.metric == "acc_pct") & (h.split == "test") & (h["average"] == "client")
    return h[at & (h.when == "before")].value.iloc[-1]


def pools_of(store):
    about = [json.loads(f.read_bytes()) for f in store.glob("*/experiment.json")]
    return sorted(a["meta"]["pool"] for a in about)


OLD, NEW = federation(), federation(flipped=True, k=4)


@pytest.mark.parametrize("adopt", [False, True])
@pytest.mark.parametrize("call", [run, lambda e, **how: sweep([e], **how)], ids=["run", "sweep"])
def test_the_source_is_trained_on_its_own_data(store, adopt, call):
    e = OWN.but(rounds=0, init_from=OWN, adopt=adopt)
    call(e, fed=NEW, source=OLD)
    assert pools_of(store) == sorted([OLD.checksum, NEW.checksum])
    opposite = run(e, fed=NEW, source=OLD)
    assert accuracy(opposite) < 20 and accuracy(run(e, fed=NEW, source=NEW)) > 80
    first = run(OWN.but(keep_models=True), fed=OLD)
    assert run(e, fed=NEW, source=first).id == opposite.id  # one computation, one id
    assert len(list(store.glob("*/experiment.json"))) == 4


@pytest.mark.parametrize("method", OURS)
def test_unsaid_data_are_refused_before_anything_is_trained(store, method):
    new = OWN.but(method=method, init_from=OWN, adopt=method == "pfedhn")
    named = DIGITS.but(method=method, init_from=OWN)
    behind = DIGITS.but(method=method, init_from=DIGITS.but(init_from=OWN))
    for e, how in ((new, {"fed": NEW}), (named, {}), (behind, {})):
        for call in (run, lambda e, **how: sweep([e], **how)):
            with pytest.raises(ValueError, match="nothing says which data; give its finished run"):
                call(e, **how)
    with pytest.raises(ValueError, match="nothing says which data"):
        tune(new, {"lr": [0.1]}, fed=federation(val=True))
    assert not list(store.glob("*")) if store.exists() else True


def test_one_id_whichever_way_the_source_is_given_and_another_for_other_data(store):
    first = run(OWN.but(keep_models=True), fed=OLD)
    ids = {}
    for name, e in {"as is": OWN, "keeping models": OWN.but(keep_models=True)}.items():
        new = OWN.but(rounds=1, init_from=e)
        results = [
            run(new, fed=NEW, source=s) for s in (first, OLD, pickle.loads(pickle.dumps(OLD)))
        ]
        assert len({r.id for r in results}) == 1
        ids[name] = results[0].id
        assert run(new, fed=NEW, source=NEW).id != results[0].id
        assert run(new, fed=NEW, source=federation(k=5)).id != results[0].id


def test_own_data_beyond_a_named_set_and_a_named_set_beyond_own_data(store):
    digits = Federation.dealt(*_digits(), "iid", clients=2)
    own = OWN.but(rounds=1)
    trained = run(own.but(keep_models=True), fed=digits)
    onto = DIGITS.but(init_from=own)
    assert run(onto, source=digits).id == run(onto, source=trained).id
    back = own.but(init_from=DIGITS)
    assert (
        run(back, fed=digits).id
        == run(back, fed=digits, source=run(DIGITS.but(keep_models=True))).id
    )
    with pytest.raises(ValueError, match="init_from has a data set with a name"):
        run(back, fed=digits, source=digits)
    # behind a named one
    chain = DIGITS.but(seed=1, init_from=onto)
    result = run(chain, source=digits)
    assert result.id == run(chain, source=run(onto.but(keep_models=True), source=trained)).id


def _digits():
    pool = pfl_core.load("digits")
    return pool.x[:60], pool.y[:60]


def test_a_chain_over_several_own_data(store):
    second = OWN.but(rounds=1, init_from=OWN)
    third = OWN.but(rounds=2, init_from=second)
    for source in (OLD, NEW):
        with pytest.raises(ValueError, match="several Experiments over own data; run init_from"):
            run(third, fed=NEW, source=source)
    one = run(OWN.but(keep_models=True), fed=OLD)
    two = run(second.but(keep_models=True), fed=NEW, source=one)
    whole = run(third, fed=OLD, source=two)
    assert whole.ok and said_to_be(whole.experiment.plain()).plain() == whole.experiment.plain()
    assert load_result(whole.folder, whole.experiment).id == whole.id
    other = run(OWN.but(keep_models=True, seed=1), fed=OLD)
    with pytest.raises(ValueError, match="differ in init_from"):
        run(
            third,
            fed=OLD,
            source=run(
                OWN.but(rounds=1, init_from=OWN.but(seed=1), keep_models=True),
                fed=NEW,
                source=other,
            ),
        )


REFUSED = {
    "source is a str; allowed is a Result": (dict(init_from=OWN), lambda r: "path"),
    "starts from nothing|none of these Experiments has init_from": (dict(), lambda r: OLD),
    "kept no models; run it with": (dict(init_from=OWN), lambda r: run(OWN.but(rounds=1), fed=OLD)),
    "they differ in lr": (dict(init_from=OWN.but(lr=0.05)), lambda r: r),
    "they differ in rounds, seed": (dict(init_from=OWN.but(rounds=1, seed=5)), lambda r: r),
    "clients=2.*give clients=3": (dict(init_from=OWN.but(clients=2)), lambda r: OLD),
    "they differ in clients": (dict(init_from=OWN.but(clients=2)), lambda r: r),
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_source_that_does_not_fit_is_refused(store, words):
    changes, source = REFUSED[words]
    given = source(run(OWN.but(keep_models=True), fed=OLD))
    before = pools_of(store)
    for call in (run, lambda e, **how: sweep([e], **how)):
        with pytest.raises((ValueError, TypeError), match=words):
            call(OWN.but(rounds=0, **changes), fed=NEW, source=given)
    assert pools_of(store) == before


def test_another_shape_of_samples_is_refused_before_the_source_is_trained(store):
    with pytest.raises(ValueError, match="init_from's model has fc1.weight of shape"):
        run(OWN.but(rounds=1, init_from=OWN), fed=NEW, source=federation(d=7))
    assert pools_of(store) == []


def test_a_failed_source_is_refused(store):
    broken = run(OWN.but(keep_models=True, lr=1e30, rounds=3), fed=OLD)
    assert not broken.ok
    with pytest.raises(ValueError, match="it has no models"):
        run(OWN.but(init_from=broken.experiment), fed=NEW, source=broken)


def test_a_damaged_source_is_left_where_it_is(store):
    first = run(OWN.but(keep_models=True), fed=OLD)
    (first.folder / "models.pt").write_bytes(b"damage")
    with pytest.raises(ValueError, match="models.pt is damaged"):
        run(OWN.but(init_from=OWN), fed=NEW, source=first)
    assert first.folder.is_dir()


def test_a_source_that_is_pruned_between_its_end_and_its_use_is_computed_again(store, monkeypatch):
    from pfl_core.experiments import store as runs

    kept, gone = runs.Result.kept, []

    def pruned(self, name, device="cpu"):
        if not gone:
            gone.append(self.folder.rename(self.folder.with_name("away")))
        return kept(self, name, device)

    monkeypatch.setattr(runs.Result, "kept", pruned)
    e = DIGITS.but(init_from=DIGITS.but(seed=3))
    assert run(e).ok and gone


def test_a_sweep_hands_its_source_to_those_that_start_from_it(store):
    first = run(OWN.but(keep_models=True), fed=OLD)
    warm = OWN.but(rounds=0, init_from=OWN)
    rows = sweep([OWN.but(rounds=0), warm, warm.but(adopt=True)], fed=NEW, source=first)
    assert rows.run.nunique() == 3
    with pytest.raises(LookupError, match="1 runs are not finished"):
        sweep([warm, warm.but(lr=0.3)], fed=NEW, source=first, compute=False)
    again = sweep([warm], fed=NEW, source=first, compute=False)
    assert set(again.run) < set(rows.run)
    for how in (dict(jobs=2), dict(on="ray")):
        with pytest.raises(ValueError, match="the runs go one by one"):
            sweep([warm], fed=NEW, source=first, **how)
    with pytest.raises(ValueError, match="none of these Experiments has init_from"):
        sweep([OWN], fed=NEW, source=first)


def test_tune_with_a_source(store):
    fed = federation(val=True)
    best, rows = tune(
        OWN.but(rounds=1), {"init_from": [OWN, OWN.but(rounds=5)], "lr": [0.1]}, fed=fed, source=OLD
    )
    assert rows.run.nunique() == 2 and best.init_from.rounds in (5, 6)


def dealt(seed):
    x, y = federation(k=8).x, federation(k=8).y
    return Federation.dealt(x, y, "iid", clients=3, seed=seed)


PART = DIGITS.but(partition_args={"of": 4})
SKEWED = DIGITS.but(partition="dirichlet")
LEAKS = {
    "another seed": (SKEWED, SKEWED.but(seed=1), {}),
    "a source of the source": (SKEWED, SKEWED.but(seed=1, init_from=SKEWED.but(seed=1)), {}),
    "another partition": (SKEWED, DIGITS, {}),
    "relabelled": (
        DIGITS,
        DIGITS.but(seed=1, partition="groups", partition_args={"groups": 2}),
        {},
    ),
    "a Federation of another seed": (OWN, OWN.but(rounds=0), dict(fed=dealt(1), source=dealt(0))),
}
CLEAN = {
    "the same seed": (SKEWED, SKEWED, {}),
    "untrained": (SKEWED.but(rounds=0), SKEWED.but(seed=1), {}),
    "one test set": (DIGITS, DIGITS.but(seed=1), {}),
    "one partition_seed": (SKEWED.but(partition_seed=4), SKEWED.but(seed=1, partition_seed=4), {}),
    "held-out clients": (PART, PART.but(partition_args={"of": 4, "first": 2}), {}),
    "the same Federation": (OWN, OWN.but(rounds=0), dict(fed=dealt(1), source=dealt(1))),
    "another Federation": (OWN, OWN.but(rounds=0), dict(fed=NEW, source=OLD)),
}


def started(source, e, how):
    """The run of an Experiment whose first start is `source`, all samples of each client taken."""
    if e.earlier:
        return run(e.but(max_samples=0, init_from=started_at(e.earlier, source)), **how)
    return run(started_at(e, source), **how)


def started_at(e, source):
    return e.but(max_samples=0, init_from=source.but(max_samples=0))


@pytest.mark.parametrize("case", LEAKS)
def test_a_start_that_was_trained_on_test_samples_is_said(store, case):
    with pytest.warns(UserWarning, match=r"init_from was trained on \d+ of the \d+ test samples"):
        meta = started(*LEAKS[case]).meta
    assert meta["leaks_test"] and "init_from was trained on" in meta["warned"]


@pytest.mark.parametrize("case", CLEAN)
def test_a_start_that_saw_no_test_sample_warns_of_nothing(store, case):
    meta = started(*CLEAN[case]).meta
    assert not meta["leaks_test"] and "warned" not in meta


def test_pfedhn_with_its_own_and_with_new_clients_warns_of_nothing(store):
    args = dict(method="pfedhn", method_args={"n_hidden": 0, "dim": 2})
    source = PART.but(**args)
    again = {"n_hidden": 0, "dim": 2, "novel": "trained"}
    for more in (dict(method_args=again), dict(partition_args={"of": 4, "first": 2})):
        assert not run(source.but(seed=0, init_from=source, adopt=True, **more)).meta["leaks_test"]


PAGE = Path(__file__).parents[3] / "docs" / "new_clients.md"


def test_the_page_is_right(store):
    assert PAGE.name in (PAGE.parent / "README.md").read_text()
    known = {n: getattr(pfl_core, n) for n in pfl_core.__all__} | {"np": np}
    text = PAGE.read_text().replace("```", "\n")
    example = doctest.DocTestParser().get_doctest(text, known, PAGE.name, str(PAGE), 0)
    assert len(example.examples) > 5
    said = []
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    doctest.DocTestRunner(verbose=False, optionflags=options).run(example, out=said.append)
    assert not said, "".join(said)


# ---------------------------------------------------------------- what a start changes


@pytest.mark.parametrize("name", OURS)
def test_clients_begin_with_what_is_given_or_it_is_refused(name, store):
    """No number of a start is lost: the body that clients begin with is the source's."""
    first = DIGITS.but(rounds=1, lr=0.1)
    e = first.but(method=name, method_args=None, rounds=0, keep_models=True, init_from=first)
    try:
        kept = run(e).kept("models.pt")
    except ValueError as error:
        assert name in ("pfedhn", "pfedhn_pc") and "would change nothing in" in str(error)
        return
    given = run(first.but(keep_models=True)).model(0).state_dict()
    head = {"fc.weight", "fc.bias"}
    body = given.keys() - head
    assert body and name not in ("pfedhn", "pfedhn_pc")
    begun = {n: v[0] for part in ("models", "clients") for n, v in kept[part].items()}
    begun |= kept["server"]  # models are what is served: of Per-FedAvg adapted ones
    for n in body:
        torch.testing.assert_close(begun[n], given[n])


@pytest.mark.parametrize("source", ["Experiment", "file"])
def test_heads_are_not_drawn_over_those_that_are_given(source, store, tmp_path):
    first = DIGITS.but(rounds=1, keep_models=True)
    path = tmp_path / "w.pt"
    torch.save(run(first).model(0).state_dict(), path)
    e = DIGITS.but(rounds=0, init_from=path if source == "file" else first, head_init="own")
    with pytest.raises(ValueError, match="draws a head for each client, in place of"):
        run(e)
    assert run(e.but(new_head=True)).ok
    if source == "Experiment":
        assert run(e.but(adopt=True)).ok


@pytest.mark.parametrize("adopt", [True, False])
@pytest.mark.parametrize(("there", "here"), [("float32", "float64"), ("float64", "float32")])
@pytest.mark.parametrize("method", ["fedavg", "fedper", "pfedhn"])
def test_a_start_takes_the_type_of_the_run(method, there, here, adopt, store):
    if method == "pfedhn" and not adopt:
        return  # it begins with no start
    first = DIGITS.but(method=method, rounds=1, dtype=there)
    e = first.but(dtype=here, rounds=1, init_from=first, adopt=adopt)
    loss = "metric == 'loss' and when == 'before' and rounds == 0"
    values = [run(x).rows.query(loss).value.item() for x in (e, e.but(dtype=there))]
    assert values[0] == pytest.approx(values[1], rel=1e-4)


@pytest.mark.parametrize("name", OURS)
def test_a_server_does_not_learn_from_new_clients(name, store):
    first = DIGITS.but(method=name, method_args=None, rounds=1, keep_models=True)
    e = first.but(rounds=2, init_from=first, adopt=True)
    try:
        joined = run(e)
    except ValueError as error:
        assert "cannot adopt new ones" in str(error)
        return
    there, here = run(first).kept("models.pt"), joined.kept("models.pt")
    assert here["server"].keys() == there["server"].keys()
    for n, v in there["server"].items():
        assert torch.equal(v, here["server"][n]), n
    if not METHODS[name].adopts:
        assert not joined.rows.query("metric == 'upload_bytes'").value.any()


def test_the_trial_of_a_start_moves_no_generator(store):
    def init(self):
        state = Method.init(self)
        state.extra["drawn"] = torch.rand(3, dtype=self.task.dtype)
        return state

    type("DrawsAtInit", (Method,), {"name": "draws_at_init", "init": init, "__module__": __name__})
    before = torch.get_rng_state()
    first = DIGITS.but(method="draws_at_init")
    assert run(first.but(rounds=0, init_from=first)).ok
    assert torch.equal(torch.get_rng_state(), before)
    del METHODS["draws_at_init"]
