"""Metrics beside accuracy, and what is asked of runs that lack them."""

import numpy as np

from pfl_core import Federation, plot, register_metric, run, table, tune
from tests.errors.table import Case, X, Y, own, tiny

OWN = dict(dataset="own", partition="dirichlet", clients=None)


def trained(fn):
    register_metric("mine", fn)
    return run(tiny(metrics=("mine",)))


CASES = [
    # metrics
    Case(
        'Experiment(metrics=("acu",))',
        lambda: tiny(metrics=("acu",)),
        "metric 'acu' is unknown; did you mean 'auc'.*register_metric",
    ),
    Case(
        "Experiment(metrics=(roc_auc_score,))",
        lambda: tiny(metrics=(len,)),
        "metric .* is unknown; .*add your own with register_metric",
    ),
    Case(
        'register_metric("auc", mine)',
        lambda: register_metric("auc", lambda y, scores: 0.5),
        "pfl_core has a metric of this name",
    ),
    Case(
        'register_metric("loss", mine)',
        lambda: register_metric("loss", lambda y, scores: 0.5),
        "rows call something else so",
    ),
    Case(
        'register_metric("mine", lambda y: 0.5)',
        lambda: register_metric("mine", lambda y: 0.5),
        r"called as fn\(y, scores\)",
        TypeError,
    ),
    Case(
        "a metric of your own that fails for a client",
        lambda: trained(lambda y, scores: 1 / 0),
        r"metric 'mine' of client 0: ZeroDivisionError.*return float\('nan'\)",
    ),
    Case(
        "a metric of your own that returns an array",
        lambda: trained(lambda y, scores: np.ones(2)),
        r"it returned array.*allowed is a finite number, or NaN",
    ),
    Case(
        "a metric of your own that returns 10**400",
        lambda: trained(lambda y, scores: 10**400),
        r"metric 'mine' of client 0: it returned 1000.*allowed is a finite number, or NaN",
    ),
    Case(
        "a metric of your own that draws with np.random",
        lambda: trained(lambda y, scores: np.random.rand()),
        r"metric 'mine': code of yours moved numpy's \(np.random\) global generator",
    ),
    Case(
        'table(result, metric="auc"), of a run without',
        lambda: table(run(tiny()), metric="auc"),
        r"metric 'auc' is unknown; .*run with Experiment\(metrics=\('auc',\)\)",
    ),
    Case(
        'table(result, metric="auc", average="pooled")',
        lambda: table(run(tiny(metrics=("auc",))), metric="auc", average="pooled"),
        "no auc of test data at when='before', average='pooled'; there are before, client",
    ),
    Case(
        'plot(result, metric="f1"), of a run without',
        lambda: plot(run(tiny()), metric="f1"),
        r"metric 'f1' is unknown; .*run with Experiment\(metrics=\('f1',\)\)",
    ),
    Case(
        'table(result, metric="auc"), of clients with one class each',
        lambda: table(
            run(tiny(**OWN, metrics=("auc",)), fed=own(train=[[0, 2], [1, 3]], test=[[4], [5]])),
            metric="auc",
        ),
        "auc is undefined for all clients",
    ),
    Case(
        'tune(experiment, {"lr": [0.1]}, metric="auc"), without metrics',
        lambda: tune(tiny(), {"lr": [0.1]}, metric="auc"),
        r"metric that chooses 'auc' is unknown; .*run with Experiment\(metrics=\('auc',\)\)",
    ),
    Case(
        "result.predictions(), of a run that kept none",
        lambda: run(tiny()).predictions(),
        "kept no class scores; .*keep_scores=True",
    ),
    Case(
        'result.predictions("tuned 1"), without fine-tuning',
        lambda: run(tiny(keep_scores=True)).predictions("tuned 1"),
        "when 'tuned 1' is unknown; .*known are before, after",
    ),
    Case(
        "result.confusion(), of a run without",
        lambda: run(tiny()).confusion(),
        r"no confusion matrices; .*metrics=\('confusion',\)",
    ),
    # what is not served
    Case(
        "Federation: targets of a regression, as objects",
        lambda: Federation(X, (Y + 0.5).astype(object), [[0]]),
        "regression is not served; pfl_core trains classifiers of one class a sample",
    ),
    Case(
        "Federation: a list of classes a sample",
        lambda: Federation(X, [[0], [0, 1]] * 4, [[0]]),
        "several classes a sample are not served",
    ),
    Case(
        "Federation: a mask a sample",
        lambda: Federation(X, np.zeros((8, 4, 4), int), [[0]]),
        r"\(segmentation\) is not served",
    ),
]
