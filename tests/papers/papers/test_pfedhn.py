"""pFedHN's paper: settings are those it prints, labels those of its numbers, claims are decided."""

import numpy as np
import pandas as pd
import pytest

from pfl_core import Experiment, run
from pfl_core.analysis import select
from pfl_core.experiments import store
from pfl_core.experiments.build import client_data
from pfl_papers.compare import report
from pfl_papers.papers import base as papers
from pfl_papers.papers import pfedhn
from pfl_papers.papers.shown import rows_at


@pytest.fixture(scope="module")
def paper_cells(swept):
    return swept("pfedhn", "paper")


@pytest.fixture(scope="module")
def medium_cells(swept):
    return swept("pfedhn", "medium")


@pytest.fixture(scope="module")
def quick_cells(swept):
    return swept("pfedhn", "quick")


def named(found: list[Experiment], artefact: str) -> list[Experiment]:
    return [e for e in found if e.tags["artefact"] == artefact]


def test_the_papers_own_numbers(paper_cells):
    table1 = named(paper_cells, "table1")
    own = [e for e in table1 if e.tags["row"] in ("pfedhn", "pfedhn_pc")]
    assert {e.clients for e in own} == {10, 50, 100}
    assert {e.seed for e in own if e.tags["column"] != "CIFAR-10, N=10"} == {0, 1, 2}
    assert all(
        (e.rounds, e.participation * e.clients, e.steps, e.batch) == (5000, 1, 50, 64) for e in own
    )
    assert all(
        (e.momentum, e.weight_decay, e.clip, e.plan) == (0.9, 5e-5, 50, "fresh") for e in own
    )
    others = {e.tags["row"]: e for e in table1 if e.clients == 50 and e.dataset == "cifar10"}
    for row in ("fedavg", "perfedavg", "fedper", "pfedme"):
        assert others[row].rounds * others[row].participation * others[row].clients == 5000
    # K = 3 "i.e. 60 local steps"
    assert others["pfedme"].steps * others["pfedme"].method_args["inner_steps"] == 60
    assert others["lgfedavg"].rounds * 5 == 1000 and others["lgfedavg"].init_from.method == "fedavg"
    assert {e.dataset for e in table1} == {"cifar10", "cifar100", "omniglot"}
    assert {(e.clients, e.model) for e in table1 if e.dataset == "omniglot"} == {(50, "lenet4")}
    assert all(e.model_args == {"kernels": 16} for e in table1 if e.dataset != "omniglot")


def test_the_papers_sweeps(paper_cells):
    one = {e.tags["row"]: e for e in named(paper_cells, "fig5")}
    assert [e.steps for e in one.values()] == [1, 25, 50, 100, 200]
    rows6 = {e.tags["row"]: e.method_args for e in named(paper_cells, "fig6")}
    assert list(rows6) == [f"embedding dimension = {d}" for d in (5, 15, 25, 35)] + [
        f"hidden layers = {n}" for n in (1, 2, 3, 4, 5)
    ]
    assert rows6["embedding dimension = 35"] == {"dim": 35} and rows6["hidden layers = 3"] == {}
    assert {e.clients for a in ("fig5", "fig6") for e in named(paper_cells, a)} == {50}
    assert {e.partition_args["novel_alpha"] for e in named(paper_cells, "fig2")} == {
        0.1,
        0.25,
        0.5,
        1.0,
    }
    assert {
        (e.init_from.clients, e.partition_args["alpha"]) for e in named(paper_cells, "fig2")
    } == {(90, 0.1)}
    assert {e.id_for("") for e in named(paper_cells, "fig7")} == {
        e.id_for("") for e in named(paper_cells, "fig2")
    }
    sizes = {
        (e.tags["column"], e.clients, e.model_args["kernels"]) for e in named(paper_cells, "table2")
    }
    assert {s for s in sizes if "CIFAR-10," in s[0]} == {
        *((f"CIFAR-10, {s}", 25, k) for s, k in zip("SML", (8, 16, 32), strict=True)),
        ("CIFAR-10, all sizes", 75, 32),
    }
    assert {(e.clients, e.partition, e.record) for e in named(paper_cells, "fig4")} == {
        (100, "coarse", ("embeddings",))
    }
    assert {(e.model, e.dataset) for e in named(paper_cells, "table3")} == {("mlp", "mnist")}
    embed = {e.tags["row"]: e.method_args for e in named(paper_cells, "appc5")}
    # The paper's is normalised over clients, ours over classes.
    assert embed == {
        "trainable embedding": {"dim": 10},
        "fixed embedding": {"embed": "fixed_columns"},
        "fixed embedding (over classes)": {"embed": "fixed"},
    }


def test_medium_is_the_first_fifth_of_the_papers_own_runs(medium_cells, paper_cells):
    def runs(cells, artefact):
        return {(e.tags["row"], e.tags["column"], e.seed): e for e in named(cells, artefact)}

    assert {e.tags["artefact"] for e in medium_cells} == {
        a for a, about in pfedhn.PAPER.artefacts.items() if about.medium
    }
    for artefact, many in {"table1": 39, "fig3": 3, "table4": 6, "fig5": 12}.items():
        ours, theirs = (runs(cells, artefact) for cells in (medium_cells, paper_cells))
        assert many == len(ours) == len(named(medium_cells, artefact))
        for (row, column, seed), e in ours.items():
            whole = theirs[row, column, seed]
            if e.init_from:  # each starts from the FedAvg of its own table
                assert (e.init_from.rounds, whole.init_from.rounds) == (200, 1000)
                e, whole = (x.but(init_from=None) for x in (e, whole))
            assert e.course_for("") == whole.course_for("")
            # Local has all of the paper's steps, and the printed sign overflows after a few.
            same = row.startswith("local") or "literal" in row
            assert e.rounds * (1 if same else 5) == whole.rounds
    steps = [e.rounds * e.participation * e.clients for e in runs(medium_cells, "fig5").values()]
    assert set(steps) == {1000}
    assert {e.steps for e in named(medium_cells, "fig5")} == {1, 25, 50, 100}


def test_the_best_rows_of_table_1_have_a_fourth_seed(paper_cells):
    column = [e for e in named(paper_cells, "table1") if e.tags["column"] == "CIFAR-10, N=10"]
    seeds = {}
    for e in column:
        seeds.setdefault(e.tags["row"], []).append(e.seed)
    assert {row for row, of in seeds.items() if sorted(of) == list(range(4))} == set(pfedhn.FOURTH)
    assert all(sorted(of) == [0, 1, 2] for row, of in seeds.items() if row not in pfedhn.FOURTH)
    starts = {e.id for e in column if e.tags["row"] == "fedavg"}
    assert starts == {e.init_from.but(keep_models=True).id for e in column if e.init_from}
    crossed = {e.id for e in named(paper_cells, "fig3")}
    assert crossed == {e.id for e in column if e.tags["row"] == "pfedhn_pc"}
    asked = papers.paper("pfedhn").planned(papers.Scope("paper", seeds=(1,)), "table1")
    assert {seed for sweep in asked for seed in sweep.seeds} == {1}


def test_heads_of_pfedhn_pc_are_drawn_one_by_one(paper_cells, medium_cells, quick_cells):
    for cells in (paper_cells, medium_cells, quick_cells):
        heads = {(e.method, e.head_init) for e in cells}
        assert ("pfedhn_pc", "own") in heads and ("pfedhn_pc", "common") not in heads


def test_training_clients_are_tuned_as_long_as_the_newcomers_in_runs_of_their_own(paper_cells):
    cells = {}
    for e in named(paper_cells, "fig2"):
        cells.setdefault((e.tags["row"], e.partition_args["novel_alpha"], e.seed), []).append(e)
    assert {row for row, *_ in cells} == {"pfedhn", "perfedavg", "pfedme", "fedavg_ft"}
    for (row, *_), (train, new) in cells.items():
        assert (train.clients, new.clients, new.partition_args["first"]) == (90, 10, 90)
        assert (
            (train.rounds, train.steps, train.participation)
            == (200, 50, 1)
            == (new.rounds, new.steps, new.participation)
        )
        assert train.init_from.plain() == new.init_from.plain() and train.adopt == new.adopt == (
            row == "pfedhn"
        )
        differ = {f for f, v in train.plain().items() if v != new.plain()[f]}
        assert differ == {"clients", "partition_args"} | (
            {"method_args"} if row == "pfedhn" else set()
        )


def test_rows_with_all_data_stand_beside_the_released_partition(paper_cells):
    ours = [e for e in named(paper_cells, "table1") if "(all data)" in e.tags["row"]]
    assert {(e.tags["row"], e.clients) for e in ours} == {
        ("local (all data)", 10),
        ("pfedhn (all data)", 10),
    }
    beside = {
        (e.method, e.seed): e
        for e in named(paper_cells, "table1")
        if e.tags["column"] == "CIFAR-10, N=10"
    }
    beside |= {
        (e.tags["row"], e.seed): e
        for e in named(paper_cells, "table1")
        if e.tags["column"] == "CIFAR-10, N=10"
    }
    for e in ours:
        assert e.plain() == beside[e.method, e.seed].but(partition_args={"leftover": False}).plain()
    dealt = [
        client_data(Experiment(clients=10, partition="pfedhn_classes", partition_args=a)).n
        for a in ({}, {"leftover": False})
    ]
    used, total = (int(n.sum()) for n in dealt)
    assert 0.6 < used / total < 0.73


def test_tuning_on_leaves_what_was_trained_as_it_was(store):
    args = dict(of=9, alpha=0.5, novel_alpha=0.5, novel=3)
    base = Experiment(
        clients=6,
        partition="dirichlet_columns",
        partition_args=args,
        plan="fresh",
        steps=1,
        batch=4,
        max_samples=8,
    )
    base = base.but(
        model="lenet",
        model_args={"kernels": 2},
        rounds=2,
        participation=0.5,
        keep_models=True,
        eval_after=False,
    )
    some = rows_at("smoke", base, pfedhn.ROWS, ("pfedhn", "fedavg"))
    for row, e in pfedhn.tuned(base, some, "smoke", False).items():
        source = run(base.but(**e["init_from"].plain() | {"init_from": None}))
        kept = (source.folder / "models.pt").read_bytes()
        got = run(base.but(**e))
        assert (source.folder / "models.pt").read_bytes() == kept and got.experiment.clients == 6, (
            row
        )
        start, before = (
            got.arrays["before/test/correct"][0],
            source.arrays["before/test/correct"][-1],
        )
        # Round 0 is the federation as it was trained.
        assert (start == before).all(), row


def test_how_many_runs(paper_cells, quick_cells):
    assert len({e.id_for("") for e in with_starts(paper_cells)}) == PAPER_RUNS
    assert len({e.id_for("") for e in with_starts(quick_cells)}) <= 40


PAPER_RUNS = 516


def with_starts(found: list[Experiment]) -> list[Experiment]:
    starts = [e.init_from for e in found if e.init_from is not None]
    return [*found, *with_starts(starts)] if starts else found


def test_what_is_shared_is_run_once(quick_cells):
    ids = {
        a: {e.tags["row"]: e.id_for("") for e in named(quick_cells, a) if e.seed == 0}
        for a in pfedhn.PAPER.artefacts
    }
    main = ids["table1"]
    assert ids["fig3"]["pfedhn_pc"] == main["pfedhn_pc"]
    shared = (
        ids["fig5"]["K = 10"],
        ids["fig6"]["hidden layers = 3"],
        ids["fig6"]["embedding dimension = 3"],
    )
    assert {main["pfedhn"], ids["table4"]["pfedhn (no spectral norm)"], *shared} == {main["pfedhn"]}
    trained = {e.init_from.id_for("") for e in named(quick_cells, "fig2")}
    assert ids["appc5"]["trainable embedding"] in trained


def test_labels_are_published_ones(paper_cells):
    said = papers.reported("pfedhn")
    for table in ("table1", "table2", "table3", "table4", "appc5"):
        want = said[said.table == table]
        ran = {(e.tags["row"], e.tags["column"]) for e in named(paper_cells, table)}
        if table == "table2":
            ran |= {
                ("pfedhn", c.replace("all sizes", s))
                for r, c in ran
                if r == "pfedhn"
                for s in "SML"
            }
        assert set(zip(want.row, want.column, strict=True)) <= ran, table
    said6 = set(said[said.table == "fig6"].row)
    assert said6 <= {e.tags["row"] for e in named(paper_cells, "fig6")}


# -- claims over made rows -------------------------------------------------------------------------


def row(artefact: str, name: str, column: str, value: float, run: str = "", **more) -> list[dict]:
    """Rows of one run, evaluated once: validation and test accuracy."""
    common = dict(paper="pfedhn", artefact=artefact, row=name, column=column, seed=0, rounds=1)
    common |= dict(run=run or f"{name}{column}", profile="quick", metric="acc_pct")
    common |= dict(average="client", when="before")
    return [common | {"split": s, "value": value} | more for s in ("val", "test")]


def frame(*groups: list[dict]) -> pd.DataFrame:
    return pd.DataFrame([r for g in groups for r in g], columns=store.ROW_COLUMNS)


def made(artefact: str, numbers: dict[tuple[str, ...], float], seeds: int = 3) -> pd.DataFrame:
    """Runs of each {(row, column): accuracy} or {(derived metric, row, column): value}.

    Seeds differ by hundredths.
    """
    noise, groups = np.random.default_rng(0), []
    for seed in range(seeds):
        for (*metric, name, column), value in numbers.items():
            value += noise.normal(0, 0.01)
            lines = row(artefact, name, column, value, f"{name}{column}{seed}", seed=seed)
            if metric:
                lines = [lines[0] | dict(average="derived", split="", when="", metric=metric[0])]
            groups.append(lines)
    return frame(*groups)


def verdict(says: str, rows: pd.DataFrame) -> tuple[str, str]:
    found = report.claims("pfedhn", rows.assign(profile="medium"))
    (line,) = found[found.says.str.startswith(says)].itertuples()
    return line.verdict, line.reason


def column(name: str, **numbers: float) -> dict[tuple[str, str], float]:
    return {(row, name): value for row, value in numbers.items()}


def competing(name: str, **numbers: float) -> dict[tuple[str, str], float]:
    """A whole column of Table 1: all competing approaches at 60, but those that are given."""
    names = "local fedavg perfedavg pfedme lgfedavg fedper".split()
    return column(name, **dict.fromkeys(names, 60) | numbers)


def of_one(names: str, *numbers: float) -> dict[tuple[str, str], float]:
    """Accuracies of rows "K = 1", "K = 10", ... in a column "a"."""
    return dict(zip([(name, "a") for name in names.split(", ")], numbers, strict=True))


def newcomers(gap: float, other: float) -> dict[tuple[str, ...], float]:
    gaps = {
        ("gap_points", "pfedhn", "alpha = 1"): gap,
        ("gap_points", "pfedme", "alpha = 1"): other,
    }
    both = dict(pfedhn=80, pfedme=85)
    return column("alpha = 1", **both) | column("training, alpha = 1", **both) | gaps


def derived(**numbers: float) -> dict[tuple[str, str, str], float]:
    return {(metric, "pfedhn", "a"): value for metric, value in numbers.items()}


# They do not compete.
OF_OURS = {("pfedhn (literal sign)", "a"): 99, ("local (all data)", "a"): 99}
FEW = column("a, N=10", local=90, fedavg=50, fedper=85)
OMNIGLOT = "Omniglot, N=50"
STEPS, DIMS, DEPTHS, SPECTRAL, DESCRIPTORS = (
    "K = 1, K = 10, K = 20",
    "embedding dimension = 5, embedding dimension = 15",
    "hidden layers = 1, hidden layers = 3, hidden layers = 4",
    "pfedhn, pfedhn (no spectral norm)",
    "trainable embedding, fixed embedding",
)
# The claim's first words, its artefact, numbers that uphold it, that contradict it, and too few.
DECIDED = [
    (
        "Local and FedAvg",
        "table1",
        FEW | column("a, N=50", local=60, fedavg=50, fedper=80, pfedhn=90),
        FEW | column("a, N=50", local=85, fedavg=50, fedper=80, pfedhn=90),
        column("a, N=50", local=60, fedper=80),
    ),
    (
        "pFedHN achieves improvements",
        "table1",
        competing("a", fedper=80, pfedhn=70, pfedhn_pc=83) | OF_OURS,
        column("a", fedper=80, pfedhn=90, pfedhn_pc=81),
        column("a", fedper=80, pfedhn=90),
    ),
    (
        "pFedHN outperforms all competing approaches",
        "table1",
        competing(OMNIGLOT, fedper=70, perfedavg=76, lgfedavg=73, pfedhn=72, pfedhn_pc=80)
        | OF_OURS
        | competing("a", fedper=80, pfedhn=81),
        column("a", perfedavg=76, pfedhn=72),
        column("a", fedper=80, pfedhn_pc=90),
    ),
    (
        "On Omniglot",
        "table1",
        column(OMNIGLOT, perfedavg=76, pfedhn=72, pfedhn_pc=80),
        column(OMNIGLOT, perfedavg=70, pfedhn=82, pfedhn_pc=80),
        column("a", perfedavg=76, pfedhn=72, pfedhn_pc=80),
    ),
    (
        "pFedHN-PC outperforms FedPer",
        "table1",
        column("a", fedper=80, pfedhn_pc=81),
        column("a", fedper=80, pfedhn_pc=79),
        column("a", fedper=80, pfedhn=90),
    ),
    (
        "One pFedHN",
        "table2",
        competing("a, S", pfedme=80, pfedhn=83) | column("a, all sizes", pfedhn=70),
        column("a, S", pfedme=80, pfedhn=82) | column("a, M", pfedme=80, pfedhn=84),
        column("a, S", pfedme=80) | column("a, all sizes", pfedhn=70),
    ),
    (
        "pFedHN achieves the best generalization",
        "fig2",
        newcomers(-1, -2),
        newcomers(-3, -2),
        column("alpha = 1", pfedme=80),
    ),
    (
        "pFedHN-PC produces personalized",
        "fig3",
        derived(own_pct=90, crossed_pct=70),
        derived(own_pct=70, crossed_pct=75),
        derived(own_pct=90),
    ),
    (
        "Embeddings of clients",
        "fig4",
        derived(purity=0.8, chance=0.1),
        derived(purity=0.1, chance=0.4),
        derived(purity=0.8),
    ),
    (
        "On MNIST",
        "table3",
        column("a", fedavg=90, pfedme=99.5, pfedhn=99),
        column("a", fedavg=90, pfedme=97, pfedhn=99),
        column("a", fedavg=90, pfedhn=99),
    ),
    (
        "Many local steps",
        "fig5",
        of_one(STEPS, 60, 80, 90),
        of_one(STEPS, 60, 80, 64),
        of_one("K = 10, K = 20", 80, 79),
    ),
    (
        "pFedHN is relatively robust",
        "fig5",
        of_one(STEPS, 60, 80, 82),
        of_one(STEPS, 80, 80, 90),
        of_one("K = 1, K = 10", 80, 81),
    ),
    (
        "pFedHN is robust to the dimension",
        "fig6",
        of_one(DIMS, 80, 81),
        of_one(DIMS, 80, 83),
        of_one(DEPTHS, 80, 80, 80),
    ),
    (
        "pFedHN performs best with three",
        "fig6",
        of_one(DEPTHS, 80, 81, 82),
        of_one(DEPTHS, 80, 79, 82),
        of_one(DIMS, 80, 80),
    ),
    (
        "Spectral normalization",
        "table4",
        of_one(SPECTRAL, 81, 80),
        of_one(SPECTRAL, 83, 80),
        of_one("pfedhn", 83),
    ),
    (
        "The test accuracy of novel clients",
        "fig7",
        derived(slope=-20),
        derived(slope=20),
        derived(distance=1),
    ),
    (
        "pFedHN performs similarly",
        "appc5",
        of_one(DESCRIPTORS, 81, 80),
        of_one(DESCRIPTORS, 83, 80),
        of_one("trainable embedding", 80),
    ),
]


@pytest.mark.parametrize("says, artefact, upheld, contradicted, few", DECIDED)
def test_a_claim_is_decided(says, artefact, upheld, contradicted, few):
    assert verdict(says, made(artefact, upheld)) == ("holds", "")
    assert verdict(says, made(artefact, contradicted)) == ("contradicted", "")
    assert verdict(says, made(artefact, upheld, seeds=1)) == ("open", "one seed")
    assert verdict(says, made(artefact, few)) == ("not run", "")


def test_to_be_ahead_of_all_all_have_to_be_there():
    whole = competing("a", fedper=80, pfedhn=70, pfedhn_pc=83)
    del whole["pfedme", "a"]
    claim = "pFedHN achieves improvements"
    assert verdict(claim, made("table1", whole)) == ("open", "rows missing")
    behind = whole | {("pfedhn_pc", "a"): 75}
    assert verdict(claim, made("table1", behind)) == ("contradicted", "")


def test_every_artefact_has_a_claim_and_every_claim_is_tried_above():
    claims = pfedhn.PAPER.claims
    assert list(dict.fromkeys(c.needs for c in claims)) == list(pfedhn.PAPER.artefacts)
    assert [c.needs for c in claims] == [artefact for _, artefact, *_ in DECIDED]
    assert all(c.says.startswith(says) for c, (says, *_) in zip(claims, DECIDED, strict=True))


def test_the_papers_own_tables_uphold_what_its_text_says():
    said = papers.reported("pfedhn")
    printed = {t: v.set_index(["row", "column"]).value.to_dict() for t, v in said.groupby("table")}
    plain = {c: v for (r, c), v in printed["table1"].items() if r == "pfedhn" and "CIFAR-10," in c}
    printed["table4"] |= {("pfedhn (no spectral norm)", c): v for c, v in plain.items()}
    tables = ("table1", "table2", "table3", "table4", "appc5")
    rows = pd.concat([made(t, printed[t]) for t in tables], ignore_index=True)
    found = report.claims("pfedhn", rows.assign(profile="medium"))
    # Noise is drawn towards that of real columns, by which two printed leads are ties.
    assert set(found[found.artefact.isin(tables)].verdict) == {"holds", "tie"}
    assert set(found[~found.artefact.isin(tables)].verdict) == {"not run"}


@pytest.mark.parametrize(
    ("row", "like", "changes"),
    [
        ("perfedavg (one step)", "perfedavg", {"method_args": {"adapt_steps": 1}}),
        ("lgfedavg (two layers)", "lgfedavg", {"head_depth": 2}),
    ],
)
def test_a_baseline_as_its_authors_have_it_is_a_row_of_ours(
    paper_cells, quick_cells, row, like, changes
):
    beside = {
        (e.tags["row"], e.seed): e
        for e in named(paper_cells, "table1")
        if e.tags["column"] == "CIFAR-10, N=10"
    }
    for seed in (0, 1, 2):
        ours, printed = beside[row, seed], beside[like, seed]
        assert ours.plain() == printed.but(**changes).plain(), "LG-FedAvg from the same models"
    assert not [e for e in quick_cells if e.tags["row"] == row]


def test_the_literal_sign_is_a_row_of_ours():
    base = Experiment(**pfedhn.setting("table1", "paper", "cifar10", 10))
    assert pfedhn.OURS.rows.quick == ["pfedhn (literal sign)"]
    (changes,) = rows_at("paper", base, pfedhn.ROWS, pfedhn.OURS.rows.quick).values()
    assert base.but(**changes).method_args == {"hn_sign": "literal"}


# -- numbers of made runs --------------------------------------------------------------------------


def test_newcomers_have_a_slope_in_every_seed(monkeypatch):
    lines = pd.DataFrame(
        dict(
            row="pfedhn",
            column=["alpha = 1", "alpha = 0.1"] * 2,
            seed=[0, 0, 1, 1],
            distance=[0.2, 0.4, 0.2, 0.4],
            acc_pct=[80.0, 70.0, 80.0, 90.0],
            gap=[-1.0, -2.0, -3.0, -4.0],
        )
    )
    monkeypatch.setattr(pfedhn, "newcomers", lambda rows: lines)
    runs = [
        row("fig7", "pfedhn", v.column, 0, f"{v.column}{v.seed}", seed=v.seed)
        for v in lines.itertuples()
    ]
    got = pd.DataFrame(pfedhn.numbers_of_newcomers(frame(*runs), recorded()))
    slopes = got[got.metric == "slope"].set_index("run").value.to_dict()
    assert slopes == {"alpha = 10": pytest.approx(-50), "alpha = 11": pytest.approx(50)}
    assert got[got.metric == "gap_points"].value.tolist() == [-1, -2, -3, -4]


def test_gaps_and_capacity():
    lines = pd.DataFrame(
        dict(row=["a", "a", "b"], column="x", distance=[0.2, 0.4, 0.5], gap=[-1.0, -3.0, 2.0])
    )
    found = pfedhn.gaps(lines)
    assert found[["low", "high"]].isna().all(axis=None), "one seed has no interval"
    assert found.drop(columns=["low", "high"]).to_numpy().tolist() == [
        ["a", "x", pytest.approx(0.3), -2.0],
        ["b", "x", 0.5, 2.0],
    ]
    rows = frame(
        *(
            row("fig6", name, "CIFAR-10, N=50", value)
            for name, value in {"embedding dimension = 5": 80, "hidden layers = 3": 90}.items()
        )
    ).assign(profile="paper")
    got = pfedhn.capacity(rows)
    assert (
        got.layer.tolist() == [5, 3]
        and got.value.tolist() == [80, 90]
        and got.column.nunique() == 2
    )
    assert pfedhn.capacity(rows.iloc[:0]).empty and pfedhn.gaps(pd.DataFrame()).empty


def test_figure_3_is_one_seeds():
    acc = np.array([[90.0, 50.0], [80.0, 80.0]])
    shown = pfedhn.scaled({"seed 1": acc}, 1)
    assert list(shown) == list(pfedhn.SCALES) and shown["Accuracy"].tolist() == acc.tolist()
    ranged = [[1, 0], [np.nan, np.nan]]
    np.testing.assert_array_equal(shown["Scaled to each row's range"], ranged)
    assert pfedhn.scaled({"seed 1": acc}, 0) == {}


def test_by_size_reads_every_third_client(monkeypatch):
    test = np.array([[1, 2, 3, 1, 2, 3], [4, 5, 6, 4, 5, 6]])
    n = np.array([10, 10, 10, 10, 10, 30])
    kept = {"rounds": np.array([0, 1]), "before/test/correct": test, "n/test": n}
    monkeypatch.setattr(pfedhn.committed, "arrays_of", lambda run: kept)
    whole = row("table2", "pfedhn", "C, all sizes", 50)
    pooled = row("table2", "pfedhn", "C, all sizes", 50, average="pooled")
    rows = frame(whole, pooled, row("table2", "pfedme", "C, S", 45))
    sized = pd.DataFrame(pfedhn.by_size(rows, recorded()), columns=store.ROW_COLUMNS)
    means = {
        "client": {"C, S": 40, "C, M": 50, "C, L": 40},
        "pooled": {"C, S": 40, "C, M": 50, "C, L": 30},
    }
    for average, want in means.items():
        got = select.pick(sized, "best_val", average=average)
        assert dict(zip(got.column, got.value, strict=True)) == want
    assert set(sized[sized.split == "val"].value) == {50}  # by which the round is chosen


def recorded(**probes: dict[str, np.ndarray]):
    """What `Study.run` gives to numbers of probes: what one run recorded at rounds 0 and 1."""
    made = {
        n: [papers.Probed("pfedhnx", "pfedhn", "x", 1, np.array([0, 1]), v)]
        for n, v in probes.items()
    }
    return lambda probe: made.get(probe, [])


def test_figures_3_and_4_read_what_was_recorded_at_the_round_that_is_reported():
    best, last = (
        row("fig3", "pfedhn", "x", v, rounds=r, seed=1) for r, v in ((0, 90.0), (1, 80.0))
    )
    rows = frame(best, last).assign(dataset="digits100")
    acc = np.array([[[90.0, 50.0], [80.0, 80.0]], np.zeros((2, 2))])
    v = np.stack([np.eye(10).repeat(5, 0), np.zeros((50, 10))])  # 10 groups of 5 clients
    probes = recorded(mix_and_match={"acc": acc}, embeddings={"v": v})
    assert pfedhn.crossed(rows, probes("mix_and_match"))["seed 1"].tolist() == acc[0].tolist()
    crossing, clusters = (
        pfedhn.numbers_of_crossing(rows, probes),
        pfedhn.numbers_of_clusters(rows, probes),
    )
    assert {d["metric"]: d["value"] for d in crossing} == {
        "own_pct": 85,
        "crossed_pct": 65,
        "own_best_pct": 100,
    }
    said = {d["metric"]: d["value"] for d in clusters}
    assert (
        said["purity"] == 1
        and said["p"] < 0.01
        and {(d["run"], d["rounds"]) for d in crossing + clusters} == {("pfedhnx", 0)}
    )
    drawn = pfedhn.embedded(rows, probes("embeddings"))
    assert drawn.group.tolist() == [k // 5 for k in range(50)] and set(drawn.column) == {"seed 1"}
    assert "perplexity 5" in drawn.said.iloc[0] and "permutation p = " in drawn.said.iloc[0]
    nothing = frame()
    assert pfedhn.crossed(nothing, []) == {} and pfedhn.embedded(nothing, []).empty
    assert pfedhn.numbers_of_newcomers(nothing, probes) == [] and pfedhn.newcomers(nothing).empty


def test_pairs_names_classes(monkeypatch):
    counts = np.eye(10, dtype=int)[[3, 5]] + np.eye(10, dtype=int)[[5, 5]]
    monkeypatch.setattr(pfedhn.committed, "label_counts", lambda e: counts)
    assert pfedhn.pairs(Experiment(dataset="cifar10")) == ["cat / dog", "dog"]
    assert pfedhn.pairs(Experiment(dataset="digits")) == ["3 / 5", "5"]


def test_profiles_below_the_papers_say_their_number_of_clients():
    first = {
        "table1": "CIFAR-10, N=10",
        "fig4": "CIFAR-100, N=50",
        "table3": "MNIST, N=10",
        "appc5": "CIFAR-10, N=20",
    }
    assert {a: pfedhn.SHOWN[a].labels("quick") for a in first} == {
        a: [label] for a, label in first.items()
    }
    table1 = pfedhn.SHOWN["table1"].labels
    assert table1("medium") == ["CIFAR-10, N=10"]
    assert table1("paper")[-2:] == ["CIFAR-100, N=100", "Omniglot, N=50"]
    assert len(table1("paper")) == 7 and papers.title("appc5") == "Appendix C.5"


# -- rates of Table 3 ------------------------------------------------------------------------------


def tried(best):
    """Rows of runs that choose Table 3's rates: validation accuracy by label, test the opposite."""
    keys = dict(artefact=papers.TUNING, column="MNIST, N=50", when="before", average="client")
    made = [
        keys
        | dict(row=row, run=row, seed=7, metric="acc_pct", rounds=n, split=split, value=score - n)
        for row, v in best.items()
        for split, score in (("val", v), ("test", 100 - v))
        for n in (0, 1)
    ]
    return pd.DataFrame(made)


def test_rates_are_tried_on_a_seed_and_clients_of_their_own(paper_cells, medium_cells):
    runs = named(paper_cells, papers.TUNING)
    assert {(e.clients, e.dataset, e.seed) for e in runs} == {(50, "mnist", 7)}
    assert not {e.seed for e in named(paper_cells, "table3")} & {7}
    assert {e.lr for e in runs if e.method in ("fedavg", "perfedavg")} == {0.1, 0.05, 0.01, 0.005}
    of = {m: [e.method_args for e in runs if e.method == m] for m in ("pfedhn", "pfedme")}
    assert [a["lr"] for a in of["pfedhn"]] == [0.1, 0.05, 0.01, 0.005]
    assert [a["personal_lr"] for a in of["pfedme"]] == [0.05, 0.01, 0.005, 0.001]
    assert all(e.tags["artefact"] != papers.TUNING for e in medium_cells)


def test_table_3_has_the_rates_of_the_best_validation_accuracy():
    best = {"fedavg, rate 0.1": 97, "perfedavg, rate 0.005": 98, "pfedme, rate 0.001": 99}
    best["pfedhn, rate 0.05"] = 99.5
    asked = []

    def finished(cells):
        asked.extend(cells)
        return tried({e.tags["row"]: best.get(e.tags["row"], 50) for e in cells})

    found = pfedhn.PAPER.planned(papers.Scope("paper", finished=finished), "table3")
    assert len(asked) == 16 and [s.artefact for s in found] == [papers.TUNING] * 4 + ["table3"] * 3
    plain = {s.base.clients: s.rows for s in pfedhn.PAPER.planned(papers.Scope("paper"), "table3")}
    for s in found[4:]:
        rows, usual = s.rows, plain[s.base.clients]
        assert [*rows] == [*usual]
        assert rows["fedavg"] == usual["fedavg"] | {"lr": 0.1}
        assert rows["perfedavg"] == usual["perfedavg"] | {"lr": 0.005}
        assert rows["pfedme"]["method_args"] == {"inner_steps": 3, "personal_lr": 0.001}
        assert rows["pfedhn"]["method_args"] == {"n_hidden": 1, "lr": 0.05}
        # What depends on the number of clients is not taken from the fifty of the tuning.
        assert rows["pfedhn"]["participation"] == 1 / s.base.clients
    (alone,) = pfedhn.tuning(papers.Scope("paper", methods=("fedavg",)))
    assert {c["method"] for c in alone.rows.values()} == {"fedavg"}
    assert pfedhn.tuning(papers.Scope("paper", datasets=("cifar10",))) == []


def test_rates_say_what_was_tried_and_chosen():
    table = pfedhn.rates(tried({"fedavg, rate 0.01": 90, "fedavg, rate 0.1": 97}))
    assert table.columns.tolist() == [0.1, 0.01, "chosen"]
    assert table.loc["fedavg"].tolist() == [97, 90, 0.1]
    assert pfedhn.rates(tried({"fedavg, rate 0.1": 9}).iloc[:0]).index.tolist() == ["not tuned"]
