"""What the explorers open on, and what they call things: display names, and no keys of the code."""

import re

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from pfl_core import models
from pfl_core.analysis import plots
from pfl_core.analysis import stats as analysis
from pfl_core.data import partition
from pfl_core.experiments import run as runs
from pfl_core.experiments.experiment import Experiment
from pfl_papers import places
from pfl_papers.evidence import committed
from pfl_papers.explore import choices, sources, training, views
from pfl_papers.papers import base as papers

# Keys that are words of English, too, or of which the display name is the key.
_PLAIN = {"local", "coarse", "groups", "shards", "workers", "linear", "average", "self", "similar"}
_PLAIN |= {"other", "rounds", "start", "batch", "sd"}


def keys() -> set[str]:
    """What no text that is shown may hold: keys of methods, data, partitions, networks, numbers."""
    known = [plots.LABELS, plots.DATA_LABELS, plots.PARTITION_LABELS, plots.MODEL_LABELS]
    known += [plots.MEASURE_LABELS, plots.FIELD_LABELS]
    return {key for labels in known for key in labels} - _PLAIN


def shown_texts(shown: choices.Shown, offered: choices.Choices) -> list[str]:
    """Everything that a person reads of a view: its sentence, table, figure and controls."""
    texts = [shown.said, *(word for name in offered for word in offered[name].words)]
    for frame in [shown.table] * (shown.table is not None):
        texts += [str(name) for axis in frame.axes for name in (*axis, axis.name or "")]
    for ax in [] if shown.figure is None else shown.figure.axes:
        texts += [text.get_text() for text in ax.findobj(plt.Text)]
    return texts


def raw(texts: list[str]) -> set[str]:
    return {word for text in texts for word in re.findall(r"[a-z][\w-]*", text)} & keys()


def test_a_raw_key_is_found():
    texts = ["worst10 of CIFAR-10, lr 0.1", "digits, emnist-letters10", "FedAvg-FT"]
    assert raw(texts) == {"worst10", "lr", "emnist-letters10"}


@pytest.mark.parametrize("name", views.VIEWS)
def test_every_name_of_runs_of_this_computer_is_a_display_name(name, tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    monkeypatch.setattr(places, "results_folder", lambda: tmp_path / "none")
    small = Experiment(partition="groups", clients=10, model="lenet", max_samples=20, rounds=1)
    for change in (
        {"record": ("weights",), "method": "fedaghn", "lr": 0.2},
        {"method": "pfedhn", "record": ("embeddings",), "batch": 20},
        {"method": "fedprox", "method_args": {"mu": 0.1}, "partition_seed": 3},
    ):
        runs.run(small.but(model_args={"kernels": 2}, partition_args={"groups": 5}, **change))
    for column in views.VIEWS[name][1]({}).get("column", choices.Choice((0,), 0, "", ())).options:
        offered = views.VIEWS[name][1]({"column": column})
        assert raw(shown_texts(views.VIEWS[name][0](**offered.values), offered)) == set()


@pytest.mark.parametrize("source", sorted(committed.parts()))
def test_every_name_of_committed_results_is_a_display_name(source, monkeypatch, tmp_path):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    offered = views.runs_choices({"source": source})
    assert raw(shown_texts(views.runs(**offered.values), offered)) == set()
    rows = sources.rows(source)
    texts = list(sources.column_names(rows).values())
    for _, frame in rows.groupby("column"):
        short = sources.short(frame).values()
        texts += [*sources.listed(frame).values(), *map(plots.in_words, short)]
    assert raw(texts) == set()


def test_whatever_can_be_chosen_has_a_display_name():
    from pfl_core.data import pools

    ours = [n for n in pools.list_datasets() if n != "digits"]
    assert set(ours) <= plots.DATA_LABELS.keys()
    assert set(partition.list_partitions()) <= plots.PARTITION_LABELS.keys()
    assert set(models.list_models()) <= plots.MODEL_LABELS.keys()
    assert analysis.fairness(np.arange(9.0)).keys() <= plots.MEASURE_LABELS.keys()
    assert "_" not in "".join(training_words())


def training_words() -> list[str]:
    offered = training.choices({})
    return [word for name in offered for word in offered[name].words]


def test_results_open_on_references_and_the_papers_methods(monkeypatch, tmp_path):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    offered = views.runs_choices({})
    own = {papers.paper(key).own for key in papers.PAPERS}
    assert set(offered["rows"].value) == {"local", "fedavg", "fedavg_ft"} | own
    shown = views.runs(**offered.values)
    assert len(shown.table) == 8 and shown.table["last"].notna().all()
    # FedAvg-FT is read after local training, FedAvg before: in one picture each at its own time.
    apart = shown.table["last"]["FedAvg-FT"] - shown.table["last"]["FedAvg"]
    assert offered["when"].value == "own" and apart > 20


@pytest.mark.parametrize("source", sorted(committed.parts()))
def test_no_source_opens_on_runs_that_choose_parameters(source, monkeypatch, tmp_path):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path))
    offered = views.runs_choices({"source": source})
    frame = sources.rows(source).query("column == @offered['column'].value")
    assert not set(frame.artefact) & {"tune", "tuning"}
    shown = frame[frame.row.isin(plots.LABELS)].row.nunique()
    every = sources.rows(source)
    every = every[every.row.isin(plots.LABELS) & ~every.artefact.isin(["tune", "tuning"])]
    assert shown == every.groupby("column").row.nunique().max()
    assert set(offered["rows"].value) <= set(plots.LABELS)


@pytest.mark.parametrize("rounds", [1, 2, 7, 20, 50, 333, 1000])
@pytest.mark.parametrize("done", [0, 1])
def test_the_panel_that_trains_shows_all_rounds_that_are_asked_for(rounds, done):
    curve = pd.DataFrame({"rounds": range(done + 1), "when": "before", "value": 10.0})
    experiment = training.experiment(**training.choices({}).values).but(rounds=rounds)
    (ax,) = training.shown(experiment, curve).figure.axes
    ticks = list(ax.get_xticks())
    assert ax.get_xlim() == (0, rounds) and ticks[0] == 0 and ticks[-1] == rounds
    assert all(tick == int(tick) for tick in ticks) and len(ticks) < 9
