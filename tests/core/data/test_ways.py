"""Ways to a Federation: the same samples are the same run however they came, and what a malformed one is told."""

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
)

from pfl_core import Experiment, Federation, load_model, run, sweep
from pfl_core.data import dealing, names
from pfl_core.experiments.store import load_result

few = settings(max_examples=25, deadline=None)
OWN = Experiment(dataset="own", model="mlp", rounds=1, batch=4)
SPLITS = ("train", "val", "test")


class Pairs(Dataset):
    """Samples and labels as they are."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def ordered(who, *columns):
    """Client by client, in the order of their names; samples of one keep their order."""
    at = sorted(range(len(who)), key=lambda i: names.order(str(who[i])))
    return [np.asarray(column)[at] for column in (who, *columns)]


def write(root, x, y, who):
    """A folder a client, in it a folder a class, with the samples in their order."""
    for i, (pixels, label, client) in enumerate(zip(x, y, who, strict=True)):
        path = root / str(client) / str(label) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return root


# -- the same samples ----------------------------------------------------------------------------------------------------


def images(n=40, shape=(5, 5), seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


@pytest.mark.parametrize("shape", [(5, 6), (5, 6, 3)])
def test_images_are_the_same_however_they_came(tmp_path, shape):
    x, y = images(shape=shape), np.array(["cat", "dog", "eel", "cat"] * 10)
    who = np.array(["10", "9", "bo", "al"])[np.random.default_rng(1).integers(0, 4, 40)]
    at = sorted(range(40), key=lambda i: (names.order(who[i]), y[i]))  # as folders have them
    x, y, who = x[at], y[at], who[at]
    each = {str(c): np.flatnonzero(who == c) for c in np.unique(who)}
    whole = Pairs([Image.fromarray(a) for a in x], y)
    feds = {
        "grouped": Federation.grouped(x, y, who),
        "of tensors": Federation.grouped(torch.tensor(x), y.tolist(), who.tolist()),
        "of pandas": Federation.grouped(x, pd.Series(y), pd.Categorical(who)),
        "folder": Federation.from_folder(write(tmp_path / "a set", x, y, who)),
        "data sets": Federation.from_torch({c: Pairs(x[i], y[i]) for c, i in each.items()}),
        "subsets": Federation.from_torch({c: Subset(whole, i) for c, i in each.items()}),
        "indices": Federation.from_torch(whole, each),
        "subset of a subset": Federation.from_torch(Subset(whole, range(40)), clients=each),
    }
    first = feds["grouped"]
    assert first.client_names == ("9", "10", "al", "bo")
    assert first.class_names == ("cat", "dog", "eel")
    assert first.name == "own" and feds["folder"].name == "a set"
    for way, fed in feds.items():
        assert (fed.checksum, fed.dealing, fed.names) == (
            first.checksum,
            first.dealing,
            first.names,
        ), way
    runs = {run(OWN, fed=fed, store=tmp_path / "store", device="cpu").id for fed in feds.values()}
    assert len(runs) == 1


def test_a_table_is_the_same_however_it_came():
    g = np.random.default_rng(0)
    x, y, who = g.normal(size=(40, 3)).astype(np.float32), np.arange(40) % 3, np.arange(40) // 10
    frame = pd.DataFrame(x, columns=list("abc")).assign(client=who, label=y)
    given = Federation.grouped(x, y, who)
    ways = [
        Federation.from_table(frame),
        Federation.from_table(frame.astype({c: "float64" for c in "abc"})),
        Federation.from_table(
            frame.astype({"a": "Float32", "label": "int8"}), features=list("abc")
        ),
        Federation.from_table(frame.astype({"client": str}).set_index(who[::-1])),
        Federation.from_table(
            frame.rename(columns=dict(client="u", label="l")), client="u", label="l"
        ),
        Federation.from_torch(
            [TensorDataset(*map(torch.tensor, (x[who == k], y[who == k]))) for k in range(4)]
        ),
    ]
    assert {fed.checksum for fed in ways} == {given.checksum}
    assert given.class_names is None and given.client_names == ("0", "1", "2", "3")


KINDS = {
    "int64": lambda y: y,
    "uint8": lambda y: y.astype(np.uint8),
    "whole floats": lambda y: y.astype(float),
    "a list": lambda y: y.tolist(),
    "objects": lambda y: y.astype(object),
    "tensor": torch.tensor,
    "a list of tensors": lambda y: list(torch.tensor(y)),
    "a column": lambda y: y[:, None],
    "nullable": lambda y: pd.Series(y, dtype="Int64"),
    "texts": lambda y: y.astype(str),
    "a list of texts": lambda y: [str(v) for v in y],
    "texts in objects": lambda y: y.astype(str).astype(object),
    "pandas' texts": lambda y: pd.Series(y).astype("string"),
    "categories": lambda y: pd.Series(pd.Categorical(y, categories=range(12))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_labels_and_clients_of_any_kind_are_the_same(kind):
    x, y = images(48), np.arange(48) % 12  # by alphabet, 10 would come before 2
    who = np.arange(48) // 4
    of_labels = Federation(x, KINDS[kind](y), train=[range(48)])
    assert of_labels.y.tolist() == y.tolist() and of_labels.classes == 12
    named = kind == "categories" or "texts" in kind
    assert of_labels.class_names == (tuple(map(str, range(12))) if named else None)
    fed = Federation.grouped(x, y, KINDS[kind](who))
    assert fed.checksum == Federation.grouped(x, y, who).checksum
    assert fed.client_names == tuple(map(str, range(12)))


@few
@given(st.data())
def test_rows_may_come_in_any_order_of_clients(data):
    """Interleaved, each client has the same samples in the same parts: the same numbers are trained."""
    who = data.draw(st.lists(st.sampled_from(["a", "b", "3", "20"]), min_size=1, max_size=40))
    x, y = np.arange(len(who), dtype=np.float32)[:, None], np.arange(len(who)) % 2
    how = dict(split="60/20/20", small="train", seed=data.draw(st.integers(0, 3)), classes=2)
    mixed = Federation.grouped(x, y, who, **how)
    sorted_who, sorted_x, sorted_y = ordered(who, x, y)
    one = Federation.grouped(sorted_x, sorted_y, sorted_who, **how)
    assert mixed.client_names == one.client_names == tuple(sorted(set(who), key=names.order))
    for split in SPLITS:
        for i, j in zip(mixed.index[split], one.index[split], strict=True):
            assert mixed.x[i].tolist() == one.x[j].tolist()


# -- who has what --------------------------------------------------------------------------------------------------------


@few
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=8),
    st.sampled_from(["70/10/20", "50/50"]),
    st.data(),
)
def test_each_sample_is_its_clients_and_in_one_part(sizes, split, data):
    """With few samples a client is refused, left out, or trains on all, as `small` says; nothing else is lost."""
    who = data.draw(st.permutations(np.repeat(range(len(sizes)), sizes).tolist()))
    least = dealing.fewest(dealing.read_shares(split))
    there = {k: n for k, n in enumerate(sizes) if n}
    x, y = np.zeros((len(who), 2)), np.zeros(len(who), int)
    for small in ("refuse", "drop", "train"):
        kept = [k for k, n in there.items() if n >= least or small == "train"]
        if not who or not kept or small == "refuse" and len(kept) < len(there):
            with pytest.raises(
                ValueError, match=r"fewer than the \d samples|no client|no number|needs"
            ):
                Federation.grouped(x, y, who, split=split, small=small)
            continue
        fed = Federation.grouped(x, y, who, split=split, small=small)
        assert fed.client_names == tuple(map(str, kept))
        for at, k in enumerate(kept):
            parts = [fed.index[s][at].tolist() for s in SPLITS]
            assert sorted(sum(parts, [])) == [i for i, w in enumerate(who) if w == k]
            train, val, test = map(len, parts)
            wanted = dealing.cut_sizes(sizes[k], dealing.read_shares(split))
            assert (train, val, test) == (wanted if sizes[k] >= least else (sizes[k], 0, 0))


def test_a_clients_split_depends_on_its_own_samples_and_the_seed():
    who = np.repeat(["a", "b"], [20, 30])
    x, y = np.arange(50.0)[:, None], np.zeros(50, int)
    one, two = (Federation.grouped(x[:n], y[:n], who[:n]) for n in (40, 50))
    assert one.index["test"][0].tolist() == two.index["test"][0].tolist()
    other = Federation.grouped(x, y, who, seed=1)
    assert other.index["test"][0].tolist() != two.index["test"][0].tolist()
    assert other.checksum != two.checksum and other.dealing == two.dealing, "they are replicates"


def test_parts_are_taken_as_they_are_given():
    who, part = ["a", "b", "a", "b", "a"], ["train", "train", "test", "val", "train"]
    fed = Federation.grouped(np.zeros((5, 2)), [0, 1, 0, 1, 0], who, split=part)
    assert [[i.tolist() for i in fed.index[s]] for s in SPLITS] == [
        [[0, 4], [1]],
        [[], [3]],
        [[2], []],
    ]
    assert fed.dealing == "", "nothing was drawn"
    frame = pd.DataFrame(dict(v=np.zeros(5), client=who, label=[0, 1, 0, 1, 0], part=part))
    assert Federation.from_table(frame.astype({"v": "f8"}), split="part").index["val"][
        1
    ].tolist() == [3]
    sets = [TensorDataset(torch.zeros(n, 2), torch.arange(n) % 2) for n in (3, 2, 1, 1)]
    apart = Federation.from_torch(sets[:2], test=sets[2:])
    assert [len(i) for s in SPLITS for i in apart.index[s]] == [3, 2, 0, 0, 1, 1]


def test_samples_in_a_file_stay_there(tmp_path):
    np.save(tmp_path / "x.npy", images(40))
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert np.shares_memory(Federation.grouped(x, np.arange(40) % 2, ["a", "b"] * 20).x, x)


def test_texts_are_dealt_as_their_numbers_are():
    x, y = images(90), np.array(["eel", "cat", "dog"] * 30)
    texts, how = Federation.dealt(x, y, clients=3, alpha=5.0), dict(clients=3, alpha=5.0)
    numbers = Federation.dealt(x, np.array([2, 0, 1] * 30), **how)
    assert texts.checksum == numbers.checksum and texts.dealing == numbers.dealing
    assert texts.class_names == ("cat", "dog", "eel") and numbers.class_names is None
    turned = Federation.dealt(x, y, relabel=[0, 1], **how)
    assert turned.class_names is None, "a label is another class at each client"


def test_one_client_alone_and_a_class_that_a_client_lacks(tmp_path):
    alone = Federation.grouped(images(10), ["a", "b"] * 5, ["me"] * 10)
    assert alone.K == 1 and run(OWN, fed=alone, store=tmp_path, device="cpu").ok
    x, y, who = images(20), np.repeat(["a", "b"], 10), np.repeat(["x", "y"], 10)
    fed = Federation.from_folder(write(tmp_path / "set", x, y, who))
    assert fed.classes == 2 and (fed.counts() > 0).tolist() == [[True, False], [False, True]]


# -- names ---------------------------------------------------------------------------------------------------------------


def named(**how):
    who = np.repeat(["ann", "bob"], 10)
    return Federation.grouped(images(20), ["dog", "cat"] * 10, who, **how)


def test_names_are_kept_to_predictions(tmp_path):
    fed, e = named(class_names=["dog", "cat"]), OWN.but(keep_models=True)
    assert fed.y[:2].tolist() == [0, 1]
    result = run(e, fed=fed, store=tmp_path, device="cpu")
    for one in (result, load_result(result.folder)):
        assert one.class_names == ("dog", "cat") and one.client_names == ("ann", "bob")
        told = one.predict("bob", fed.x[:5], names=True)
        assert told.tolist() == np.array(["dog", "cat"])[one.predict(1, fed.x[:5])].tolist()
        assert set(one.clients.name[one.clients.client == 1]) == {"bob"}
    result.save("ann", tmp_path / "ann.pt")
    model = load_model(tmp_path / "ann.pt")
    assert model.facts["client"] == 0 and model.predict(fed.x[:5], names=True).dtype.kind == "U"
    with pytest.raises(ValueError, match="client 'bo' is unknown; did you mean 'bob'"):
        result.predict("bo", fed.x)


def test_names_change_no_number_and_are_those_of_the_call(tmp_path):
    fed, e = named(), OWN.but(keep_models=True)
    plain = Federation(fed.x, fed.y, **fed.index)
    assert plain.checksum == fed.checksum and plain.names == {}
    first = run(e, fed=plain, store=tmp_path, device="cpu")
    with pytest.raises(ValueError, match="the classes of this model have no names; .*class_names"):
        first.predict(0, fed.x, names=True)
    assert "name" not in first.clients and "class_names" not in first.meta
    again = run(e, fed=fed, store=tmp_path, device="cpu")
    assert again.id == first.id and again.meta["date"] == first.meta["date"]
    assert again.predict("ann", fed.x[:3], names=True).shape == (3,)


def test_names_go_wherever_a_federation_goes(tmp_path):
    import pickle

    fed = named()
    fed.save(tmp_path / "folder")
    fed.save(tmp_path / "lists.npz")
    back = Federation.open(tmp_path / "folder")
    others = [
        back,
        pickle.loads(pickle.dumps(fed)),
        pickle.loads(pickle.dumps(back)),
        fed.at_most(3),
    ]
    others += [fed.moved(tmp_path / "moved"), fed.ruled("x")]
    others += [Federation.load(tmp_path / "lists.npz", fed.x, fed.y)]
    assert [one.names for one in others] == [fed.names] * len(others)
    with pytest.raises(ValueError, match="is there already and holds something else"):
        Federation(fed.x, fed.y, **fed.index, class_names=["x", "y"]).save(tmp_path / "folder")


def test_a_start_from_classes_of_other_names_is_refused(tmp_path):
    e, fed = OWN.but(keep_models=True), named()
    start = e.but(init_from=e)
    for names_, fails in ((("cat", "dog"), False), (("dog", "cat"), True)):
        other = Federation(fed.x, fed.y, **fed.index, class_names=names_)
        if fails:
            with pytest.raises(
                ValueError, match="classes are called dog, cat here and cat, dog in"
            ):
                run(start, fed=other, source=fed, store=tmp_path / "s", device="cpu")
            run(start.but(new_head=True), fed=other, source=fed, store=tmp_path, device="cpu")
        else:
            run(start, fed=other, source=fed, store=tmp_path, device="cpu")


def test_seeds_that_draw_shares_are_replicates(tmp_path):
    cells = [OWN.but(seed=s, partition_seed=None) for s in (0, 1)]
    rows = sweep(cells, fed=lambda seed: named(seed=seed), store=tmp_path, device="cpu")
    assert rows.setting.nunique() == 1 and rows.run.nunique() == 2


# -- what a malformed one is told ----------------------------------------------------------------------------------------


X, Y, WHO = np.zeros((8, 2), np.float32), np.arange(8) % 2, np.repeat(["a", "b"], 4)
FRAME = pd.DataFrame(dict(v=np.arange(8.0), w=np.arange(8), client=WHO, label=Y))
SETS = [TensorDataset(torch.zeros(4, 2), torch.arange(4) % 2) for _ in range(2)]


class Flips(Pairs):
    """Half of the times that it is read, a sample is turned round."""

    def __getitem__(self, i):
        return np.flip(self.x[i]) if torch.rand(()) < 0.5 else self.x[i], self.y[i]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(0, 0)])


class Random(Pairs):
    def __getitem__(self, i):
        return torch.rand(2), 0


def holed(column, value):
    frame = FRAME.astype({column: object})
    frame.loc[3, column] = value
    return frame


def grouped(**changes):
    given_ = dict(x=X, y=Y, by=WHO) | changes
    return lambda: Federation.grouped(given_.pop("x"), given_.pop("y"), **given_)


def table(frame=FRAME, **how):
    return lambda: Federation.from_table(frame, **how)


def sets(*args, **how):
    return lambda: Federation.from_torch(*args, **how)


MALFORMED = {
    "few samples": (grouped(by=["a"] * 6 + ["b"] * 2), r"fewer than the 3 samples that split='70/10/20' needs: 'b' \(2\); leave them out with small='drop'"),
    "no train": (grouped(split=["test"] * 4 + ["train"] * 4), r"clients without training samples \(of so many\): 'a' \(4\); give each some, or leave"),
    "nobody left": (grouped(by=range(8), small="drop"), "no client has enough samples for split='70/10/20'"),
    "a rule": (grouped(small="ignore"), "small 'ignore' is unknown; .*refuse, drop, train"),
    "shares": (grouped(split="70/20"), "split='70/20' must be percent"),
    "an unknown part": (grouped(split=["training"] * 8), "split holds 'training'; allowed are 'train', 'val', 'test'"),
    "parts of fewer": (grouped(split=["train"] * 7), "split has 7 values for 8 samples"),
    "seed": (grouped(seed=-1), "seed=-1: allowed is"),
    "by of fewer": (grouped(by=WHO[1:]), "by has 7 values for 8 samples; give one for each"),
    "by of two axes": (grouped(by=np.zeros((8, 2))), r"by has shape \(8, 2\); give one value a sample"),
    "by NaN": (grouped(by=[np.nan, *WHO[1:]]), "by is missing for 1 of 8 samples, the first is sample 0"),
    "by None": (grouped(by=[*WHO[1:], None]), "by is missing for 1 of 8 samples, the first is sample 7"),
    "by quantities": (grouped(by=X[:, 0] + 0.5), "by holds float32, such as 0.5; give integers or texts"),
    "by mixed": (grouped(by=[1, "1"] * 4), "by holds values of type int, str; give either"),
    "by bytes": (grouped(by=WHO.astype("S")), r"by holds \|S1, such as b'a'; .*astype\(str\)"),
    "by dates": (grouped(by=np.array(["2020-01-01"] * 8, "M8[D]")), r"by holds datetime64\[D\], .*astype\(str\)"),
    "by an empty text": (grouped(by=[""] * 8), "by: got '', allowed is a text that is not empty"),
    "by a control character": (grouped(by=["a\x1b[2J"] * 8), "control characters"),
    "by floats that are not exact": (grouped(by=[2.0**53, 2.0**53 + 2] * 4), "by holds float64, such as 9007199254740992.0; give integers or texts"),
    "by huge floats": (grouped(by=[1e300] * 4 + [2e300] * 4), r"by holds float64, such as 1e\+300"),
    "by infinite": (grouped(by=[np.inf] * 8), "by holds float64, such as inf"),
    "by integers beyond int64": (grouped(by=[2**70, 2**71] * 4), "by holds object, such as 1180591620717411303424"),
    "by a generator": (grouped(by=(w for w in WHO)), "by is a generator; give a list or array, one a sample"),
    "y a generator": (grouped(y=(v for v in Y)), "y is a generator; give a list or array"),
    "by a dict": (grouped(by=dict(enumerate(WHO))), "by is a dict; give a list"),
    "split None": (grouped(split=None), "split is a NoneType; give a list"),
    "shares of 101": (grouped(split="70/10/21"), "must be percent .* of sum 100"),
    "shares without test": (grouped(split="100/0"), "must be percent"),
    "a setting": (grouped(holdout=0.1), r"holdout=0.1\).*Experiment\(holdout"),
    "names of clients": (grouped(client_names=["a", "b"]), "leave it out, clients are named by the data"),
    "mixed labels": (grouped(y=[0, "cat"] * 4), "y holds values of type int, str"),
    "labels without a name": (grouped(y=["a", "b"] * 4, class_names=["a"]), "y holds 'b'; allowed are 'a'"),
    "class names twice": (grouped(class_names=["a", "a"]), "class_names has 'a' more than once"),
    "class names, a text": (grouped(class_names="ab"), "class_names is a str; give a list"),
    "too few class names": (grouped(class_names=["a"]), r"labels reach 0..1; allowed: 0..0"),
    "classes and names": (grouped(classes=3, class_names=["a", "b"]), "classes=3 and 2 names of classes"),
    "no frame": (table([1]), "frame is a list; give a pandas DataFrame"),
    "an empty frame": (table(FRAME[:0]), "frame has no rows"),
    "no client column": (table(client="user"), "frame's client column 'user' is unknown; .*known are v, w, client, label"),
    "no label column": (table(label="lable"), "did you mean 'label'"),
    "no feature column": (table(features=["x"]), "frame's feature column 'x' is unknown"),
    "no split column": (table(split="part"), "frame's split column 'part' is unknown"),
    "the client as the label": (table(client="label"), "one column cannot say two of them; give each its own"),
    "the client as the split": (table(split="client"), "split='client': one column cannot say two of them"),
    "a feature twice": (table(features=["v", "v"]), "names a column twice"),
    "no feature": (table(FRAME[["client", "label"]]), "features=.*give a list of one or more columns"),
    "features, a text": (table(features="v"), "features='v': give a list"),
    "the label as a feature": (table(features=["v", "label"]), "holds label, which is the client, label or split"),
    "a column twice": (table(FRAME.set_axis(["v", "v", "client", "label"], axis=1)), "has the columns 'v' more than once"),
    "texts as features": (table(FRAME.assign(t=WHO)), r"columns that are no numbers: 't' \((object|str)\); .*get_dummies"),
    "NaN": (table(holed("v", np.nan).astype({"v": float})), r"'v' \(1\), the first in row 3; fill them"),
    "infinite": (table(holed("v", np.inf).astype({"v": float})), r"'v' \(1\), the first in row 3"),
    "too large for float32": (table(holed("v", 1e300).astype({"v": float})), r"not finite as float32.*'v' \(1\)"),
    "missing whole number": (table(holed("w", pd.NA).astype({"w": "Int64"})), r"'w' \(1\), the first in row 3"),
    "no client": (table(holed("client", None)), "column 'client' is missing for 1 of 8 samples, the first is sample 3"),
    "no label": (table(holed("label", None)), "y is missing for 1 of 8"),
    "one data set": (sets(SETS[0]), r"datasets is one TensorDataset; give a list of one Dataset a client, or say who"),
    "no data set": (sets([]), "give a list of one torch Dataset"),
    "arrays": (sets([X, X]), "datasets of client '0' is a ndarray; give a torch Dataset"),
    "a loader": (sets([DataLoader(SETS[0])]), "is a DataLoader; give its data set, loader.dataset"),
    "a stream": (sets([Stream()]), "is a Stream; give a torch Dataset with a length"),
    "no pairs": (sets([TensorDataset(torch.zeros(4, 2))]), r"sample 0 of train of client '0' is a tuple; .* are \(sample, label\)"),
    "other shapes": (sets([SETS[0], TensorDataset(torch.zeros(4, 3), torch.zeros(4))]), r"sample 0 of train of client '1' is float32 \(3,\), and sample 0 of train of client '0' is float32 \(2,\)"),
    "other types": (sets([SETS[0], TensorDataset(torch.zeros(4, 2).double(), torch.zeros(4))]), "is float64"),
    "a random transform": (sets([Random(X, Y)]), "is another each time that it is read"),
    "a random transform of one client": (sets([SETS[0], Flips(np.arange(40, dtype=np.float32).reshape(20, 2), [0, 1] * 10)]), "sample . of train of client '1' is another each time"),
    "palettes": (sets([Pairs([Image.new("P", (4, 4))] * 4, Y)]), r"image of mode P; allowed are L and RGB: image.convert\('RGB'\)"),
    "the same for two": (sets([SETS[0], SETS[0]]), "sample 0 of a TensorDataset is in train of client '0' and in train of client '1'"),
    "a sample of two": (sets(SETS[0], [[0, 1, 2], [2, 3]]), "sample 2 of a TensorDataset is in .*list each sample once"),
    "a sample twice": (sets([Subset(SETS[0], [1, 1, 2])]), "sample 1 of a TensorDataset is in"),
    "train and test alike": (sets(SETS, test=SETS), "sample 0 of a TensorDataset is in train of client '0' and in test of client '0'"),
    "indices": (sets(SETS[0], [[0, 1], [2, 9]]), r"indices of client '1' reach 2..9; allowed: 0..3"),
    "a subset's indices": (sets([Subset(SETS[0], [0, 9])]), "sample 1 of train of client '0' is not in its data set"),
    "a negative index": (sets([Subset(SETS[0], [0, 1, 3, -1])]), "sample 3 of a TensorDataset is in"),
    "joined twice": (sets([ConcatDataset([SETS[0], SETS[0]])]), "sample 0 of a TensorDataset is in"),
    "joined, and alone": (sets([ConcatDataset(SETS), SETS[1]]), "sample 0 of a TensorDataset is in train of client '0' and in train of client '1'"),
    "a part of what is joined": (sets([Subset(ConcatDataset(SETS), [0, 1, 5, -3])]), "sample 1 of a TensorDataset is in"),
    "masks": (sets(SETS[0], [[True, False]]), "clients of client 0 holds bool values"),
    "clients of a list": (sets(SETS, [[0]]), "clients= divides one Dataset"),
    "test of others": (sets(SETS, test=SETS[:1]), "test has data sets of 0, and train of 0, 1"),
    "split and test": (sets(SETS, test=[Pairs(X, Y)] * 1 + [Pairs(X, Y)], split="70/30"), "split='70/30' beside val or test; leave it out"),
    "no sample": (sets([Subset(SETS[0], [])]), "the data sets hold no sample"),
    "an empty one": (sets([SETS[0], Subset(SETS[1], [])], small="train"), r"needs: '1' \(0\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_what_is_malformed_is_named(case):
    use, says = MALFORMED[case]
    with pytest.raises((ValueError, TypeError), match=says):
        use()


@few
@given(st.data())
def test_a_sample_is_found_whatever_it_is_wrapped_in(data):
    """Of Subsets and joined sets at any depth, with indices from both ends: listed once it is read, listed twice refused."""
    bases = [
        Pairs(np.arange(n, dtype=np.float32)[:, None] + 100 * n, np.arange(n) % 2) for n in (4, 6)
    ]
    held = [(dataset, [(k, i) for i in range(len(dataset))]) for k, dataset in enumerate(bases)]
    for _ in range(data.draw(st.integers(1, 3))):
        if data.draw(st.booleans()):
            both = data.draw(st.lists(st.sampled_from(held), min_size=1, max_size=2))
            dataset = ConcatDataset([d for d, _ in both]), sum((at for _, at in both), [])
        else:
            whole, at = data.draw(st.sampled_from(held))
            some = data.draw(st.lists(st.integers(-len(at), len(at) - 1), min_size=1, max_size=6))
            dataset = Subset(whole, some), [at[i] for i in some]
        held.append(dataset)
    dataset, at = held[-1]
    ways = dict(split="50/50", small="train", classes=2)
    if len(set(at)) < len(at):
        with pytest.raises(ValueError, match="list each sample once"):
            Federation.from_torch([dataset], **ways)
    else:
        fed = Federation.from_torch([dataset], **ways)
        assert fed.x[:, 0].tolist() == [bases[k].x[i, 0] for k, i in at]


@few
@given(
    st.lists(
        st.one_of(st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=3), st.none(), st.booleans()),
        min_size=1, max_size=6,
    )
)  # fmt: skip
def test_two_values_are_two_clients_and_one_is_one_or_they_are_refused(values):
    who = values * 3
    try:
        fed = Federation.grouped(np.zeros((len(who), 2)), np.zeros(len(who), int), who)
    except ValueError as error:
        assert str(error)
    else:
        mine = [
            sorted({who[i] for s in SPLITS for i in fed.index[s][k]}, key=repr)
            for k in range(fed.K)
        ]
        assert all(len({*one}) == 1 for one in mine), "clients that were merged"
        assert len({one[0] for one in mine}) == fed.K == len({*values}), "a client that was divided"


@few
@given(st.data())
def test_a_table_of_any_columns_is_read_whole_or_refused(data):
    n = 6
    kinds = {
        "float": lambda: [0.5] * n, "int": lambda: list(range(n)), "bool": lambda: [True] * n,
        "text": lambda: list("abcabc"), "missing": lambda: [None, *range(n - 1)], "dates": lambda: [pd.Timestamp("2020")] * n,
        "category": lambda: pd.Categorical([0, 1, 2] * 2, categories=range(5)), "texts": lambda: pd.Categorical(list("abcabc"), categories=list("zcba")),
        "nullable": lambda: pd.array([1, 2, None] * 2, "Int64"), "sparse": lambda: pd.arrays.SparseArray([0, 1.0] * 3),
        "mixed": lambda: [1, "1"] * 3, "infinite": lambda: [np.inf] * n, "whole": lambda: [0.0, 1.0] * 3,
    }  # fmt: skip
    names_ = data.draw(
        st.lists(st.sampled_from(["client", "label", "a", "b"]), min_size=2, max_size=4)
    )
    chosen = [data.draw(st.sampled_from([*kinds])) for _ in names_]
    frame = pd.concat(
        [pd.Series(kinds[k](), name=name) for name, k in zip(names_, chosen, strict=True)], axis=1
    )
    frame.index = data.draw(st.permutations(range(n)))
    try:
        fed = Federation.from_table(frame, split="50/50", small="train")
    except ValueError as error:
        assert str(error)
        return
    features = [name for name in names_ if name not in ("client", "label")]
    assert fed.x.tolist() == frame[features].astype("float32").to_numpy().tolist()
    assert sum(len(i) for s in SPLITS for i in fed.index[s]) == n
    said = [str(v) for v in frame["label"]] if fed.class_names else frame["label"].tolist()
    assert [fed.class_names[c] if fed.class_names else c for c in fed.y.tolist()] == said


def test_names_of_torchvisions_data_sets_are_kept_unless_labels_are_changed():
    whole = Pairs(X, Y)
    whole.classes = ["no", "yes"]
    assert Federation.from_torch(
        [Subset(whole, range(4)), Subset(whole, range(4, 8))]
    ).class_names == ("no", "yes")
    assert Federation.from_torch([whole], class_names=["0", "1"]).class_names == ("0", "1")
    assert Federation.from_torch([whole], classes=5).class_names is None
    whole.target_transform = lambda label: 1 - label
    assert Federation.from_torch([whole]).class_names is None
