"""A start from a file of weights: its content counts, never its path; what does not fit is refused before training."""

import doctest
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from pfl_core import Experiment, grid, models, run, sweep
from pfl_core.experiments import compute
from pfl_core.experiments.store import load_result
from pfl_core.methods.base import METHODS
from pfl_papers.explore import sources

TINY = Experiment(clients=3, rounds=0, max_samples=20, model="mlp", keep_models=True)
SHAPE = (1, 28, 28)


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("PFL_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(models, "_MODELS", dict(models._MODELS))
    return tmp_path / "runs" / "store"


def state(seed=9, name="mlp", classes=10, **options):
    return models.build(name, SHAPE, classes, seed, **options).state_dict()


@pytest.fixture
def file(tmp_path):
    torch.save(state(), tmp_path / "weights.pt")
    return tmp_path / "weights.pt"


def refuse(monkeypatch):
    monkeypatch.setattr(compute, "_train", lambda *a: pytest.fail("nothing may be trained"))


@pytest.mark.parametrize("as_text", [True, False])
def test_a_run_starts_from_it(file, as_text, store):
    e = TINY.but(init_from=str(file) if as_text else file)
    served = run(e, workers=1).model(2).state_dict()
    assert all(torch.equal(v, served[n]) for n, v in state().items())
    trained = run(e.but(rounds=1, method="fedper"), workers=1).model(2).state_dict()
    assert not torch.equal(trained["fc.weight"], state()["fc.weight"])


def test_statistics_and_heads_of_the_clients_own(tmp_path):
    given = state(name="lenet", bn=True)
    given["bn1.running_mean"] += 0.5
    torch.save(given, tmp_path / "w.pt")
    e = TINY.but(
        model="lenet", model_args={"bn": True}, init_from=tmp_path / "w.pt", method="fedper"
    )
    for k, own in ((0, "common"), (1, "own")):
        served = run(e.but(head_init=own, new_head=own == "own"), workers=1).model(k).state_dict()
        assert torch.equal(served["bn1.running_mean"], given["bn1.running_mean"])
        assert torch.equal(served["fc.weight"], given["fc.weight"]) == (own == "common")


def test_its_content_is_in_the_id_and_its_path_is_not(file, tmp_path, store):
    e = TINY.but(init_from=file)
    other = tmp_path / "elsewhere.pt"
    other.write_bytes(file.read_bytes())
    assert TINY.but(init_from=other).id == e.id != TINY.id
    found = run(e, workers=1)
    assert run(TINY.but(init_from=other)).meta["date"] == found.meta["date"], "one run"
    torch.save(state(seed=3), other)
    assert TINY.but(init_from=other).id != e.id
    for again in (eval(repr(e), {"Experiment": Experiment}), e.but(lr=0.1).but(lr=e.lr)):
        assert again.id == e.id
    assert Experiment.from_plain(json.loads(json.dumps(e.plain()))).id == e.id
    assert {x.init_from for x in grid(e, {"a": {}}, seeds=[0, 1])} == {e.init_from}


def test_it_is_read_and_computed_again_when_the_file_is_gone(file, store):
    e = TINY.but(init_from=file)
    found = run(e, workers=1)
    file.unlink()
    plain = Experiment.from_plain(json.loads(json.dumps(e.plain())))
    assert load_result(found.folder).id == run(plain).id == found.id
    again = run(plain, recompute=True, workers=1)
    assert torch.equal(again.model(0).fc.weight, state()["fc.weight"])
    for kept in (store / "weights").iterdir():
        kept.unlink()
    with pytest.raises(ValueError, match="weights.pt is gone; this run starts from the content"):
        run(plain, recompute=True)


def test_a_file_that_changed_is_another_start(file, store):
    e = TINY.but(init_from=file)
    torch.save(state(seed=3), file)
    with pytest.raises(ValueError, match="has other content now"):
        run(e)


def test_workers_need_no_file(file, store):
    cells = [TINY.but(init_from=file, seed=s) for s in (0, 1)]
    rows = sweep(cells, jobs=2, device="cpu")
    assert rows.run.nunique() == 2 and len([*(store / "weights").iterdir()]) == 1


def of(name="mlp", **changes):
    given = state() | changes
    return {n: v for n, v in given.items() if v is not None}


WRONG = {
    "missing": (lambda: of(**{"fc.bias": None}), "missing: fc.bias; .*strict=False"),
    "unexpected": (lambda: of(extra=torch.ones(2)), "unexpected: extra;"),
    "shape": (
        lambda: of(**{"fc.weight": torch.ones(7, 100)}),
        r"of another shape: fc.weight \(7, 100\), here \(10, 100\); new_head=True",
    ),
    "parallel": (lambda: {f"module.{n}": v for n, v in state().items()}, "DataParallel"),
    "compiled": (lambda: {f"_orig_mod.{n}": v for n, v in state().items()}, "'_orig_mod.'.*inside"),
    "a part of a module": (
        lambda: {f"net.model.{n}": v for n, v in state().items()},
        "'net.model.'",
    ),
    "integers": (
        lambda: of(**{"fc.bias": torch.zeros(10, dtype=torch.int64)}),
        "of another kind: fc.bias integers, here real; save them",
    ),
    "sparse": (
        lambda: of(**{"fc.weight": state()["fc.weight"].to_sparse()}),
        "of another kind: fc.weight float32, sparse_coo, here real; save them",
    ),
    "a checkpoint": (lambda: {"epoch": 3, "model": state()}, "a state_dict under 'model'"),
    "without values": (
        lambda: of(**{"fc.weight": state()["fc.weight"].to("meta")}),
        r"of another kind: fc.weight float32, strided, without values \(meta\), here real",
    ),
    "numbers in place of names": (lambda: dict(enumerate(state().values())), "holds no state_dict"),
    "a list": (lambda: [1], "holds no state_dict"),
    "not finite": (
        lambda: of(**{"fc.bias": torch.full((10,), torch.nan)}),
        "fc.bias is not finite",
    ),
    "a module": (lambda: nn.Linear(2, 2), "holds code or objects"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.filterwarnings("ignore:Validating sparse tensor")
def test_what_does_not_fit_is_listed_before_training(case, tmp_path, monkeypatch):
    make, said = WRONG[case]
    torch.save(make(), tmp_path / "w.pt")
    refuse(monkeypatch)
    with pytest.raises(ValueError, match=f"init_from=.*w.pt.*{said}"):
        run(TINY.but(init_from=tmp_path / "w.pt"))


def normed(input_shape, classes, wrap=False, tie=False):
    """Linear, BatchNorm, Linear and head; tied: the two Linears before the head are one tensor."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.BatchNorm1d(8), nn.ReLU())
    net.extend([nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, classes)])
    if tie:
        net[6].weight = net[4].weight
    return nn.Sequential(net) if wrap else net


@pytest.fixture
def given(tmp_path, monkeypatch):
    """given(tensors, **options) -> an Experiment over `normed` that starts from a file of them."""
    monkeypatch.setattr(models, "_MODELS", dict(models._MODELS))
    models.register_model("normed", normed)

    def given(tensors, **options):
        torch.save(tensors, tmp_path / "w.pt")
        return TINY.but(model="normed", model_args=options, init_from=tmp_path / "w.pt")

    return given


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("2.running_var", torch.inf, "2.running_var is not finite"),
        ("2.running_mean", torch.nan, "2.running_mean is not finite"),
        ("2.running_var", -1.0, "normed from .*w.pt.*scores that are not finite"),
    ],
)
def test_statistics_are_sound_too(given, monkeypatch, name, value, said):
    tensors = normed((1, 28, 28), 10).state_dict()
    tensors[name] = torch.full_like(tensors[name], value)
    refuse(monkeypatch)
    with pytest.raises(ValueError, match=said):
        run(given(tensors))


def test_a_wrapped_model_says_the_names_that_it_needs(given, monkeypatch):
    refuse(monkeypatch)
    with pytest.raises(ValueError, match="the model's names begin with '0.': save"):
        run(given(normed((1, 28, 28), 10).state_dict(), wrap=True))


@pytest.mark.parametrize("gone", [(), ("4.weight",), ("6.weight",)])
def test_a_tied_tensor_is_read_under_any_of_its_names(given, gone):
    tensors = normed((1, 28, 28), 10, tie=True).state_dict()
    served = run(given({n: v for n, v in tensors.items() if n not in gone}, tie=True), workers=1)
    whole = run(given(tensors, tie=True), workers=1)
    for n, v in whole.model(1).state_dict().items():
        assert torch.equal(served.model(1).state_dict()[n], v), n


def test_tied_tensors_that_differ_are_refused(given, monkeypatch):
    refuse(monkeypatch)
    with pytest.raises(ValueError, match="4.weight and 6.weight differ, and are one tensor"):
        run(given(normed((1, 28, 28), 10).state_dict(), tie=True))


def test_other_files_and_fields_are_refused(tmp_path, file):
    (tmp_path / "text.pt").write_text("no weights")
    with pytest.raises(ValueError, match="text.pt .*torch.save"):
        run(TINY.but(init_from=tmp_path / "text.pt"))
    for wrong, said in (
        (dict(init_from="no/such.pt"), "no such file"),
        (dict(init_from=3), "got int, allowed is Experiment"),
        (dict(new_head=True), "needs init_from"),
        (dict(init_from=file, adopt=True), "needs init_from"),
    ):
        with pytest.raises(ValueError, match=said):
            TINY.but(**wrong)


@pytest.mark.parametrize("by", ["file", "run"])
def test_a_head_of_another_size_is_drawn_anew_if_asked(by, tmp_path):
    given = state(classes=7)
    torch.save(given, tmp_path / "w.pt")
    start = tmp_path / "w.pt" if by == "file" else TINY.but(seed=5)
    e = TINY.but(init_from=start, new_head=True)
    body = given if by == "file" else run(TINY.but(seed=5), workers=1).model(0).state_dict()
    served = run(e, workers=1).model(1).state_dict()
    assert torch.equal(served["fc1.weight"], body["fc1.weight"])
    assert torch.equal(served["fc.weight"], state(seed=0)["fc.weight"]), "as drawn by the seed"


def test_explorers_name_it_by_its_content(file):
    assert "init_from=weights, " in sources._said(TINY.but(init_from=file), lambda n: True)
    assert str(file) not in sources._said(TINY.but(init_from=file), lambda n: True)


def test_the_command_line_takes_a_file(file, capsys):
    from pfl_core.__main__ import main

    words = f"run --clients 3 --rounds 0 --max_samples 20 --model mlp --init_from {file}"
    assert main(words.split()) == 0 and str(file) in capsys.readouterr().out


PAGE = Path(__file__).parents[3] / "docs" / "pretrained.md"


def test_the_page_is_right(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text().replace("```", "\n")
    example = doctest.DocTestParser().get_doctest(text, {}, PAGE.name, str(PAGE), 0)
    assert len(example.examples) > 20 and PAGE.name in (PAGE.parent / "README.md").read_text()
    said = []
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    doctest.DocTestRunner(verbose=False, optionflags=options).run(example, out=said.append)
    METHODS.pop("personal_a", None)
    assert not said, "".join(said)
