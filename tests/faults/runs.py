"""Faults of runs, their ids and their files."""

import shutil
from collections.abc import Iterator

import numpy as np
import torch

from pfl_core.experiments import store
from pfl_papers.evidence import committed
from pfl_papers.explore import sources
from tests.faults.table import BYSTANDER, KEEPS, LONGER, E, Fault, Trap, World, clean, equal, signed
from tests.made import main


def of_an_earlier_version(w: World) -> Iterator[None]:
    def older(z):
        del z["experiment"]["eval_clients"], z["experiment"]["precision"]

    signed(w.has(E), older)
    yield
    assert {r.id for r in store.finished()} == {BYSTANDER.id, E.id}
    return w.run(E)


def of_a_later_version(w: World) -> Iterator[None]:
    signed(w.has(E), lambda z: z["experiment"].update(compression="none"))
    yield
    return w.run(E)


def no_fields_beside_a_state(w: World) -> Iterator[None]:
    for name, text in (("1" * 16, "[" * 100_000), ("2" * 16, '{"meta": []}'), ("3" * 16, "{}")):
        folder = w.has(E.but(seed=int(name[0])), keep_state=True)
        (folder / "experiment.json").write_text(text)
    yield
    return w.run(LONGER)


def digests_of_other_places(w: World) -> Iterator[None]:
    (w.folder / "mine").write_text("mine")
    signed(w.has(E), lambda z: z["sha256"].update({"../../mine": "0" * 64, "/etc/passwd": 3}))
    yield
    return w.run(E)


def exchanged_histories(w: World) -> Iterator[None]:
    a, b = w.has(E), w.has(KEEPS.but(lr=0.2))
    one, other = (p.read_bytes() for p in (a / "history.csv", b / "history.csv"))
    (a / "history.csv").write_bytes(other), (b / "history.csv").write_bytes(one)
    yield
    return [w.run(E), w.run(KEEPS.but(lr=0.2))]


def arrays_of_another_run(w: World) -> Iterator[None]:
    w.published()
    w.expected = committed.accuracies(E.id, "before", 4)
    shutil.copy(clean(E.but(lr=0.3)).folder / "arrays.npz", w.store / E.id)
    yield
    return committed.accuracies(E.id, "before", 4)


def objects_among_arrays(w: World) -> Iterator[None]:
    folder = w.has(E)
    np.savez(folder / "arrays.npz", rounds=np.array([Trap()], dtype=object))
    signed(folder)
    yield
    return w.run(E)


def code_among_models(w: World) -> Iterator[None]:
    folder = w.has(KEEPS)
    torch.save({"models": Trap()}, folder / "models.pt")
    signed(folder)
    yield
    return w.run(KEEPS).model(0)


def models_are_gone(w: World) -> Iterator[None]:
    (w.has(KEEPS) / "models.pt").unlink()
    yield
    return w.run(KEEPS).model(0)


def models_of_a_source_are_gone(w: World) -> Iterator[None]:
    (w.has(KEEPS) / "models.pt").unlink()
    yield
    return w.run(E.but(lr=0.3, init_from=E))


def link_to_another_run(w: World) -> Iterator[None]:
    other = w.has(E.but(lr=0.3))
    (w.store / E.id).symlink_to(other)
    yield
    found = w.run(E)
    assert equal(w.run(E.but(lr=0.3)), clean(E.but(lr=0.3)))
    return found


def names_a_module(w: World) -> Iterator[None]:
    w.plugin("from_outside", "import os\nos.mkdir('opened')\n")
    folder = w.has(E)
    signed(folder, lambda z: z["experiment"].update(plugins=["from_outside"]))
    yield
    assert committed.experiment(E.id).plugins == ("from_outside",)
    assert sources.names() == [sources.OWN]
    w.expected = {BYSTANDER.id, E.id}
    return set(sources.rows(sources.OWN).run)


def damaged_run_in_a_list(w: World) -> Iterator[None]:
    (w.has(E) / "history.csv").write_text("rounds\n")
    yield
    w.expected = {BYSTANDER.id}
    assert main(["list", "runs"]) == 0 and set(sources.rows(sources.OWN).run) == w.expected
    return {r.id for r in store.finished()}


def no_date(w: World) -> Iterator[None]:
    signed(w.has(E), lambda z: z["meta"].update(date="yesterday"))
    yield
    assert main(["list", "runs"]) == 0
    return w.run(E)


def another_state(w: World) -> Iterator[None]:
    path = w.has(E, keep_state=True) / "state.pt"
    z = torch.load(path, weights_only=True)
    z["server"]["fc.bias"] += 1
    torch.save(z, path)
    yield
    return w.run(LONGER)


FAULTS = [
    # runs, their ids and their files
    Fault(
        "a run of an earlier version, which lacks fields", of_an_earlier_version, "", "as before"
    ),
    Fault(
        "a run of a later version, which has a field more",
        of_a_later_version,
        "field of an Experiment: .*compression.* is unknown.*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "runs whose experiment.json is nested 100,000 deep, or holds no fields, beside a state.pt",
        no_fields_beside_a_state,
        "",
        "computed, equal",
    ),
    Fault(
        "an experiment.json with digests of files outside the folder",
        digests_of_other_places,
        "",
        "as before",
    ),
    Fault(
        "history.csv of two runs exchanged",
        exchanged_histories,
        "history.csv is not as it was written.*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "arrays.npz of another run, read for a figure; results/ have the run, too",
        arrays_of_another_run,
        "",
        "as before",
    ),
    Fault(
        "arrays.npz with pickled objects, and a digest that fits",
        objects_among_arrays,
        "set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "models.pt with pickled code, and a digest that fits",
        code_among_models,
        "models.pt is damaged: it holds code, which is not run",
        "refused, nothing changed",
    ),
    Fault(
        "models.pt deleted, and asked for",
        models_are_gone,
        "models.pt is missing.*recompute=True",
        "refused, nothing changed",
    ),
    Fault(
        "models.pt deleted, and another run starts from it",
        models_of_a_source_are_gone,
        "models.pt is missing.*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "state.pt with other weights, of a run that a longer one could go on from",
        another_state,
        "state.pt is not as its run wrote it",
        "computed, equal",
    ),
    Fault(
        "a link to another run in a run's place",
        link_to_another_run,
        "it is run .*set aside",
        "set aside, computed again, equal",
    ),
    Fault(
        "a run in the store that names a module; the explorer lists it",
        names_a_module,
        "",
        "as before",
    ),
    Fault(
        "a damaged run among those of `list runs` and of the explorer",
        damaged_run_in_a_list,
        "left out: it cannot be read",
        "left out, the others are shown",
    ),
    Fault("a run whose date is none, listed", no_date, "", "as before"),
]
