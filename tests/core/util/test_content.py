"""What foreign code reads is in the id: by content, wherever it lies, in this process and the next."""

import copy
import importlib
import json
import math
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from pfl_core import Experiment, Federation, models
from pfl_core.data import pools
from pfl_core.util import identity

FN = "def fn(input_shape, classes):\n    return VALUE\n"
HEAD = """
import collections, dataclasses, datetime, enum, functools, logging, os, pathlib, random, re, sqlite3, sys, threading, types
import numpy as np
import torch
from torch import nn
X = int(os.environ["CONTENT"])
"""
# {what is read: the text of a module whose fn reads X in some way}; X is no name that fn has
READ = {
    "a number": "VALUE = X",
    "a tensor": "VALUE = torch.full((3,), X)",
    "a bfloat16 tensor": "VALUE = torch.full((3,), X, dtype=torch.bfloat16)",
    "a sparse tensor": "VALUE = torch.eye(3).mul(X).to_sparse()",
    "a frozen tensor": "VALUE = torch.zeros(3, requires_grad=X > 1)",
    "a module of torch": "VALUE = nn.Linear(2, 2); nn.init.constant_(VALUE.weight, X); nn.init.zeros_(VALUE.bias)",
    "an array": "VALUE = np.full(3, X)",
    "an array's type": "VALUE = np.zeros(3, ['f4', 'f8'][X > 1])",
    "an array of objects": "VALUE = np.array([None, [X]], dtype=object)",
    "a masked array": "VALUE = np.ma.array([1, 2], mask=[0, X > 1])",
    "a long array in a list": "VALUE = [np.zeros(5000)]; VALUE[0][2500] = X",
    "a long array in a dict": "VALUE = {'a': [{'b': torch.zeros(5000)}]}; VALUE['a'][0]['b'][2500] = X",
    "a namespace": "VALUE = types.SimpleNamespace(a=types.SimpleNamespace(b=X))",
    "a dataclass": "@dataclasses.dataclass\nclass C:\n    a: object\nVALUE = C(C([X]))",
    "slots": "class C:\n    __slots__ = ('a',)\nVALUE = C(); VALUE.a = X",
    "a list of one's own": "class C(list):\n    pass\nVALUE = C([X])",
    "a dict of one's own": "VALUE = collections.defaultdict(list, a=X)",
    "a deque": "VALUE = collections.deque([X])",
    "a set": "VALUE = {'a', 'b', X}",
    "a set of tuples": "VALUE = frozenset([('a', 1), ('b', X)])",
    "an enum": "class E(enum.Enum):\n    A = 1\n    B = 2\nVALUE = E(X)",
    "a named tuple": "VALUE = collections.namedtuple('T', 'a')(X)",
    "a date": "VALUE = datetime.date(2000, 1, X)",
    "a closure": "def make(a):\n    def fn(input_shape, classes):\n        return a\n    return fn\nfn = make(torch.tensor(X))",
    "a closure of a closure": "def make(a):\n    def inner():\n        return a\n    return lambda input_shape, classes: inner()\nfn = make([X])",
    "a default": "ONE = [X]\ndef fn(input_shape, classes, a=ONE):\n    return a",
    "a keyword's default": "ONE = {'a': X}\ndef fn(input_shape, classes, *, a=ONE):\n    return a",
    "a partial": "def of(a, input_shape, classes):\n    return a\nfn = functools.partial(of, torch.full((9000,), X))",
    "a partial's keyword": "def of(input_shape, classes, a):\n    return a\nfn = functools.partial(of, a=[np.full(9000, X)])",
    "a partial of ours": "from pfl_core import models\nfn = functools.partial(models.cnn, width=X)",
    "a callable object": "class C:\n    def __init__(self, a):\n        self.a = a\n    def __call__(self, input_shape, classes):\n        return self.a\nfn = C(X)",
    "a method of an object": "class C:\n    def __init__(self, a):\n        self.a = a\n    def of(self, input_shape, classes):\n        return self.a\nfn = C([X]).of",
    "a class attribute": "class fn:\n    a = torch.tensor(X)",
    "an inherited attribute": "class B:\n    a = [np.array(X)]\nclass fn(B):\n    pass",
    "a class factory": "def make(a):\n    class C:\n        def loss(self):\n            return a\n    return C\nfn = make(X)",
    "a class factory's attribute": "def make(a):\n    class C:\n        b = a\n    return C\nfn = make(X)",
    "a factory of methods": "from pfl_core import Method\ndef make(a):\n    class C(Method):\n        b: dict = a\n    return C\nfn = make(X)",
    "a property": "def make(a):\n    class C:\n        @property\n        def b(self):\n            return a\n    return C\nfn = make(X)",
    "what a helper reads": "VALUE = [X]\ndef helper():\n    return VALUE\ndef fn(input_shape, classes):\n    return helper()",
    "one of two lambdas": "ALL = [lambda s, c: 1, lambda s, c: 2]\nfn = ALL[X - 1]",
    "a wrapped function": "VALUE = X\n@functools.lru_cache\ndef fn(input_shape, classes):\n    return VALUE",
    "a decorated function": "def twice(f):\n    @functools.wraps(f)\n    def both(*args):\n        return f(*args)\n    return both\nVALUE = X\n@twice\ndef fn(input_shape, classes):\n    return VALUE",
    "a function's attribute": "def helper():\n    return helper.a\nhelper.a = [X]\ndef fn(input_shape, classes):\n    return helper()",
    "a number's attribute": "class C(float):\n    pass\nVALUE = C(1); VALUE.a = X",
    "a tensor's attribute": "VALUE = torch.ones(2); VALUE.a = X",
    "a metaclass's attribute": "class T(type):\n    a = X\nclass fn(metaclass=T):\n    pass",
    "a weak reference": "import weakref\nclass C:\n    a = 1\nKEPT = C(); KEPT.a = X; VALUE = weakref.ref(KEPT)",
    "a context variable": "import contextvars\nVALUE = contextvars.ContextVar('a'); VALUE.set([X])",
    "what a thread has for itself": "VALUE = threading.local(); VALUE.a = X",
    "a cycle": "VALUE = [1]; VALUE.append({'a': VALUE, 'b': X})",
    "what lies deep": "VALUE = X\nfor _ in range(20_000):\n    VALUE = [VALUE]",
}


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def load(text, content=1):
        sys.modules.pop("foreign_reader", None)
        monkeypatch.setenv("CONTENT", str(content))
        importlib.invalidate_caches()
        (tmp_path / "foreign_reader.py").write_text(f"{HEAD}{text}\n{'' if 'fn' in text else FN}")
        return importlib.import_module("foreign_reader")

    yield load
    sys.modules.pop("foreign_reader", None)


@pytest.mark.parametrize("what", READ)
def test_what_is_read_counts_by_content(module, what):
    one, again, two = (identity.digest(module(READ[what], c).fn) for c in (1, 1, 2))
    assert "" != one == again != two


def test_another_process_has_the_same_digests(module, tmp_path):
    here = {}
    for i, (what, text) in enumerate(READ.items()):
        (tmp_path / f"foreign_{i}.py").write_text(f"{HEAD}{text}\n{'' if 'fn' in text else FN}")
        importlib.invalidate_caches()
        os.environ["CONTENT"] = "1"
        here[what] = identity.digest(importlib.import_module(f"foreign_{i}").fn)
    script = "import importlib, json, sys; sys.path.insert(0, sys.argv[1]); from pfl_core.util import identity\n"
    script += "print(json.dumps([identity.digest(importlib.import_module(f'foreign_{i}').fn) for i in range(int(sys.argv[2]))]))"
    call = [sys.executable, "-B", "-c", script, str(tmp_path), str(len(READ))]
    done = subprocess.run(
        call, capture_output=True, text=True, check=True
    )  # sets have another order there
    there = dict(zip(READ, json.loads(done.stdout), strict=True))
    for i in range(len(READ)):
        del sys.modules[f"foreign_{i}"]
    assert there == here


def test_what_is_changed_after_the_import_counts(module):
    text = "CONFIG = {'x': 1}\nclass Holder:\n    size = 3\ndef fn(input_shape, classes):\n    return CONFIG['x'] * Holder.size"
    read = module(text)
    seen = [identity.digest(read.fn)]
    read.CONFIG["x"] = 2
    seen.append(identity.digest(read.fn))
    read.Holder.size = 4
    seen.append(identity.digest(read.fn))
    read.Holder.size, read.CONFIG["x"] = 3, 1
    assert len(set(seen)) == 3 and identity.digest(read.fn) == seen[0]


def test_what_another_module_holds_counts(module, tmp_path):
    (tmp_path / "foreign_settings.py").write_text("RATE = 1\n")
    for how in (
        "import foreign_settings as s\ndef fn(a, b):\n    return s.RATE",
        "def fn(a, b):\n    import foreign_settings\n    return foreign_settings.RATE",
    ):
        read = module(how)
        settings = importlib.import_module("foreign_settings")
        before = identity.digest(read.fn)
        settings.RATE = 2
        assert identity.digest(read.fn) != before
        del sys.modules["foreign_settings"]


def test_a_file_counts_by_what_it_holds(module, tmp_path):
    text = f"VALUE = pathlib.Path({str(tmp_path / 'w.pt')!r}), {str(tmp_path / 'v.pt')!r}"
    seen = []
    for name, held in (("w.pt", "1"), ("w.pt", "2"), ("v.pt", "3"), ("v.pt", "4")):
        (tmp_path / name).write_text(held)
        seen.append(identity.digest(module(text).fn))
    assert len(set(seen)) == 4
    within = f"def fn(a, b):\n    return torch.load({str(tmp_path / 'w.pt')!r})"
    for held in "56":
        (tmp_path / "w.pt").write_text(held)
        seen.append(identity.digest(module(within).fn))
    assert len(set(seen)) == 6


# How a function may come to a file beside its module; HERE is the folder of that.
BESIDE = {
    "a path": "return (pathlib.Path(__file__).parent / 'beside.json').read_text()",
    "joined": "return open(os.path.join(os.path.dirname(__file__), 'beside.json')).read()",
    "a folder": "return (HERE / 'beside.json').read_text()",
    "a folder's name": "return open(f'{AS_TEXT}/beside.json').read()",
    "in a folder": "return (HERE / 'deep' / 'weights.bin').read_bytes()",
    "without a suffix": "return open(NAMED).read()",
    "a default": "return open(given).read()",
}


@pytest.mark.parametrize("how", BESIDE)
def test_a_file_counts_however_its_name_is_made(module, tmp_path, how):
    (tmp_path / "deep").mkdir()
    text = "HERE = pathlib.Path(__file__).parent\nAS_TEXT = str(HERE)\nNAMED = AS_TEXT + '/plain'\nDEEP = HERE / 'deep'\n"
    read = module(
        f"{text}def fn(a, b, given=NAMED):\n    DEEP, {BESIDE[how]}".replace(
            "DEEP, return", "DEEP\n    return"
        )
    )
    seen = []
    for held in "123":
        for name in ("beside.json", "plain", "deep/weights.bin"):
            (tmp_path / name).write_text(held)
        seen.append(identity.digest(read.fn))
    assert len(set(seen)) == 3


@pytest.mark.parametrize(
    "how",
    ["os.environ['FOREIGN']", "os.environ.get('FOREIGN', 1)", "os.getenv(NAME)", "helper(NAME)"],
)
def test_variables_of_the_environment_count(module, monkeypatch, how):
    text = "NAME = 'FOREIGN'\ndef helper(name='FOREIGN'):\n    return os.environ.get(name)\n"
    read = module(f"{text}def fn(a, b):\n    return {how}")
    seen = []
    for value in ("1", "2", None, "1"):
        monkeypatch.setenv("FOREIGN", value) if value else monkeypatch.delenv("FOREIGN")
        monkeypatch.setenv("ANOTHER", str(len(seen)))
        seen.append(identity.digest(read.fn))
    assert len(set(seen)) == 3 and seen[0] == seen[3]


# Code in which an attribute, or what it stores, is called as a global that it does not read.
UNREAD = {
    "an attribute": "class fn:\n    def of(self, batch):\n        self.out = batch.out\n        return [self.out.out for _ in batch]",
    "a method": "class fn:\n    def of(self, batch):\n        return batch.out(), super().out()",
    "a local variable": "def fn(a, b):\n    out = a\n    return lambda: out",
    "a keyword": "def fn(a, b):\n    return dict(out=a)",
    "a constant": "def fn(a, b=()):\n    return a.view(()), ('self', 'out')",
    "another module's": "def fn(a, b):\n    return sys.out, a",
    "a foreign module's": "import foreign_settings\nclass fn:\n    def of(self):\n        return foreign_settings.RATE, self.out, [self.out.out for _ in self.out]",
}


@pytest.mark.parametrize("what", UNREAD)
def test_a_global_of_the_name_of_an_attribute_is_not_read(module, tmp_path, what):
    (tmp_path / "foreign_settings.py").write_text("RATE = 1\nout = []\n")
    read = module(f"out = []\n{UNREAD[what]}")
    before = identity.digest(read.fn)
    read.out.append(np.random.default_rng(0))  # refused where it is read
    if "foreign_settings" in vars(read):
        read.foreign_settings.out.append(np.random.default_rng(0))
    assert identity.digest(read.fn) == before
    sys.modules.pop("foreign_settings", None)


# How code may come to a global, which counts.
LOADED = {
    "a name": "return out",
    "a nested function": "return lambda: [out for _ in a]",
    "a class within": "class C:\n        of = out\n    return C",
    "beside an attribute": "return a.out, out",
    "changed": "global out\n    out += 1",
    "of a module": "return foreign_settings.out",
    "of a module within": "import foreign_settings as s\n    return (a, s.out)",
    "from a module": "from foreign_settings import out\n    return out",
}


@pytest.mark.parametrize("how", LOADED)
def test_a_global_counts_however_it_is_loaded(module, tmp_path, how):
    (tmp_path / "foreign_settings.py").write_text("out = 1\n")
    read = module(f"import foreign_settings\nout = 1\ndef fn(a, b):\n    {LOADED[how]}")
    before = identity.digest(read.fn)
    of = read if "module" not in how else read.foreign_settings
    of.out = 2
    assert identity.digest(read.fn) != before
    del sys.modules["foreign_settings"]


def test_modules_may_name_each_other(module, tmp_path):
    (tmp_path / "foreign_one.py").write_text("import foreign_two\nRATE = 1\n")
    (tmp_path / "foreign_two.py").write_text("import foreign_one\nSIZE = 1\n")
    text = "import foreign_one, foreign_two\nSELF = sys.modules[__name__]\ndef fn(a, b):\n    "
    read = module(f"{text}return SELF, foreign_one.RATE, foreign_two.foreign_one.foreign_two.SIZE")
    seen = [identity.digest(read.fn)]
    read.foreign_two.SIZE = 2
    seen.append(identity.digest(read.fn))
    read.foreign_one.RATE = 2
    assert len({*seen, identity.digest(read.fn)}) == 3
    for name in ("foreign_one", "foreign_two"):
        del sys.modules[name]


@pytest.mark.parametrize(
    "made",
    [
        "np.random.default_rng(0)",
        "np.random.RandomState(0)",
        "random.Random(0)",
        "torch.Generator()",
    ],
)
def test_a_generator_is_refused(module, made):
    with pytest.raises(ValueError, match="VALUE.* is a generator of random numbers"):
        identity.digest(module(f"VALUE = [{made}]").fn)


@pytest.mark.parametrize(
    "made", ["(i for i in [1])", "open(__file__)", "sqlite3.connect(':memory:')"]
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_has_no_content_is_named(module, made):
    read = module(f"VALUE = {{'a': {made}}}")
    with pytest.warns(UserWarning, match=r"VALUE\['a'\] \(.*a run's id does not see"):
        identity.digest(read.fn)
    if hasattr(read.VALUE["a"], "close"):
        read.VALUE["a"].close()


def test_ordinary_tools_are_no_matter(module):
    made = "logging.getLogger('mine'), threading.Lock(), sys.stdout, re.compile('a'), np, torch.device('cpu'), "
    made += "torch.float32, print, len, nn.functional.relu, np.sin, torch.relu, random.random, np.random.rand"
    assert identity.digest(module(f"VALUE = {made}").fn)


# -- what a registered model brings along ----------------------------------------------------------


def _drawn(input_shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), classes))


def _brings(tmp_path, where):
    # A model that loads weights from a file whose name nothing but the run of its code says.
    def made(input_shape, classes, folder="", stem="weights"):
        net = _drawn(input_shape, classes)
        given = torch.load(os.path.join(folder or str(tmp_path), f"{stem}.pt"), weights_only=True)
        with torch.no_grad():
            if where == "buffer":
                net.register_buffer("given", given.clone(), persistent=False)
            else:
                net[1].bias[:] = given
        net[1].bias.requires_grad_(where != "frozen")
        return net

    return made


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("where", ["parameter", "frozen", "buffer"])
def test_what_a_registered_model_brings_along_counts_by_content(tmp_path, where, own):
    name = f"brings_{where}"
    models.register_model(name, _brings(tmp_path, where))
    fed = None
    experiment = Experiment(model=name, clients=2, rounds=1)
    if own:
        x = np.zeros((20, 1, 8, 8), np.float32)
        fed = Federation(x, np.arange(20) % 10, train=[range(10), range(10, 20)])
        experiment = Experiment(model=name, dataset="own", rounds=1)

    def id_of(value, file="weights.pt", **args):
        torch.save(torch.full((10,), float(value)), tmp_path / file)
        e = experiment.but(model_args=args)
        return e.id_for(fed.checksum if own else pools.load("digits").checksum)

    first = id_of(1.0)
    assert id_of(2.0) != first == id_of(1.0)
    assert id_of(1.0, "others.pt", stem="others") != id_of(2.0, "others.pt", stem="others")


def test_what_is_drawn_does_not_count_and_our_networks_are_not_built(monkeypatch):
    models.register_model("drawn", _drawn)
    checksum = pools.load("digits").checksum
    id = Experiment(model="drawn").id_for(checksum)
    assert Experiment(model="drawn").id_for(checksum) == id
    assert Experiment(model="drawn").id_for(str(checksum)) != id, "what a model brings is not known"
    monkeypatch.setattr(models, "build", None)
    assert Experiment().id_for(checksum) == Experiment().id_for(str(checksum))


def test_a_checksum_is_a_text_that_knows_shapes():
    checksum = pools.load("digits").checksum
    for again in (copy.deepcopy(checksum), pickle.loads(pickle.dumps(checksum))):
        assert (again, again.input_shape, again.classes) == (checksum, (1, 28, 28), 10)
    assert type(str(checksum)) is str and json.loads(json.dumps(checksum)) == checksum
