"""Results that nobody computed: rows made up by a test, in the form that published runs have."""

import pandas as pd

import pfl_core.__main__
import pfl_papers.__main__
from pfl_core.analysis import verdicts
from pfl_core.experiments import metrics
from pfl_core.experiments.experiment import Experiment
from pfl_papers.evidence import form, tables
from pfl_papers.evidence.contrasts import Evidence

OF_PAPERS = {"plan", "compute", "keep", "publish", "compare", "report", "methods-table", "bench"}


def main(argv):
    """Call the command line that has this word: `pfl`, or `python -m pfl_papers`."""
    of = pfl_papers if argv[0] in OF_PAPERS else pfl_core
    return of.__main__.main(argv)


def publish(folder, rows, paper, profile="quick", data="digits"):
    """Write made-up rows as if their runs had been published to `folder`; each run id is one run, rows without one share one."""
    rows = rows.assign(run=rows.run.replace("", "0" * 16), value=rows.value.astype(float))
    part = dict(paper=paper, profile=profile, data=data)
    measured = rows[rows["average"] != "derived"]
    once = measured.drop_duplicates(["run", *metrics.KEYS, "average", "metric"])
    histories = [form.lines(own).assign(run=run) for run, own in once.groupby("run", sort=False)]
    shown = ["artefact", "row", "column", "run"]
    content = tables.Content(
        pd.DataFrame([line(own.iloc[0]) for _, own in rows.groupby("run", sort=False)]),
        measured[shown].drop_duplicates().assign(**part),
        tables.joined("pools.csv", []),
        rows[rows["average"] == "derived"]
        .assign(**part)
        .reindex(columns=[*form.TABLES["derived.csv"].columns]),
        tables.joined("history.csv.gz", histories),
        tables.joined("clients.csv.gz", []),
        {},
    )
    return tables.write(folder, tables.with_parts(tables.results(folder).content(), content))


def line(row):
    """A line of runs.csv.gz that says of a run what one of its rows does."""
    plain = Experiment().plain() | {n: row[n] for n in ("method", "dataset", "partition", "model")}
    plain["seed"] = int(row.seed or 0)
    facts = dict(
        device=row.device or "cpu",
        executor=row.executor,
        version=row.version,
        revision=row.revision or 1,
    )
    facts |= dict(wall_s=row.wall_s or 0.0, n_clients=row.n_clients or 0, run=row.run, key="")
    return dict.fromkeys(form.FACTS, "") | form.fields(plain) | facts


def judged(paper, rows, chosen, printed=()):
    """The verdict on the one claim of a paper that `chosen` is true of; LookupError if its cells were not run."""
    (claim,) = filter(chosen, paper.claims)
    return verdicts.of_claim(claim.judge(Evidence(rows, paper, printed)), claim.most)
