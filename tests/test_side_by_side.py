"""Finished runs in one figure: what is one line, what it is called, and what is refused."""

import numpy as np
import pytest

from pfl_core import Experiment, plot, run
from pfl_core.experiments.listing import names

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
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_names_say_what_differs():
    prox = BASE.but(method="fedprox", method_args={"mu": 0.1})
    assert names([BASE, BASE.but(method="fedper")]) == ["fedavg", "fedper"]
    assert names([BASE, BASE.but(lr=0.1, seed=1)]) == ["fedavg, lr 0.01", "fedavg, lr 0.1"]
    assert names([BASE, prox]) == ["fedavg", "fedprox, mu 0.1"]
    assert names([BASE, BASE.but(seed=1)]) == ["fedavg", "fedavg"]


def test_what_cannot_be_drawn_is_said(store):
    result = run(BASE.but(eval_after=False))
    with pytest.raises(ValueError, match="nothing to draw"):
        plot()
    with pytest.raises(TypeError, match=r"write plot\(\*results\)"):
        plot([result])
    with pytest.raises(ValueError, match="eval_after=True"):
        plot(result, when="after")
    with pytest.raises(ValueError, match="when 'befor' is unknown; did you mean 'before'"):
        plot(result, when="befor")
