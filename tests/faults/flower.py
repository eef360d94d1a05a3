"""Faults of clients over Flower."""

import contextlib
import functools
import importlib
import io
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from pfl_core.extras import flower
from tests.faults.table import E, Fault, World


def served(spoil: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """The server of a federation over Flower after a round in which client 1 answers what `spoil` makes of its answer."""
    e = E.but(rounds=1, eval_after=False)
    about = [flower.Client(e, k).about() for k in range(4)]

    def ask(kind, round, sent):
        out = {k: flower.Client(e, k).answer(kind, round, p) for k, p in sent.items()}
        if kind == "train":
            out[1] = spoil(*out[1])
        return out

    state, seen = flower.serve(e, about, ask)
    assert np.isfinite(seen["loss"]).all() and (seen["n"] > 0).all()
    return state.server


@functools.cache
def without_client_1() -> dict[str, torch.Tensor]:
    with contextlib.redirect_stdout(io.StringIO()):
        return served(lambda up, sums: "gone")


def answers(spoil: Callable[..., Any]) -> Callable[[World], Iterator[None]]:
    """A fault: client 1 answers with this upload and these sums."""

    def happens(w: World) -> Iterator[None]:
        w.expected = without_client_1()
        yield
        return served(spoil)

    return happens


def strangers_answer(w: World) -> Iterator[None]:
    nodes = object.__new__(flower._Nodes)
    nodes.node_of, nodes.client_of = {0: 10, 1: 11}, {10: 0, 11: 1}
    said = {10: "first", 99: "stranger", 11: "mine"}
    replies = [
        SimpleNamespace(
            metadata=SimpleNamespace(src_node_id=node), has_error=lambda: True, error=text
        )
        for node, text in [*said.items(), (10, "second")]
    ]
    nodes.grid, nodes.answer_s = SimpleNamespace(send_and_receive=lambda *a, **kw: replies), 60
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that flwr imports
        importlib.import_module("flwr.app")
    yield
    w.expected = {0: "first", 1: "mine"}
    return nodes.ask("train", 0, {})


def answers_for_others(w: World) -> Iterator[None]:
    e = E.but(rounds=1, eval_after=False)
    about = [flower.Client(e, k).about() for k in range(4)]

    def ask(kind, round, sent):
        out = {k: flower.Client(e, k).answer(kind, round, p) for k, p in sent.items()}
        return out | {9: next(iter(out.values())), "1": "mine"}

    yield
    w.expected = served(lambda up, sums: (up, sums))
    return flower.serve(e, about, ask)[0].server


def with_gradient(w: World) -> Iterator[None]:
    yield
    w.expected = served(lambda up, sums: (up, sums))
    return served(lambda up, sums: ({n: v.clone().requires_grad_() for n, v in up.items()}, sums))


def kept_state_is_damaged(w: World) -> Iterator[None]:
    e = E.but(rounds=1, eval_after=False, method="fedper")
    about = [flower.Client(e, k).about() for k in range(4)]

    def ask(kind, round, sent):
        out = {}
        for k, p in sent.items():
            kept = {"fc.weight": torch.zeros(3, 8)} if (k, kind) == (1, "train") else None
            try:
                out[k] = flower.Client(e, k, kept).answer(kind, round, p)
            except Exception as error:
                out[k] = f"{error}"  # as Flower says it
        return out

    def gone(kind, round, sent):
        out = {k: flower.Client(e, k).answer(kind, round, p) for k, p in sent.items()}
        return out | ({1: "gone"} if kind == "train" else {})

    with contextlib.redirect_stdout(io.StringIO()):
        w.expected = flower.serve(e, about, gone)[0].server
    yield
    return flower.serve(e, about, ask)[0].server


FAULTS = [
    # clients of a federation over Flower
    Fault(
        "a client's upload in float16",
        answers(lambda up, s: (up | {"fc.bias": up["fc.bias"].half()}, s)),
        "client 1 is left out: its fc.bias is torch.float16",
        "left out, the round goes on",
    ),
    Fault(
        "a client's upload of complex numbers",
        answers(lambda up, s: (up | {"fc.bias": up["fc.bias"] + 1j}, s)),
        "client 1 is left out: its fc.bias is torch.complex64",
        "left out, the round goes on",
    ),
    Fault(
        "a client's upload as a sparse tensor",
        answers(lambda up, s: (up | {"fc.bias": up["fc.bias"].to_sparse()}, s)),
        "client 1 is left out: its fc.bias is .*needed is a plain tensor",
        "left out, the round goes on",
    ),
    Fault(
        "a client's upload without values (a meta tensor)",
        answers(lambda up, s: (up | {"fc.bias": up["fc.bias"].to("meta")}, s)),
        "client 1 is left out: its fc.bias is .*needed is a plain tensor",
        "left out, the round goes on",
    ),
    Fault(
        "a client's upload of 10^12 numbers",
        answers(lambda up, s: (up | {"fc.bias": up["fc.bias"][:1].expand(10**12)}, s)),
        "client 1 is left out: its fc.bias is .*shape .1000000000000,.",
        "left out, the round goes on",
    ),
    Fault(
        "a client's upload as a list, without sums",
        answers(lambda up, s: [*up.values()]),
        "client 1 is left out: its answer is .*needed are two dicts",
        "left out, the round goes on",
    ),
    Fault(
        "a client's loss of 10^400",
        answers(lambda up, s: (up, s | {"loss": 10**400})),
        "client 1 is left out: it returned .*loss=1000",
        "left out, the round goes on",
    ),
    Fault(
        "what a client kept is of another shape",
        kept_state_is_damaged,
        "client 1 is left out: .*fc.weight of shape",
        "left out, the round goes on",
    ),
    Fault("a client's upload that asks for gradients", with_gradient, "", "as before"),
    Fault("answers of clients that were not asked", answers_for_others, "", "as before"),
    Fault(
        "nodes that were not asked answer, and one answers twice", strangers_answer, "", "as before"
    ),
]
