"""Hooks keep to their State: its tensors alone are remembered, only read, and of one type."""

import functools

import pytest
import torch

from pfl_core.engine.simulate import simulate
from pfl_core.methods.base import Method, State
from tests.core.methods.setting import setup

COUNT, TABLE, LIST, DICT, SET = 0, None, [1.0], {}, set()
TENSOR = torch.zeros(2)


def count(method):
    global COUNT
    COUNT += 1


def table(method):
    global TABLE
    if TABLE is None:
        TABLE = torch.ones(3)


@functools.lru_cache
def cached(n):
    return torch.ones(n)


def cleared(method):
    DICT.pop("old", None)


CHANGED = {
    "a number": (count, "COUNT"),
    "an entry": (lambda m: LIST.__setitem__(0, LIST[0] / 2), r"LIST\[0\]"),
    "a tensor": (lambda m: TENSOR.add_(1), "TENSOR"),
    "a dict that begins empty": (lambda m: DICT.update(t=DICT.get("t", 0) + 1), r"DICT\['t'\]"),
    "an attribute of the class": (lambda m: setattr(type(m), "at", type(m).at + 1), "at"),
    "an attribute": (lambda m: object.__setattr__(m, "seen", getattr(m, "seen", 0) + 1), "seen"),
}
ADDED = {
    "a cache": lambda m: DICT.setdefault("shape", (3, 4)),
    "a constant made late": table,
    "a list": lambda m: LIST.append(2.0),
    "a set": lambda m: SET.add("one"),
    "less": cleared,
}
KEPT = {
    "lru_cache": lambda m: cached(m.task.K),
    "a cached property": lambda m: m.late,
    "nothing": lambda m: (COUNT, TABLE, LIST, DICT),
}


@pytest.fixture
def rounds(monkeypatch):
    def of(act, hook="upload"):
        def acts(self, *args):
            act(self)
            return getattr(Method, hook)(self, *args)

        late = functools.cached_property(lambda self: torch.ones(2))
        late.__set_name__(None, "late")
        words = dict(name="outside_for_test", at=0, late=late, __doc__="One.")
        type("Outside", (Method,), words | {hook: acts, "__module__": __name__})
        return simulate(*setup("outside_for_test", rounds=3), workers=1)

    for name, value in dict(COUNT=0, TABLE=None, LIST=[1.0], SET=set()).items():
        monkeypatch.setitem(globals(), name, value)
    monkeypatch.setitem(globals(), "DICT", {"old": 1})
    return of


@pytest.mark.parametrize("what", CHANGED)
@pytest.mark.parametrize("hook", ["upload", "local"])
@pytest.mark.filterwarnings("ignore:.* added or dropped:UserWarning")
def test_what_hooks_change_outside_of_the_state_is_refused(rounds, what, hook):
    act, name = CHANGED[what]
    with pytest.raises(ValueError, match=rf"round [01] changed .*{name}, .* into state.extra"):
        rounds(act, hook)


@pytest.mark.parametrize("what", ADDED)
def test_what_may_be_a_cache_is_told(rounds, what):
    with pytest.warns(UserWarning, match=r"round 0 added or dropped .*functools.lru_cache") as told:
        rounds(ADDED[what])
    assert len(told) == 1


@pytest.mark.parametrize("what", KEPT)
def test_caches_that_ids_do_not_see_are_taken(rounds, what):
    rounds(KEPT[what])


# -- what hooks are given is read only -------------------------------------------------------------


def written(p, names=("fc.weight",)):
    for n in names:
        p[n][0] *= 2
    return p


def writes(hook):
    """Methods that write into the first row of what a hook was given."""

    def download(self, state, sel):
        state.server["fc.weight"] *= 2
        return Method.download(self, state, sel)

    def begin(self, state, sel, sent=None):
        return written(Method.begin(self, state, sel, sent))

    def local(self, ctx, start):
        return ctx.train(self.loss, written(start))

    def serve(self, p):
        return written(p)

    def loss(self, p, anchor, batch):
        with torch.no_grad():
            anchor["fc.weight"].mul_(2)
        return Method.loss(self, p, anchor, batch)

    def init(self):
        state = Method.init(self)
        state.extra["seen"] = {"n": torch.zeros(2)}
        return state

    def extra(self, ctx, start):
        ctx.state.extra["seen"]["n"] += 1
        return Method.local(self, ctx, start)

    acts = dict(download=download, begin=begin, local=local, serve=serve, loss=loss, extra=extra)
    words = dict(init=init, name="writes_for_test", __doc__="One.", __module__=__name__)
    words["local" if hook == "extra" else hook] = acts[hook]
    type("Writes", (Method,), words)
    return "writes_for_test"


@pytest.mark.parametrize("hook", ["download", "begin", "local", "serve", "loss", "extra"])
@pytest.mark.parametrize("eval_after", [False, True])
def test_a_hook_that_writes_into_what_it_reads_is_refused(hook, eval_after):
    method, data = setup(writes(hook), rounds=1, eval_after=eval_after)
    by = "local" if hook in ("loss", "extra") else hook
    with pytest.raises(ValueError, match=rf"test.{by} changed .*(fc.weight|seen.n), .* new tensor"):
        simulate(method, data, executor="threads", workers=1)


# -- kinds and types of what they return -----------------------------------------------------------


def doubled(self, state, sel, start, end, weight):
    state = Method.upload(self, state, sel, start, end, weight)
    state.server["fc.weight"] = state.server["fc.weight"].float()
    return state


def made(**parts):
    def init(self):
        state = Method.init(self)
        for name, value in parts.items():
            getattr(state, name).update(value)
        return state

    return init


def counts(value):
    def upload(self, state, sel, start, end, weight):
        state.extra["t"] = value
        return Method.upload(self, state, sel, start, end, weight)

    return upload


T = torch.zeros(2)
STEPS = made(extra={"t": T})
WRONG = {
    "another type": (
        dict(upload=doubled),
        r"upload .*float32 as state.server\['fc.weight'\].* float64",
    ),
    "a number": (
        dict(init=made(extra={"t": 0})),
        r"init .*int as state.extra\['t'\]; .*torch.tensor",
    ),
    "a list": (dict(init=made(extra={"t": [T]})), r"init .*list as state.extra\['t'\]"),
    "deep": (
        dict(init=made(extra={"a": {"t": 1.0}})),
        r"init .*float as state.extra\['a'\]\['t'\]",
    ),
    "no text": (dict(init=made(extra={3: T})), r"init .* 3 as a name in state.extra"),
    "a server of dicts": (
        dict(init=made(server={"t": {"a": T}})),
        r"init .*dict as state.server\['t'\]",
    ),
    "a list of a client": (dict(init=made(clients={"t": [1, 2]})), r"init .*list as state.clients"),
    "nothing": (dict(init=lambda self: None), "init returned NoneType, allowed is a State"),
    "another type at first": (
        dict(init=lambda self: State({n: v.float() for n, v in self.task.initial.items()}, {})),
        r"init .*float32 as state.server\['.*which was float64",
    ),
    "a number later": (dict(init=STEPS, upload=counts(1)), r"upload .*int as state.extra\['t'\]"),
    "another type later": (
        dict(init=STEPS, upload=counts(T.double())),
        r"upload .*float64 as state.extra\['t'\], which was float32",
    ),
    "of local": (
        dict(local=lambda self, ctx, start: start | {"fc.bias": start["fc.bias"].float()}),
        r"local .*float32 as 'fc.bias', which was float64",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_kinds_and_types_are_told_with_the_hook(what):
    hooks, said = WRONG[what]
    type(
        "Wrong", (Method,), dict(name="wrong_for_test", __doc__="One.", __module__=__name__) | hooks
    )
    with pytest.raises(ValueError, match=rf"wrong_for_test.{said}"):
        simulate(*setup("wrong_for_test", rounds=2), workers=1)


def test_extra_may_grow_and_counters_may_become_floats():
    words = dict(
        init=made(extra={"t": torch.zeros(2, dtype=torch.int64)}), upload=counts(torch.ones(3))
    )
    type(
        "Grows", (Method,), dict(name="grows_for_test", __doc__="One.", __module__=__name__) | words
    )
    assert len(simulate(*setup("grows_for_test", rounds=2), workers=1).state.extra["t"]) == 3
