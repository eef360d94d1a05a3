"""FedPer's paper module: the paper's settings, networks and labels at each profile, linear bases, and what fine-tuning is claimed to do."""

import pandas as pd
import pytest

from pfl_core import models
from pfl_core.experiments.store import ROW_COLUMNS
from pfl_core.papers import fedper


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
    assert {e.head_depth for e in cells} == {1} and {e.tags["row"] for e in cells} == {
        "original",
        "linear base",
    }
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
        ("cifar10", 1000, 40, s) for s in (0, 1)
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
    assert list(fedper.nets(profile)) == [f"MobileNet{said}", f"ResNet-34{said}"]


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


# -- claims -------------------------------------------------------------------------------------------------------------------


def judged(figure, without, tuned, dataset="cifar100"):
    blank = dict.fromkeys(ROW_COLUMNS, "") | dict(
        column="MobileNet", metric="acc_pct", seed=0, round=1, split="test"
    )
    blank |= dict(when="before", mean="client", dataset=dataset)
    made = [
        blank | dict(row=r, run=r, value=v)
        for r, v in (("fedper", without), ("fedper + fine-tuning", tuned))
    ]
    (claim,) = (c for c in fedper.PAPER.claims if c.needs == figure)
    return claim.judge(pd.DataFrame(made, columns=ROW_COLUMNS))[1]


@pytest.mark.parametrize("figure", ["fig15", "fig16"])
def test_fine_tuning_improves_cifar100(figure):
    assert (
        judged(figure, 60.0, 72.0) and judged(figure, 60.0, 60.5) and not judged(figure, 60.0, 59.9)
    )


@pytest.mark.parametrize("figure", ["fig17", "fig18"])
def test_fine_tuning_does_nothing_noticeable_on_flickr_aes(figure):
    assert judged(figure, 60.0, 62.9, "flickr_aes") and judged(figure, 60.0, 57.1, "flickr_aes")
    assert not judged(figure, 60.0, 72.0, "flickr_aes")
    with pytest.raises(LookupError, match="FLICKR-AES"):
        judged(figure, 60.0, 62.9, "raters_digits100")
