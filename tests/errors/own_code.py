"""A user's own code."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from pfl_core import (
    Experiment,
    Federation,
    Method,
    load,
    register_dataset,
    register_model,
    register_partition,
    run,
)
from pfl_core.methods.fedaghn import FedAGHN
from tests.errors.table import Case, Y, tiny


def mine(of: type[Method] = Method, **hooks) -> None:
    """Runs a method of these hooks, as a class of `of`."""
    type("Mine", (of,), hooks | {"name": "mine", "__module__": __name__})
    run(tiny(method="mine"))


def forgets_the_mean(self, state, sel, start, end, weight):
    state.server |= end
    return state


def logs() -> None:
    class Net(nn.Module):
        def __init__(self, shape: tuple, classes: int):
            super().__init__()
            self.fc = nn.Linear(784, classes)

        def forward(self, x):
            return self.fc(x.flatten(1)).log()

    register_model("logs", Net)
    run(tiny(model="logs"))


class Own(nn.Module):
    """A body and a head; `before` sees it and the samples in each forward, and returns features."""

    def __init__(self, classes: int, before, body: nn.Module | None = None):
        super().__init__()
        self.body, self.head, self.before = body or nn.Linear(784, 4), nn.Linear(4, classes), before
        self.seen = None

    def forward(self, x):
        return self.head(torch.relu(self.before(self, x.flatten(1))))


def network(before=lambda net, x: net.body(x), change=lambda net: None, **parts) -> None:
    """Trains a network of one's own, after a `change` to it."""

    def net(shape: tuple, classes: int) -> nn.Module:
        made = Own(classes, before, **parts)
        change(made)
        return made

    register_model("mine", net)
    run(tiny(model="mine"))


def running_mean(net, x):
    if net.training:
        net.seen = x.mean(0) if net.seen is None else 0.9 * net.seen + 0.1 * x.mean(0)
    return net.body(x if net.seen is None else x - net.seen)


def not_persistent(net, x):
    if net.training:
        net.mean += x.mean()
    return net.body(x - net.mean)


def with_a_mean(net) -> None:
    net.register_buffer("mean", torch.zeros(()), persistent=False)


def norm_of_the_first_weights(net, x):
    net.seen = net.body.weight.norm() if net.seen is None else net.seen
    return net.body(x) / net.seen


def first_layer_alone(net) -> None:
    net.body.weight.register_hook(lambda g: g * 0)


def one_number_for_all(net) -> None:
    net.body.bias = nn.Parameter(torch.zeros(1).expand(4))


def in_a_list(net) -> None:
    net.seen = [net.body, net.head]
    del net.body, net.head


class Scorer(nn.Linear):
    """A Linear over flat samples; `end` makes its output of the scores."""

    def __init__(self, inputs: int, outputs: int, end: Callable):
        super().__init__(inputs, outputs)
        self.end = end

    def forward(self, x):
        return self.end(super().forward(x.flatten(1)))


class WithLabels(Scorer):
    """Its forward takes labels, too."""

    def forward(self, x, y):
        return super().forward(x), y


def ends_in(end: Callable, of: type[Scorer] = Scorer, outputs: int | None = None) -> None:
    """Trains a network whose scores go through `end`."""
    register_model("mine", lambda shape, classes: of(784, outputs or classes, end))
    run(tiny(model="mine"))


def looks_up(before: Callable) -> None:
    """Trains an embedding on tokens that are given as uint8."""

    def net(shape: tuple, classes: int) -> nn.Module:
        return Own(classes, lambda net, x: net.body(before(x)).mean(1), nn.Embedding(99, 4))

    register_model("mine", net)
    tokens = np.arange(32, dtype=np.uint8).reshape(8, 4)
    run(Experiment(dataset="own", model="mine"), fed=Federation(tokens, Y, [[0, 1], [2, 3]]))


def partition_of_lists() -> None:
    def halves(pool, clients, rng):
        return np.array_split(rng.permutation(len(pool.y)), clients)

    register_partition("halves", halves)
    run(tiny(partition="halves"))


CASES = [
    # code of one's own
    Case(
        "upload without a return",
        lambda: mine(upload=lambda self, state, sel, start, end, weight: None),
        "mine.upload returned NoneType, allowed is a State; does every path",
    ),
    Case(
        "is_shared without a return",
        lambda: mine(is_shared=lambda self, name: None),
        "mine.is_shared returned None for every name; does every path",
    ),
    Case(
        "local that returns a part of start",
        lambda: mine(local=lambda self, c, start: {"fc.bias": start["fc.bias"]}),
        "mine.local returned no 'fc1.weight'; .*return start",
    ),
    Case(
        "upload that forgets the mean",
        lambda: mine(upload=forgets_the_mean),
        r"mine.upload returned a tensor \(2, 100, 784\) .* average over the clients",
    ),
    Case(
        'loss with reduction="none"',
        lambda: mine(
            loss=lambda self, p, anchor, batch: F.cross_entropy(
                self.logits(p, batch.x), batch.y, reduction="none"
            )
        ),
        r"mine: its loss returned a tensor \(8,\), allowed is a scalar",
    ),
    Case(
        "logits that returns features",
        lambda: mine(logits=lambda self, p, x: self.task.features(p, x)),
        r"mine.logits returned a tensor \(2, 100\) .* allowed are class scores \(2, 10\)",
    ),
    Case(
        "noise: float = 0.1, in a method",
        lambda: mine(noise=0.1, __annotations__={"noise": "float"}),
        r"mine\(noise=...\): .* because Method.noise is there; choose another name",
    ),
    Case(
        "weights: float = 0.1, in a class of FedAGHN",
        lambda: mine(weights=0.1, __annotations__={"weights": "float"}, of=FedAGHN),
        r"mine\(weights=...\): .* because FedAGHN.weights is there; choose another name",
    ),
    Case(
        "ctx.train(batch=0)",
        lambda: mine(local=lambda self, ctx, start: ctx.train(self.loss, start, batch=0)),
        r"ctx.train\(batch=0\): allowed is an integer >= 1",
    ),
    Case(
        'register_model("mine", nn.Linear(784, 10))',
        lambda: register_model("mine", nn.Linear(784, 10)),
        r"got a network, Linear; give a function that makes one: fn\(input_shape, classes\)",
        TypeError,
    ),
    Case(
        'register_model("mine", lambda classes: ...)',
        lambda: register_model("mine", lambda classes: nn.Linear(784, classes)),
        r"a function that is called as fn\(input_shape, classes\)",
        TypeError,
    ),
    Case("a model whose scores are NaN", logs, "not finite before it is trained"),
    Case(
        "a model that returns (scores, features)",
        lambda: ends_in(lambda scores: (scores, scores)),
        r"makes of 2 samples tuple.*return model\(x\)\[0\].* from a module around it",
    ),
    Case(
        'a model that returns {"logits": scores}',
        lambda: ends_in(lambda scores: {"logits": scores}),
        r"makes of 2 samples dict.*return model\(x\)\['logits'\] from a module around it",
    ),
    Case(
        "a model of one output",
        lambda: ends_in(lambda scores: scores, outputs=1),
        r"makes of 2 samples \(2, 1\).*regression is not served, and two classes have two scores",
    ),
    Case(
        "a model whose forward is (x, y)",
        lambda: ends_in(lambda scores: scores, WithLabels),
        r"missing 1 required positional argument: 'y'; a model gets one tensor, the samples",
    ),
    Case(
        "a model with F.dropout(x, 0.5)",
        lambda: ends_in(lambda scores: F.dropout(scores, 0.5)),
        r"draws random numbers in evaluation mode.*F.dropout\(x, p, training=self.training\)",
    ),
    Case(
        "a model whose layers are in a list",
        lambda: network(change=in_a_list),
        "has no parameters.*keep layers in an nn.ModuleList",
    ),
    Case(
        "a model of tokens, and tokens as uint8",
        lambda: looks_up(lambda x: x.long()),
        r"floats from .* \(uint8 is taken for images and scaled\): give tokens as int64",
    ),
    Case(
        "nn.Embedding without x.long(), and tokens as uint8",
        lambda: looks_up(lambda x: x),
        r"floats from .* \(uint8 is taken for images and scaled\): give tokens as int64",
    ),
    Case(
        "a model with a running mean that is no buffer",
        lambda: network(running_mean),
        "keeps something from call to call .*keep it by register_buffer",
    ),
    Case(
        "a model with a running mean in a buffer with persistent=False",
        lambda: network(not_persistent, with_a_mean),
        "keeps something from call to call .*without persistent=False",
    ),
    Case(
        "a model that keeps what it computed of its first weights",
        lambda: network(norm_of_the_first_weights),
        "other scores after it was used with other weights.*compute it in each forward",
    ),
    Case(
        "a model with nn.Embedding(max_norm=0.5)",
        lambda: network(
            lambda net, x: net.body(x[:, 300:304].long().clamp(0, 8)).mean(1),
            body=nn.Embedding(9, 4, max_norm=0.5),
        ),
        "its forward changes body.weight, which clients share; compute with a changed copy",
    ),
    Case(
        "a model that begins with x.sub_(0.5)",
        lambda: network(lambda net, x: net.body(x.sub_(0.5))),
        r"its forward changes its samples in place.*let it begin with x = x.clone\(\)",
    ),
    Case(
        "a model with weight.register_hook(...)",
        lambda: network(change=first_layer_alone),
        r"a hook on the gradient of body.weight.*do the same in forward \(weight \* mask\)",
    ),
    Case(
        "a model with nn.Parameter(torch.zeros(1).expand(4))",
        lambda: network(change=one_number_for_all),
        r"entries of body.bias share memory.*\(.clone\(\)\)",
    ),
    Case(
        "a partition that returns lists",
        partition_of_lists,
        r"partition 'halves': returned list, allowed is a Split\(train, val, test\)",
    ),
    Case(
        'register_dataset("mine", pool)',
        lambda: register_dataset("mine", load("digits")),
        r"got Pool; allowed is a function that is called as fn\(\)",
        TypeError,
    ),
]
