"""FedPer's paper: settings, networks and labels at each profile, linear bases.

Its claims hold, are contradicted, and stay open.
"""

import numpy as np
import pandas as pd
import pytest

from pfl_core import models
from pfl_core.experiments.store import ROW_COLUMNS
from pfl_papers.evidence.contrasts import Evidence
from pfl_papers.papers import base as papers
from pfl_papers.papers import fedper
from pfl_papers.papers.fedper import PAPER
from tests.made import judged


@pytest.fixture(scope="module")
def paper_cells(swept):
    return swept("fedper", "paper")


def of(cells, *artefacts):
    return [e for e in cells if e.tags["artefact"] in artefacts]


def test_the_papers_own_numbers(paper_cells):
    cifar = [e for e in paper_cells if e.dataset != "flickr_aes"]
    assert {(e.rounds, e.epochs, e.batch, e.lr, e.clients) for e in cifar} == {
        (100, 4, 128, 0.01, 10)
    }
    raters = [e for e in paper_cells if e.dataset == "flickr_aes"]
    assert {(e.rounds, e.epochs, e.batch, e.lr, e.clients) for e in raters} == {
        (100, 4, 4, 0.01, 30)
    }
    assert {e.tags["artefact"] for e in paper_cells} == set(fedper.FIGURES)
    ks = (
        {e.partition_args["k"] for e in of(paper_cells, "fig2")},
        {e.partition_args["k"] for e in of(paper_cells, "fig11", "fig12")},
    )
    assert ks == ({4, 8, 10}, {40, 80, 100})
    assert {e.head_depth for e in of(paper_cells, "fig2", "fig3", "fig7", "fig8")} == {2}


@pytest.mark.parametrize(
    "figure, net, shape, base",
    [
        ("fig5", "MobileNet", (3, 32, 32), 3072 * 1024 + 1024),
        ("fig6", "ResNet-34", (3, 32, 32), 3072 * 512 + 512),
        ("fig9", "MobileNet", (3, 64, 64), 12288 * 1024 + 1024),
        ("fig10", "ResNet-34", (3, 64, 64), 12288 * 512 + 512),
    ],
)
def test_a_linear_base_ends_where_the_classifier_begins(paper_cells, figure, net, shape, base):
    cells = of(paper_cells, figure)
    alone = {"local"} if figure in ("fig5", "fig6") else set()
    assert {e.head_depth for e in cells} == {1}
    assert {e.tags["row"] for e in cells} == {"original", "linear base"} | alone
    e = next(e for e in cells if e.tags["row"] == "linear base")
    assert e.tags["column"].startswith(net)
    flat = models.build(e.model, shape, 5, **e.model_args)
    assert sum(p.numel() for p in flat.base.parameters()) == base
    assert models.head(flat, e.head_depth, e.head_by) == ["fc.weight", "fc.bias"]


def test_medium_is_figures_2_and_3_of_a_network_that_is_said_to_be_narrow(swept):
    cells = swept("fedper", "medium")
    assert {e.tags["artefact"] for e in cells} == {"fig2", "fig3"}
    assert {e.tags["column"] for e in cells} == {f"MobileNet of half width, k={k}" for k in (4, 10)}
    assert {(e.model, e.model_args["width"], e.model_args["stem"]) for e in cells} == {
        ("mobilenet", 0.5, "cifar")
    }
    assert {(e.dataset, e.max_samples, e.rounds, e.seed) for e in cells} == {
        ("cifar10", 1000, 40, s) for s in (0, 1, 2)
    }
    assert {(e.epochs, e.batch, e.lr, e.clients, e.head_depth) for e in cells} == {
        (4, 128, 0.01, 10, 2)
    }
    assert {(e.eval_after, e.partition_args["val"]) for e in cells} == {(True, 0.1)}
    assert all(e.rounds // e.eval_every >= 12 for e in cells)


@pytest.mark.parametrize(
    "profile, said",
    [
        ("paper", ""),
        ("medium", " of half width"),
        ("quick", " of width 1/4"),
        ("smoke", " of width 1/16"),
    ],
)
def test_a_narrow_network_is_labelled_so(profile, said):
    (sweep,) = papers.paper("fedper").planned(papers.Scope(profile), "fig3")
    assert [*sweep.columns] == [f"MobileNet{said}, k=4"] and fedper.narrower(profile) == said


def test_synthetic_raters_are_named(swept):
    figures = {f"fig{n}" for n in (7, 8, 9, 10, 17, 18)}
    for profile, named in (("quick", True), ("paper", False)):
        labels = {e.tags["artefact"]: e.tags["column"] for e in swept("fedper", profile)}
        assert {a for a, column in labels.items() if "synthetic raters" in column} == (
            figures if named else set()
        )
    cells = swept("fedper", "quick", ("flickr_aes",))
    assert {e.tags["artefact"] for e in cells} == figures and not [
        e for e in cells if "raters" in e.tags["column"]
    ]


# -- claims ----------------------------------------------------------------------------------------

SURE, UNSURE = 0.002, 2.0  # noise of seeds, as a share of the value
FLICKR = "flickr_aes"


def curves(of, dataset="cifar10", metric="acc_pct"):
    """Rows of {(row, column): numbers at rounds 0, 4, 8, ...}."""
    blank = dict.fromkeys(ROW_COLUMNS, "") | dict(metric=metric, split="test", seed=0)
    blank |= dict(when="before", average="client", dataset=dataset)
    made = [
        blank | dict(row=row, column=column, run=f"{row} {column}", rounds=4 * n, value=v)
        for (row, column), line in of.items()
        for n, v in enumerate(line)
    ]
    return pd.DataFrame(made, columns=ROW_COLUMNS)


def ends(dataset="cifar10", column="MobileNet", **acc):
    """Rows of {row: accuracy at the last round}, which began at 0 and was soon there."""
    named = {name.replace("_", " "): v for name, v in acc.items()}
    return curves({(row, column): (0, v, v, v, v) for row, v in named.items()}, dataset)


def both(fedper, fedavg, k=4, **how):
    return ends(fedper=fedper, fedavg=fedavg, column=f"MobileNet of half width, k={k}", **how)


def spread(fedper, fedavg, k=4, learned=60.0):
    """Spreads over clients in percentage points, with accuracies."""
    column = f"MobileNet of half width, k={k}"
    flat = {("fedper", column): (fedper,) * 5, ("fedavg", column): (fedavg,) * 5}
    return pd.concat([curves(flat, metric="acc_sd"), both(learned, learned, k)])


def depths(*acc, dataset="cifar10"):
    names = {("MobileNet", f"K_P = {d}"): v for d, v in enumerate(acc, 1)}
    return curves({(row, c): (0, v, v, v, v) for (c, row), v in names.items()}, dataset)


def seeds(rows, noise=SURE, n=4):
    """The same rows for n seeds, each curve with a factor of its own."""
    random, out = np.random.default_rng(3), []
    key = rows.row + rows.column + rows.metric
    for seed in range(n):
        factor = {name: random.normal(1, noise) for name in dict.fromkeys(key)}
        made = dict(seed=seed, run=rows.run + f" {seed}", value=rows.value * key.map(factor))
        out.append(rows.assign(**made))
    return pd.concat(out, ignore_index=True)


def verdict(where, word, rows):
    """The verdict of the one claim at a place of the paper that has a word in it."""
    try:
        return judged(PAPER, rows, lambda c: c.where.endswith(where) and word in c.says).verdict
    except LookupError:
        return "not run"


def slow(first, second, k=4):
    column = f"MobileNet of half width, k={k}"
    return curves({("fedper", column): first, ("fedavg", column): second})


EARLY, LATE = (0, 65, 70, 70, 70), (0, 20, 40, 50, 60)
TUNED = "fedper_+_fine-tuning"
# where, a word of the claim, rows of which it holds, rows that contradict it
JUDGED = [
    ("Fig. 2", "better", both(60.0, 50.0), both(50.0, 60.0)),
    ("Fig. 2", "rounds", slow(EARLY, LATE), slow(LATE, EARLY)),
    (
        "Fig. 2",
        "closer",
        pd.concat([both(70.0, 50.0), both(60.0, 58.0, 10)]),
        pd.concat([both(60.0, 58.0), both(70.0, 50.0, 10)]),
    ),
    ("Fig. 3", "vary less", spread(5.0, 10.0), spread(10.0, 5.0)),
    ("Fig. 4", "correlation", depths(60.0, 62.0, 59.0), depths(60.0, 62.0, 50.0)),
    ("Fig. 4", "K_P = 2", depths(60.0, 65.0, 50.0), depths(60.0, 65.0, 70.0)),
    ("Fig. 5", "linear", ends(original=60, linear_base=50), ends(original=50, linear_base=60)),
    ("Fig. 6", "linear", ends(original=60, linear_base=50), ends(original=50, linear_base=60)),
    ("Fig. 5", "local", ends(original=60, local=40), ends(original=50, local=60)),
    ("Fig. 6", "local", ends(original=60, local=40), ends(original=50, local=60)),
    ("Fig. 7", "unfit", both(60.0, 20.0, dataset=FLICKR), both(20.0, 60.0, dataset=FLICKR)),
    ("Fig. 7", "guessing", both(60.0, 21.0, dataset=FLICKR), both(60.0, 30.0, dataset=FLICKR)),
    ("Fig. 8", "unfit", both(60.0, 20.0, dataset=FLICKR), both(20.0, 60.0, dataset=FLICKR)),
    (
        "Fig. 9",
        "linear",
        ends(FLICKR, original=60, linear_base=50),
        ends(FLICKR, original=50, linear_base=60),
    ),
    ("Fig. 11", "better", both(60.0, 50.0, 40), both(50.0, 60.0, 80)),
    (
        "Fig. 12",
        "closer",
        pd.concat([both(70.0, 50.0, 40), both(60.0, 58.0, 100)]),
        pd.concat([both(60.0, 58.0, 40), both(70.0, 50.0, 100)]),
    ),
    (
        "Figs. 3, 13",
        "variation",
        pd.concat([spread(5.0, 12.0), spread(5.0, 6.0, 10)]),
        pd.concat([spread(5.0, 6.0), spread(5.0, 12.0, 10)]),
    ),
    ("Fig. 14", "K_P = 1", depths(60.0, 55.0, 50.0), depths(60.0, 65.0, 50.0)),
    ("Fig. 15", "improves", ends(fedper=60, **{TUNED: 72}), ends(fedper=60, **{TUNED: 55})),
    ("Fig. 16", "improves", ends(fedper=60, **{TUNED: 72}), ends(fedper=60, **{TUNED: 55})),
    (
        "Fig. 17",
        "noticeable",
        ends(FLICKR, fedper=60, **{TUNED: 58.5}),
        ends(FLICKR, fedper=60, **{TUNED: 72}),
    ),
    (
        "Fig. 18",
        "noticeable",
        ends(FLICKR, fedper=60, **{TUNED: 61.5}),
        ends(FLICKR, fedper=60, **{TUNED: 55}),
    ),
]


@pytest.mark.parametrize("where, word, good, bad", JUDGED)
def test_claims_hold_are_contradicted_and_stay_open(where, word, good, bad):
    assert verdict(where, word, seeds(good)) == "holds"
    assert verdict(where, word, seeds(bad)) == "contradicted"
    assert verdict(where, word, seeds(good, UNSURE)) in ("open", "tie")
    assert verdict(where, word, seeds(good, n=1)) == "open", "one seed has no interval"
    assert verdict(where, word, seeds(ends(nobody=50, column="MobileNet, k=4"))) == "not run"


@pytest.mark.parametrize(
    "where, word, good, bad", [j for j in JUDGED if FLICKR in set(j[2].dataset)]
)
def test_synthetic_raters_say_nothing_about_flickr_aes(where, word, good, bad):
    assert verdict(where, word, seeds(good).assign(dataset="raters_digits100")) == "not run"


def test_identical_data_are_in_no_claim_on_differing_clients():
    some = pd.concat([both(60.0, 50.0), both(50.0, 60.0, 10)])
    assert verdict("Fig. 2", "better", seeds(some)) == "holds"
    assert verdict("Fig. 2", "rounds", seeds(both(60.0, 50.0, 10))) == "not run"
    assert verdict("Fig. 2", "closer", seeds(both(60.0, 50.0))) == "not run", "one end alone"


def test_who_has_not_learned_has_no_small_spread():
    column = "MobileNet of half width, k=4"
    flat = {("fedper", column): (10.0,) * 5, ("fedavg", column): (10.0,) * 5}
    rows = pd.concat([spread(5.0, 10.0)[lambda r: r.metric == "acc_sd"], curves(flat)])
    assert verdict("Fig. 3", "vary less", seeds(rows)) in ("open", "tie")


def test_rounds_are_counted_to_the_lower_ones_best_accuracy():
    rows = slow(EARLY, LATE)
    assert fedper._sooner(rows, rows.column[0]).tolist() == [16 - 4]
    (found,) = fedper.rounds_saved(Evidence(seeds(slow(EARLY, EARLY), 0), PAPER))
    assert found.found.estimate == 0 and found.tied, "nobody is sooner"


def test_every_claim_names_its_place_and_every_figure_has_one_but_figure_10():
    named = {
        f"fig{n}" for c in PAPER.claims for n in c.where.split("Fig")[1].strip("s. ").split(", ")
    }
    assert named == set(fedper.FIGURES) - {"fig10"}
    assert all(c.needs in fedper.FIGURES and "Fig" not in c.says for c in PAPER.claims)
    assert all("ours" in c.limit for c in PAPER.claims if c.limit) and PAPER.runs == 0
