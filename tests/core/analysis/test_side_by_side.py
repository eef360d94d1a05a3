"""Finished runs in one figure: what is one line, what it is called, and what is refused."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from pfl_core import Experiment, plot, run
from pfl_core.experiments.listing import names
from pfl_core.experiments.store import Result

BASE = Experiment(clients=3, model="mlp", rounds=2, partition="iid", max_samples=20)


def lines(figure):
    """{label: accuracies} of what is drawn."""
    found = {line.get_label(): line.get_ydata() for line in figure.axes[0].get_lines()}
    return {label: y for label, y in found.items() if len(y) == 3}


def legend(figure):
    texts = [text.get_text() for text in figure.findobj(lambda a: hasattr(a, "get_text"))]
    return set(filter(None, texts))


def test_seeds_are_one_line_with_the_mean_of_all(store):
    results = [run(BASE.but(method=m, seed=s)) for m in ("fedavg", "fedper") for s in (0, 1)]
    figure = plot(*results, results[0])  # given twice it counts once
    drawn = list(lines(figure).values())
    accuracies = [
        r.rows.query(
            "metric == 'acc_pct' and average == 'client' and split == 'test' and when == 'before'"
        ).value.to_numpy()
        for r in results
    ]
    for wanted in (np.mean(accuracies[:2], 0), np.mean(accuracies[2:], 0)):
        assert any(np.allclose(wanted, y) for y in drawn)
    assert {"FedAvg", "FedPer", "digits, 3 clients, 2 seeds"} <= legend(figure)
    assert figure._repr_png_()[0].startswith(b"\x89PNG")


@pytest.mark.parametrize("lost", [(1,), (0, 2), (0, 1, 2)])
def test_a_line_is_the_mean_of_one_set_of_seeds_and_lost_ones_are_counted(store, lost):
    results = []
    for seed in range(3):
        r = run(BASE.but(seed=seed))
        if seed in lost:
            short = r.history[r.history["rounds"] <= (0 if seed else 1)]
            r = replace(r, meta=r.meta | {"status": "failed: nan"}, history=short)
        results.append(r)
    whole = [r for r in results if r.ok] or results
    figure = plot(*results)
    line = figure.axes[0].get_lines()[0]
    own = "metric == 'acc_pct' and average == 'client' and split == 'test' and when == 'before'"
    values = [r.history.query(own).set_index("rounds").value for r in whole]
    wanted = pd.concat(values, axis=1, join="inner").mean(axis=1)
    assert np.allclose(line.get_ydata(), wanted) and [*line.get_xdata()] == [*wanted.index]
    title = " ".join(figure.axes[0].get_title().split())  # it is broken into lines
    assert title == f"digits, 3 clients, 3 seeds, {len(lost)} of 3 diverged"


def test_fine_tuning_is_drawn_by_its_epochs_from_what_was_served(store):
    results = [run(BASE.but(rounds=r, finetune={"epochs": 2})) for r in (1, 3)]
    figure = plot(*results, when="tuned")
    drawn = [line for line in figure.axes[0].get_lines() if len(line.get_xdata()) == 3]
    assert figure.axes[0].get_xlabel() == "Epoch of fine-tuning" and len(drawn) == 2
    for line, result in zip(drawn, results, strict=True):
        h = result.history.query("metric == 'acc_pct' and average == 'client'")
        wanted = [h[h.when == when].value.iloc[-1] for when in ("before", "tuned 1", "tuned 2")]
        assert line.get_xdata().tolist() == [0, 1, 2] and line.get_ydata().tolist() == wanted


def named(*experiments, meta=None):
    """Names of runs with these Experiments, and what is given of their meta."""
    metas = meta or [{}] * len(experiments)
    about = dict(id="0" * 16, status="done", revision=1, pool="a" * 64)
    pairs = zip(experiments, metas, strict=True)
    return names([Result(e, about | m, pd.DataFrame(), {}) for e, m in pairs])


def test_names_say_what_differs():
    prox = BASE.but(method="fedprox", method_args={"mu": 0.1})
    assert named(BASE, BASE.but(method="fedper")) == ["fedavg", "fedper"]
    assert named(BASE, BASE.but(lr=0.1, seed=1)) == ["fedavg, lr 0.01", "fedavg, lr 0.1"]
    assert named(BASE, prox) == ["fedavg", "fedprox, mu 0.1"]
    assert named(BASE, BASE.but(seed=1)) == ["fedavg", "fedavg"]
    assert named(BASE, BASE.but(partition_seed=1, keep_models=True)) == ["fedavg", "fedavg"]


@pytest.mark.parametrize("field", ["code", "pool", "revision"])
def test_names_tell_apart_what_no_field_does(field):
    found = named(BASE, BASE, BASE, meta=[{}, {field: "b" * 8}, {field: "b" * 8, "id": "1" * 16}])
    assert found[0] != found[1] == found[2]
    assert "bbbb" in found[1]


def test_names_tell_apart_sources_of_one_method():
    a, b = (BASE.but(init_from=BASE.but(lr=lr)) for lr in (0.1, 0.2))
    assert len(set(named(a, b))) == 2


def test_what_cannot_be_drawn_is_said(store):
    result = run(BASE.but(eval_after=False))
    with pytest.raises(ValueError, match="nothing to draw"):
        plot()
    with pytest.raises(TypeError, match=r"write plot\(\*results\)"):
        plot([result])
    with pytest.raises(ValueError, match="eval_after=True"):
        plot(result, when="after")
    with pytest.raises(ValueError, match="no test accuracies after fine-tuning; run with finetune"):
        plot(result, when="tuned")
    with pytest.raises(ValueError, match="when 'befor' is unknown; did you mean 'before'"):
        plot(result, when="befor")
