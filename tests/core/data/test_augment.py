"""Augmentation: a function of (seed, round, client), part of the id, the same on every executor, and of training images alone."""

import json

import numpy as np
import pytest
import torch

from pfl_core import Experiment, Federation, run
from pfl_core.data import augment
from pfl_core.engine.simulate import Interrupted
from pfl_core.experiments.build import client_data

FLIP = ["RandomHorizontalFlip"]
CROP = [{"name": "RandomCrop", "size": 6, "padding": 2}, "RandomHorizontalFlip"]
OWN = Experiment(dataset="own", model="mlp", rounds=2, batch=4, lr=0.1, dtype="float64")


def own(kind="grey", n=40):
    shape = dict(grey=(6, 6), colour=(6, 6, 3), first=(3, 6, 6), floats=(3, 6, 6))[kind]
    x = np.random.default_rng(0).integers(0, 256, (n, *shape), dtype=np.uint8)
    x = x.astype(np.float32) / 255 if kind == "floats" else x
    return Federation.grouped(x, np.arange(n) % 2, np.arange(n) // 10, split="60/20/20")


def rows(result):
    columns = ["rounds", "when", "split", "metric", "value"]
    return result.rows.loc[~result.rows.metric.isin(["train_s"]), columns].reset_index(drop=True)


# -- what is drawn -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["grey", "colour", "first", "floats"])
def test_training_images_change_for_as_long_as_clients_train(kind):
    fed = own(kind)
    data = client_data(OWN.but(augment=CROP), fed=fed)
    before, of = data.x.clone(), torch.as_tensor(np.concatenate(fed.index["train"][1:3]))
    with data.augmented(1, [1, 2]):
        inside = data.x.clone()
    moved = (inside != before).flatten(1).any(1).nonzero().flatten()
    assert set(moved.tolist()) <= set(of.tolist()) and len(moved) > len(of) / 2
    assert torch.equal(data.x, before) and inside.dtype == before.dtype
    plain = client_data(OWN.but(dtype="float32"), fed=fed)
    assert np.shares_memory(plain.x.numpy(), fed.x) == (kind != "colour"), (
        "nothing is copied without"
    )
    assert not np.shares_memory(data.x.numpy(), fed.x)


def seen(data, round, clients):
    with data.augmented(round, clients):
        return data.x.clone()


def test_they_are_a_function_of_seed_round_and_client():
    data = client_data(OWN.but(augment=CROP), fed=own())
    mine = torch.as_tensor(data.index["fit"][2])
    first = seen(data, 1, [2])[mine]
    torch.rand(3)
    assert torch.equal(first, seen(data, 1, [0, 2, 3])[mine]), "whoever trains beside it"
    assert not torch.equal(first, seen(data, 2, [2])[mine])
    other = client_data(OWN.but(augment=CROP, seed=1), fed=own())
    assert not torch.equal(first, seen(other, 1, [2])[mine])


def test_a_flip_is_one():
    data = client_data(OWN.but(augment=[{"name": "RandomHorizontalFlip", "p": 1.0}]), fed=own())
    mine = torch.as_tensor(data.index["fit"][0])
    assert torch.equal(seen(data, 1, [0])[mine], data.x[mine].flip(-1))


def test_held_out_images_stay():
    data = client_data(OWN.but(augment=CROP, holdout=0.5), fed=own())
    held = torch.as_tensor(np.concatenate(data.index["holdout"]))
    assert len(held) and torch.equal(seen(data, 1, [0, 1, 2, 3])[held], data.x[held])


# -- runs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fedala", "ditto"])
def test_executors_agree_and_augmentation_counts(tmp_path, method):
    e, fed = OWN.but(method=method, augment=CROP), own("colour")
    found = [
        run(e, fed=fed, store=tmp_path / how, device="cpu", executor=how)
        for how in ("threads", "batched")
    ]
    assert np.allclose(rows(found[0]).value, rows(found[1]).value, atol=1e-9)
    plain = run(e.but(augment=None), fed=fed, store=tmp_path, device="cpu")
    assert plain.id != found[0].id and not rows(plain).equals(rows(found[0]))


def test_a_run_that_was_stopped_goes_on_with_the_same_images(tmp_path):
    e, fed = OWN.but(rounds=3, augment=CROP, participation=0.5), own()
    whole = run(e, fed=fed, store=tmp_path / "whole", device="cpu")
    with pytest.raises(Interrupted):
        run(e, fed=fed, store=tmp_path / "two", device="cpu", on_round=lambda r, h: r == 1)
    assert rows(run(e, fed=fed, store=tmp_path / "two", device="cpu")).equals(rows(whole))


def test_ids():
    ids = {
        Experiment(augment=given).id_for("data")
        for given in (None, FLIP, CROP, CROP[::-1], [{"name": "RandomHorizontalFlip", "p": 0.4}])
    }
    assert len(ids) == 5
    same = [FLIP, "RandomHorizontalFlip", {"name": "RandomHorizontalFlip"}, tuple(FLIP)]
    same += [{"p": 0.5, "name": "RandomHorizontalFlip"}]
    assert len({Experiment(augment=given).id_for("data") for given in same}) == 1
    assert Experiment(augment=[]).id_for("data") == Experiment().id_for("data")
    e = Experiment(augment=CROP)
    back = Experiment.read(json.loads(json.dumps(e.plain()))).checked()
    assert back.plain() == e.plain() and back.id_for("data") == e.id_for("data")
    assert augment.plain(e.augment)[1] == {"name": "RandomHorizontalFlip"}


@pytest.mark.parametrize(
    "given",
    [
        "ColorJitter",
        "RandomRotation",
        "RandomErasing",
        "RandAugment",
        "AugMix",
        "RandomResizedCrop",
    ],
)
def test_transforms_of_every_kind_are_seeded(given):
    how = dict(ColorJitter=dict(brightness=0.5), RandomRotation=dict(degrees=30))
    how |= dict(RandomErasing=dict(p=1.0), RandomResizedCrop=dict(size=6, antialias=True))
    data = client_data(OWN.but(augment=[{"name": given} | how.get(given, {})]), fed=own("colour"))
    before = torch.get_rng_state()
    assert torch.equal(seen(data, 1, [0, 1]), seen(data, 1, [0, 1]))
    assert torch.equal(before, torch.get_rng_state())


# -- what is refused -----------------------------------------------------------------------------------------------------

REFUSED = {
    "a number": (5, r"augment=5\): allowed are names of torchvision.transforms.v2"),
    "no name": ([{"size": 4}], "allowed are names"),
    "an object": ([object()], "allowed are names"),
    "unknown": (["RandomFlip"], "transform 'RandomFlip' is unknown; did you mean"),
    "no transform": (["functional"], "'functional' is unknown"),
    "an argument": ([{"name": "RandomCrop", "sizes": 4}], "RandomCrop.*is refused: .*sizes"),
    "no argument": (["RandomCrop"], "RandomCrop.* is refused: .*size"),
    "a wrong value": ([{"name": "RandomHorizontalFlip", "p": 7}], "is refused"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_transform_is_named(case):
    given, says = REFUSED[case]
    with pytest.raises(ValueError, match=says):
        Experiment(augment=given)


UNFIT = {
    "another size": ([{"name": "RandomCrop", "size": 4}], own, r"RandomCrop makes uint8 \(1, 4, 4\) of an image uint8 \(1, 6, 6\)"),
    "too large a crop": ([{"name": "RandomCrop", "size": 9}], own, "RandomCrop refuses an image"),
    "tables": (FLIP, lambda: Federation(np.zeros((4, 3)), [0, 1] * 2, [[0, 1], [2, 3]]), r"changes images .*kind 'float' and shape \(3,\)"),
    "texts": (FLIP, lambda: Federation(np.zeros((4, 3), int), [0, 1] * 2, [[0, 1], [2, 3]]), "kind 'tokens'"),
    "shared samples": (FLIP, lambda: Federation(own().x, own().y, [[0, 1], [1, 2]]), "clients that share training samples"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT)
def test_what_does_not_fit_is_refused_before_training(case, tmp_path):
    given, make, says = UNFIT[case]
    with pytest.raises(ValueError, match=says):
        run(OWN.but(augment=given), fed=make(), store=tmp_path, device="cpu")
