"""Probes: CKA in both forms, what is recorded when, and arrays that survive a stop and stand beside committed rows."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfl_core import Experiment, run, sweep
from pfl_core.analysis.stats import shares
from pfl_core.engine import probes
from pfl_core.engine.simulate import Interrupted
from pfl_core.experiments import workers
from pfl_core.experiments.build import client_data
from pfl_papers import places
from pfl_papers.evidence import committed

SMALL = dict(
    dataset="digits",
    partition="pfedla_noniid1",
    clients=4,
    model="mlp",
    batch=8,
    lr=0.1,
    max_samples=24,
    rounds=6,
)
SMALL |= dict(eval_every=2)


def experiment(method="pfedla", **changes):
    return Experiment(**SMALL | dict(method=method) | changes)


# ---------------------------------------------------------------- CKA


def linear_cka(x, y):
    """Linear CKA of activations x (n, p) and y (n, q) by features (Kornblith et al., ICML 2019)."""
    x, y = x - x.mean(0), y - y.mean(0)
    return float((y.T @ x).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm()))


def gram_cka(x, y):
    """The same by samples, as the probe takes it."""
    return float((probes._unit_gram(x) * probes._unit_gram(y)).sum())


@given(st.integers(0, 10_000), st.integers(2, 9), st.integers(1, 12), st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_both_forms_of_cka_agree_and_lie_between_0_and_1(seed, n, p, q):
    g = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(n, d, generator=g, dtype=torch.float64) for d in (p, q))
    a, b = linear_cka(x, y), gram_cka(x, y)
    assert a == pytest.approx(b, abs=1e-9) and -1e-12 <= a <= 1 + 1e-9


def test_cka_of_a_rotated_scaled_shifted_copy_is_1():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(30, 5, generator=g, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(5, 5, generator=g, dtype=torch.float64))[0]
    assert gram_cka(x, 3 * x @ turn + 7) == pytest.approx(1)
    assert gram_cka(x, torch.randn(30, 5, generator=g, dtype=torch.float64)) < 0.6


def test_activations_are_what_the_next_layer_reads(tmp_path):
    net = dict(model="cnn", model_args={}, record=("cka",), rounds=1, eval_every=1)
    result = run(experiment("local", **net), store=tmp_path)
    at, cka = result.probe("cka")
    assert list(cka) == ["conv1", "conv2", "fc1", "fc"] and list(at) == [0, 1]
    for m in cka.values():
        assert m.shape == (2, 4, 4)
        assert np.allclose(m, m.transpose(0, 2, 1), atol=1e-5) and np.allclose(
            m.diagonal(0, 1, 2), 1, atol=1e-4
        )
    # After one round of training alone, deeper layers have moved further apart.
    mean = {layer: m[0][~np.eye(4, dtype=bool)].mean() for layer, m in cka.items()}
    assert mean["conv1"] > mean["fc"]


def test_cka_before_any_training_is_1(tmp_path):
    result = run(
        experiment("local", record=("cka",), eval_after=False, rounds=0, eval_every=1),
        store=tmp_path,
    )
    assert all(np.allclose(m, 1, atol=1e-4) for m in result.probe("cka")[1].values())


# ---------------------------------------------------------------- the other probes


def test_weights_are_recorded_at_every_evaluation(tmp_path):
    result = run(experiment(record=("weights",)), store=tmp_path)
    at, weights = result.probe("weights")
    assert list(at) == [0, 2, 4, 6] and list(weights) == ["fc1", "fc"]
    for w in weights.values():
        assert w.shape == (4, 4, 4) and np.allclose(w.sum(2), 1, atol=1e-5)
    assert np.allclose(weights["fc"][0], 0.25) and not np.allclose(
        weights["fc"][-1], 0.25, atol=1e-7
    )
    parts = shares(weights["fc"][-1], [0, 0, 1, 1])
    assert parts["self"] + parts["similar"] + 2 * parts["other"] == pytest.approx(1, abs=1e-5)


def test_mix_and_match_has_the_served_accuracy_on_its_diagonal(tmp_path):
    result = run(experiment("fedper", record=("mix_and_match",), head_init="own"), store=tmp_path)
    at, found = result.probe("mix_and_match")
    rounds = list(result.arrays["rounds"])
    acc = 100 * result.arrays["before/test/correct"] / result.arrays["n/test"]
    for r, m in zip(at, found["acc"], strict=True):
        assert np.allclose(m.diagonal(), acc[rounds.index(r)])
    # FedPer's bases are one and the same, so that each row is constant.
    assert np.allclose(found["acc"], found["acc"][:, :, :1])


def test_accuracy_on_training_data_is_recorded_at_every_evaluation(tmp_path):
    e = experiment("fedper", record=("train",), keep_models=True)
    result = run(e, store=tmp_path)
    at, found = result.probe("train")
    data = client_data(e)
    assert list(at) == [0, 2, 4, 6] and (found["n"] == [len(i) for i in data.index["train"]]).all()
    for k, index in enumerate(data.index["train"]):
        x, y = data.batch(torch.as_tensor(index))
        with torch.no_grad():
            assert found["hits"][-1, k] == (result.model(k)(x).argmax(1) == y).sum()


def test_cores_of_apple_differ_where_its_mixtures_do_not(tmp_path):
    e = experiment("apple", record=("cka", "cka_cores"), max_samples=60)
    result = run(e, store=tmp_path)
    (at, cka), (later, cores) = result.probe("cka"), result.probe("cka_cores")
    assert at[0] == 0 and later[0] == 2 and list(cka) == list(cores), (
        "at round 0 all cores are one model"
    )
    off = ~np.eye(4, dtype=bool)
    assert np.allclose(cores["fc"].diagonal(0, 1, 2), 1, atol=1e-4)
    assert cores["fc"][-1][off].mean() < cka["fc"][-1][off].mean()
    with pytest.raises(ValueError, match="record: fedper has no cka_cores"):
        experiment("fedper", record=("cka_cores",))


def test_costly_probes_keep_first_best_and_last(tmp_path):
    result = run(
        experiment("pfedhn", record=("embeddings",), participation=0.25, rounds=12), store=tmp_path
    )
    val = result.arrays["before/val/correct"]
    assert not val.any()  # no validation data: test data say which is best
    score = (result.arrays["before/test/correct"] / result.arrays["n/test"]).mean(1)
    best = int(result.arrays["rounds"][score.argmax()])
    at, found = result.probe("embeddings")
    assert {0, best, 12} <= set(at.tolist()) and len(at) <= 3 + (
        score[:-1].argmax() != score.argmax()
    )
    assert found["v"].shape == (len(at), 4, 2)


# ---------------------------------------------------------------- nothing is lost


def test_a_stopped_run_goes_on_with_what_was_recorded(tmp_path):
    e = experiment(record=("weights", "cka"))
    whole = run(e, store=tmp_path / "a")
    with pytest.raises(Interrupted):
        run(e, store=tmp_path / "b", on_round=lambda r, h: r == 3)
    again = run(e, store=tmp_path / "b")
    for key, v in whole.arrays.items():
        assert np.array_equal(v, again.arrays[key]), key


def test_recording_changes_no_number(tmp_path):
    plain, watched = (run(experiment(record=r), store=tmp_path) for r in ((), ("weights", "cka")))
    assert plain.id != watched.id
    for key in ("before/test/correct", "after/test/loss"):
        assert np.array_equal(plain.arrays[key], watched.arrays[key])


def test_arrays_beside_committed_rows_stand_for_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path / "results")
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "old"))
    e = experiment(record=("weights",))
    rows, result = sweep([e]), run(e)
    committed.save(rows, "own", "quick", "digits")
    committed.publish("own")
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "new"))
    monkeypatch.setattr(workers, "run", lambda e, **how: pytest.fail("it trained"))
    sweep([e], found=committed.found)
    back = committed.arrays_of(e.id)
    assert np.array_equal(back["probe/weights/fc"], result.probe("weights")[1]["fc"])
    assert np.array_equal(back["before/test/correct"], result.arrays["before/test/correct"])


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "method, record, said",
    [
        (
            "pfedla",
            ("wieghts",),
            "probe of `record` 'wieghts' is unknown; did you mean 'weights'. known are weights, embeddings",
        ),
        ("fedavg", ("weights",), "record: fedavg has no weights"),
        ("fedaghn", ("embeddings",), "fedaghn has no embeddings"),
    ],
)
def test_a_probe_that_cannot_be_is_refused_at_construction(method, record, said):
    with pytest.raises(ValueError, match=said):
        experiment(method, record=record)


def test_a_probe_that_was_not_recorded_is_named(tmp_path):
    result = run(experiment(rounds=1), store=tmp_path)
    with pytest.raises(
        ValueError, match=r"'cka' was not recorded; run the Experiment with record=\('cka',\)"
    ):
        result.probe("cka")
