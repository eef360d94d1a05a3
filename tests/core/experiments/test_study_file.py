"""The file of a study: what it says is what its cells have, and what says two things at once is refused."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pfl_core import Experiment
from pfl_core.experiments.study import Study

few = settings(max_examples=60, deadline=None)
VALUES = {
    "lr": [0.01, 0.1],
    "batch": [8, 16],
    "method": ["fedprox"],
    "method_args": [{"mu": 0.1}, {"mu": 1.0}],
    "partition_args": [{"alpha": 0.1}, {"split": "60/20/20"}, {"alpha": 0.1, "of": 20}],
}
CHANGES = st.lists(st.sampled_from(list(VALUES)), max_size=3, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({n: st.sampled_from(VALUES[n]) for n in names})
)
LABELS = ["A", "b c", 'q"u', "é", "10"]
TABLES = st.dictionaries(st.sampled_from(LABELS), CHANGES, max_size=3)
BASE = {"dataset": "digits", "method": "fedprox", "model": "mlp"}


def toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(n)} = {toml(v)}" for n, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def write(path, ends="\n", mark="", **said):
    """A file with these entries, a line each."""
    path.write_bytes((mark + ends.join(f"{n} = {toml(v)}" for n, v in said.items())).encode())
    return path


def flat(changes):
    out = {}
    for name, value in changes.items():
        out |= (
            {(name, n): v for n, v in value.items()} if isinstance(value, dict) else {name: value}
        )
    return out


def has(experiment, name):
    return (
        getattr(experiment, name[0])[name[1]]
        if isinstance(name, tuple)
        else getattr(experiment, name)
    )


@few
@given(
    TABLES,
    TABLES,
    st.lists(
        st.sampled_from(["lr", "batch", "method_args", "partition_args"]), max_size=2, unique=True
    ),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from(["", "\ufeff"]),
)
def test_a_cell_has_all_that_the_file_says_of_it_or_the_file_is_refused(
    tmp_path_factory, rows, columns, product, ends, mark
):
    combined = {name: VALUES[name] for name in product}
    file = write(
        tmp_path_factory.mktemp("s") / "study.toml", ends, mark,
        base=BASE, rows=rows, columns=columns, product=combined, seeds=[3, 4],
    )  # fmt: skip
    products = [dict(zip(combined, v, strict=True)) for v in itertools.product(*combined.values())]
    wanted = [
        [*map(flat, parts)]
        for parts in itertools.product(columns.values() or [{}], rows.values() or [{}], products)
    ]
    twice = any(
        len({p[n] for p in parts if n in p}) > 1 for parts in wanted for n in set().union(*parts)
    )
    if twice or not (rows or combined):
        with pytest.raises(ValueError, match=r"both say|has no rows"):
            Study.read(file)
        return
    cells = Study.read(file).cells()
    assert len(cells) == len(wanted) == len({json.dumps(c.tags) for c in cells})
    for cell, parts in zip(cells, wanted, strict=True):
        for name, value in itertools.chain(*(part.items() for part in parts)):
            assert has(cell, name) == value


ANYTHING = st.recursive(
    st.one_of(st.booleans(), st.integers(-3, 2**70), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=6)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["lr", "seed", "a"]), inner, max_size=2),
    max_leaves=6,
)  # fmt: skip
NAMES = ["base", "rows", "columns", "product", "tune", "table", "seeds", "plugins", "data", "other"]


@few
@given(st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=4))
def test_whatever_stands_in_a_file_it_is_a_study_or_a_value_error(tmp_path_factory, said):
    file = write(tmp_path_factory.mktemp("s") / "study.toml", **said)
    try:
        study = Study.read(file)
    except ValueError as error:
        assert str(error)
    else:
        assert all(isinstance(cell, Experiment) for cell in study.cells())


@few
@given(st.binary(max_size=60))
def test_whatever_bytes_a_file_holds(tmp_path_factory, raw):
    file = tmp_path_factory.mktemp("s") / "study.toml"
    file.write_bytes(raw)
    with pytest.raises(ValueError, match=r"study\.toml"):
        Study.read(file)


ROWS = {"A": {"lr": 0.1}, "B": {"lr": 0.2}}
MU = {"A": {"method": "fedprox", "method_args": {"mu": 5.0}}}
REFUSED = {
    "seeds twice": (dict(seeds=[0, 0]), r"seeds = \[0, 0\]; allowed is a list of different integers"),
    "seeds of other kinds": (dict(seeds=[0, "1"]), "different integers >= 0"),
    "a seed below 0": (dict(seeds=[0, -1]), "different integers >= 0"),
    "a seed that is true": (dict(seeds=[0, True]), "different integers >= 0"),
    "a seed that is no integer": (dict(seeds=[0, 0.5]), "different integers >= 0"),
    "no seed": (dict(seeds=[]), "seeds is an empty list; give one seed at least"),
    "tune's seeds, a number": (dict(tune={"seeds": 3}), "tune.seeds = 3; allowed is a list"),
    "tune's seeds, nested": (dict(tune={"seeds": [[3]]}), "tune.seeds"),
    "tune's seeds, reported": (dict(tune={"seeds": [100, 0]}), r"seeds \[0\], which are reported"),
    "a seed in the base": (dict(base={"seed": 5}), r"base has seed; write seeds = \[0, 1\]"),
    "a seed in a row": (dict(rows={"A": {"seed": 5}}), "row A has seed"),
    "a seed in a column": (dict(columns={"x": {"seed": 5}}), "column x has seed"),
    "seeds in the product": (dict(product={"seed": [0, 1]}), "product has seed"),
    "plugins in the base": (dict(base={"plugins": ["json"]}), "base has plugins; write plugins ="),
    "tags": (dict(base={"tags": {"row": "x"}}), "base has tags; write labels"),
    "plugins, no names": (dict(plugins=[3]), "plugins has 3; allowed are names of modules"),
    "a value twice": (dict(product={"batch": [8, 8]}), "two rows are called 'A, batch 8'"),
    "an empty label": (dict(rows={"": {}}), "a label: got '', allowed is a text"),
    "a label of two lines": (dict(columns={"a\nb": {}}), "a label: .* control characters"),
    "a row that the product changes": (dict(product={"lr": [1.0]}), "row 'A' and product both say lr"),
    "a row that its column changes": (dict(columns={"x": {"lr": 1.0}}), "row 'A' and column 'x' both say lr"),
    "a row that is tuned": (dict(tune={"choices": {"lr": [1.0]}}), "row 'A' and tune.choices both say lr"),
    "a row among changes": (dict(tune={"choices": [{"lr": 1.0}]}), "row 'A' and tune.choices both say lr"),
    "a column that is tuned": (dict(rows={"A": {}}, columns={"x": {"lr": 1.0}}, tune={"choices": {"lr": [1.0]}}), "column 'x' and tune.choices"),
    "a row among ranges": (dict(tune={"draws": 3, "choices": {"lr": [1.0, 2.0]}}), "row 'A' and tune.choices both say lr"),
    "a row that is drawn": (dict(tune={"draws": 3}), "row 'A' and tune.choices both say lr; .* name some"),
    "a column that is drawn": (dict(rows={"A": {}}, columns={"x": {"lr": 1.0}}, tune={"draws": 3}), "column 'x' and tune.choices both say lr"),
    "a product that is drawn": (dict(rows={}, product={"lr": [0.1, 0.2]}, tune={"draws": 3}), "row 'lr 0.1' and tune.choices both say lr"),
    "an argument among ranges": (dict(rows=MU, tune={"draws": 3, "choices": {"method_args": {"mu": [1, 2]}}}), "row 'A' and tune.choices both say method_args.mu"),
    "an argument among lists": (dict(rows=MU, tune={"draws": 3, "choices": {"method_args": [{"mu": 1}]}}), "row 'A' and tune.choices both say method_args.mu"),
    "an argument that is drawn": (dict(rows=MU, tune={"draws": 3}), "row 'A' and tune.choices both say method_args.mu"),
    "an argument of a method that is tuned": (dict(base={"method": "fedprox"}, rows={"A": {"method_args": {"mu": 5.0}}}, tune={"choices": {"method": ["fedavg", "ditto"]}}), "both say method_args.mu"),
    "an argument that the server's optimizer declares": (dict(rows={"A": {"server": "adam", "server_args": {"lr": 0.1}}}, tune={"draws": 3}), "both say server_args.lr"),
    "a label that is tuned": (dict(rows={"A": {}}, tune={"choices": [{"tags": {"row": "B"}}]}), "row 'A' and tune.choices both say tags.row"),
    "nothing that is tuned": (dict(tune={}), "tune is empty; write choices = "),
    "tune's seeds, none": (dict(tune={"draws": 3, "seeds": []}), "tune.seeds is an empty list"),
    "own data without a folder": (dict(base={"dataset": "own"}), "go together, in all cells"),
    "a folder without own data": (dict(data="mine"), "go together, in all cells"),
    "own data in one column": (dict(data="mine", columns={"a": {"dataset": "own"}, "b": {}}), "go together"),
    "a home of nobody": (dict(data="~nobody-here/mine", base={"dataset": "own"}), "folder of no user"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_silently_replace_what_the_file_says_is_refused(tmp_path, case):
    said, says = REFUSED[case]
    with pytest.raises(ValueError, match=says):
        Study.read(write(tmp_path / "study.toml", **{"rows": ROWS} | said))


TUNED = {
    "a base that is tuned": dict(base={"lr": 1.0}, rows={"A": {}}, tune={"choices": {"lr": [0.1]}}),
    "a base that is drawn": dict(base={"lr": 1.0}, rows={"A": {}}, tune={"draws": 3}),
    "another field": dict(rows={"A": {"batch": 8}}, tune={"draws": 3}),
    "ranges of another field": dict(tune={"draws": 3, "choices": {"momentum": [0.0, 0.9]}}),
    "a rate of a method that has none": dict(rows={"A": {"method": "apfl"}}, tune={"draws": 2}),
    "another argument": dict(rows=MU, tune={"draws": 3, "choices": {"lr": [0.1]}}),
}  # fmt: skip


@pytest.mark.parametrize("case", TUNED)
def test_what_labels_do_not_say_may_be_tuned(tmp_path, case):
    assert Study.read(write(tmp_path / "study.toml", **{"rows": ROWS} | TUNED[case])).tune


@few
@given(
    st.none() | st.lists(st.integers(0, 130), min_size=1, max_size=40, unique=True),
    st.none() | st.lists(st.integers(0, 130), min_size=1, max_size=3, unique=True),
)
def test_no_seed_is_tuned_on_and_reported(tmp_path_factory, reported, tuned):
    tune = {"choices": {"batch": [8]}} | ({"seeds": tuned} if tuned else {})
    said = dict(rows=ROWS, tune=tune) | ({"seeds": reported} if reported else {})
    file = write(tmp_path_factory.mktemp("s") / "study.toml", **said)
    if tuned and {*tuned} & {*(reported or [0])}:
        with pytest.raises(ValueError, match="which are reported, too"):
            Study.read(file)
        return
    study = Study.read(file)
    assert study.tuned_on and not {*study.tuned_on} & {*study.seeds}
    if not tuned:
        assert study.tuned_on == Study.read(file).tuned_on and min(study.tuned_on) >= 100


@pytest.mark.parametrize("text", ["a = " + "[" * 5000 + "]" * 5000, f"seeds = [{'9' * 5000}]"])
def test_a_file_that_no_reader_holds_is_no_toml_file(tmp_path, text):
    (tmp_path / "study.toml").write_text(text)
    with pytest.raises(ValueError, match=r"study\.toml is no TOML file"):
        Study.read(tmp_path / "study.toml")
