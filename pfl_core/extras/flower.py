"""A method of ours over Flower's transport: a server process that holds no data, a process for each client that keeps what never leaves it.

write_app("my_app", Experiment(method="fedper", ...)) writes a Flower app, to be started as any other: `flwr run my_app`. Each
SuperNode says which client it is: flower-supernode --node-config "client=0". What travels is what `download` and `upload` name;
client k's rows of `state.clients` lie in its Flower context. Each client deals the Experiment's partition for itself and reads its own
part of it.

The server looks at each answer before it uses it: names, shapes, finite values, counts in their range. As in Flower's own strategies, one
that is refused, or an error instead of an answer, is a failure: it is printed with the client and the reason, and the round goes on with
the others while `enough` of those asked remain. Values that are finite and wrong are not recognised.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl_core.engine.context import Context
from pfl_core.engine.engine import Engine
from pfl_core.engine.simulate import evaluate_at, returned, sample
from pfl_core.experiments.build import build_method, client_data
from pfl_core.experiments.experiment import Experiment
from pfl_core.methods.base import Method, State
from pfl_core.stacked import Params

Model = dict[str, Tensor]  # of one client: no client axis
SUMS = ("correct", "loss", "n")  # over a client's test samples, before training
Answer = tuple[Model, dict[str, float]] | str  # a text: why there is none
Form = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and type of each name of a Model
Ask = Callable[
    [str, int, dict[int, Model]], dict[int, Answer]
]  # kind, round, {client: what it is sent}


class Client:
    """Client `k` of an Experiment; `kept`: what it kept of an earlier round, {name: (*shape)}."""

    def __init__(self, e: Experiment, k: int, kept: Model | None = None):
        if not 0 <= k < e.clients:
            raise ValueError(
                f"client={k} is unknown; this Experiment has clients 0..{e.clients - 1}"
            )
        self.k, self.data = k, client_data(e)
        self.method = build_method(e, self.data)
        self.kept = kept or {n: v[k] for n, v in self.method.init().clients.items()}

    def about(self) -> dict[str, Any]:
        """What the server must know before round 0."""
        counts, shape = self.data.label_counts[self.k].tolist(), list(self.data.input_shape)
        n, test = int(self.data.n[self.k]), len(self.data.index["test"][self.k])
        return dict(client=self.k, n=n, test=test, counts=[int(c) for c in counts], shape=shape)

    def answer(self, kind: str, round: int, sent: Model) -> tuple[Model, dict[str, float]]:
        """What the client returns to `sent` at kind "train" or "evaluate", and its test accuracy before training, as sums."""
        sel, k = torch.tensor([self.k]), self.data.K
        state = State({}, {n: v.expand(k, *v.shape) for n, v in self.kept.items()}, {}, round)
        engine, up = Engine(self.method, self.data, "auto", 1), {}
        try:
            with torch.no_grad():
                down = {n: v[None] for n, v in sent.items()}
                start = self.method.begin(state, sel, down)
                got = engine.evaluate(self.method.serve(start), "test", [self.k])
                if kind == "train":
                    end = self.method.local(Context(engine, state, sel, round), start)
                    kept, up = returned(self.method, state, start, down, end)
                    self.kept |= {n: v[0] for n, v in kept.items()}
        finally:
            engine.close()
        return {n: v[0] for n, v in up.items()}, {s: float(got[s][0]) for s in SUMS}


def serve(
    e: Experiment, about: list[dict[str, Any]], ask: Ask, enough: float = 0.5
) -> tuple[State, dict[str, np.ndarray]]:
    """The server's side: `about` the clients, in their order; its last state, and {"rounds": (E,), "correct", "loss", "n": (E, K)}.

    A client without a good answer has n = 0 there. ValueError for a method whose personal models are made with what only the server
    has, and for `about` that cannot be; RuntimeError for a round in which less than the share `enough` of those asked answer well.
    """
    _check_about(about)
    data = _Told(about, getattr(torch, e.dtype))
    with torch.no_grad():
        method = build_method(e, data)
        if type(method).personal is not Method.personal:
            raise ValueError(
                f"{e.method} makes its personal models from the server's state or by training: not over Flower; run it as a simulation"
            )
        state, seen = method.init(), {name: [] for name in ("rounds", *SUMS)}
        state.clients = {}  # they are with the clients
        config, checked = method.task.config, _Checked(ask, [a["test"] for a in about], enough)
        for r in range(config.rounds + 1):
            sel, got = sample(config, data.K, r), {}
            sent = method.download(state, sel)
            if r < config.rounds:
                got = checked.train(r, _rows(sent, sel))
            if evaluate_at(config, r):
                others = torch.tensor([k for k in range(data.K) if k not in got])
                rest = (
                    checked.evaluate(r, _rows(method.download(state, others), others))
                    if len(others)
                    else {}
                )
                seen["rounds"].append(r)
                for name in SUMS:
                    seen[name].append(
                        [(got | rest).get(k, NOTHING)[1][name] for k in range(data.K)]
                    )
            if r < config.rounds:
                good = torch.tensor([k in got for k in sel.tolist()])
                sel, sent = sel[good], {n: v[good] for n, v in sent.items()}
                up = {
                    n: torch.stack([got[k][0][n] for k in sel.tolist()])
                    for n in got[int(sel[0])][0]
                }
                state = method.upload(state, sel, sent, up, data.n[sel].to(data.dtype))
                state.round = r + 1
                if bad := [n for n, v in state.server.items() if not torch.isfinite(v).all()]:
                    raise RuntimeError(
                        f"round {r}: the server's {bad[0]} is not finite any more; lower lr"
                    )
    return state, {name: np.array(v) for name, v in seen.items()}


NOTHING = ({}, dict.fromkeys(SUMS, 0.0))


class _Told:
    # What the server knows of its clients' data: what they say of themselves.

    def __init__(self, about: list[dict[str, Any]], dtype: torch.dtype):
        self.n, self.label_counts = (
            torch.tensor([a[what] for a in about]) for what in ("n", "counts")
        )
        self.K, self.classes = self.label_counts.shape
        self.input_shape, self.dtype, self.device = (
            tuple(about[0]["shape"]),
            dtype,
            torch.device("cpu"),
        )

    def extremes(self) -> Tensor:
        # Two empty samples, to try the model on: token 0s of a text, black images; the server has no others.
        return torch.zeros(
            2, *self.input_shape, dtype=torch.int32 if len(self.input_shape) == 1 else self.dtype
        )


def _whole(v: Any, low: int = 0) -> bool:
    return (
        isinstance(v, int | float)
        and not isinstance(v, bool)
        and math.isfinite(v)
        and v == int(v)
        and v >= low
    )


def _check_about(about: list[dict[str, Any]]) -> None:
    for k, a in enumerate(about):
        counts, shape = a.get("counts"), a.get("shape")
        lists = all(isinstance(v, list) and v and all(map(_whole, v)) for v in (counts, shape))
        if not (
            lists and _whole(a.get("n"), 1) and _whole(a.get("test")) and sum(counts) == a["n"]
        ):
            why = "n must be 1 or more and the sum of counts, test 0 or more, shape a list of sizes"
        elif len(counts) != len(about[0]["counts"]) or shape != about[0]["shape"]:
            why = f"classes and shape must be those of client 0: {len(about[0]['counts'])} and {about[0]['shape']}"
        else:
            continue
        raise ValueError(
            f"client {k} says of itself {a!r:.200}; {why}; mend its data, or start the app without it"
        )


class _Checked:
    # Asks, and lets only good answers through.

    def __init__(self, ask: Ask, test: list[int], enough: float):
        self.ask, self.test, self.enough = ask, test, enough
        self.form: Form = {}  # of uploads, once a round has had good ones

    def train(self, r: int, sent: dict[int, Model]) -> dict[int, tuple[Model, dict[str, float]]]:
        got, failed = self._numbers("train", r, sent)
        forms = {
            k: {n: (tuple(v.shape), v.dtype) for n, v in up.items()} for k, (up, _) in got.items()
        }
        usual = self.form or max(forms.values(), key=list(forms.values()).count, default={})
        for k, form in forms.items():
            if why := _fault(got[k][0], form, usual, sent[k]):
                failed[k] = why
                del got[k]
        _say(r, failed)
        if len(got) < max(1, self.enough * len(sent)):
            reasons = "; ".join(f"client {k}: {why}" for k, why in failed.items())
            raise RuntimeError(
                f"round {r}: {len(got)} of {len(sent)} clients answered well, needed is a share of {self.enough:g} ({reasons}); mend "
                "these clients and start again, or lower `enough`"
            )
        self.form = usual
        return got

    def evaluate(self, r: int, sent: dict[int, Model]) -> dict[int, tuple[Model, dict[str, float]]]:
        got, failed = self._numbers("evaluate", r, sent)
        _say(r, failed)
        return got

    def _numbers(self, kind: str, r: int, sent: dict[int, Model]) -> tuple[dict, dict[int, str]]:
        answers, got, failed = self.ask(kind, r, sent), {}, {}
        for k in sent:
            answer = answers.get(k, "no answer")
            why = answer if isinstance(answer, str) else _wrong(answer[1], self.test[k])
            if why:
                failed[k] = why
            else:
                got[k] = answer
        return got, failed


def _say(r: int, failed: dict[int, str]) -> None:
    for k, why in failed.items():
        print(f"round {r}: client {k} is left out: {why}", flush=True)


def _wrong(numbers: dict[str, float], test: int) -> str:
    # Why a client's sums over its test samples cannot be.
    given = [numbers.get(name) for name in SUMS]
    correct, loss, n = given
    if not (
        _whole(correct) and _whole(n) and isinstance(loss, int | float) and math.isfinite(loss)
    ):
        why = "allowed are finite numbers, correct and n whole and >= 0"
    elif n != test or correct > n:
        why = f"n must be its {test} test samples, correct at most that"
    else:
        return ""
    return f"it returned correct={correct!r:.20}, loss={loss!r:.20}, n={n!r:.20}; {why}"


def _fault(up: Model, form: Form, usual: Form, sent: Model) -> str:
    # Why an upload cannot be averaged with the others.
    if form.keys() != usual.keys():
        return f"its upload has {sorted(form)}, the others' {sorted(usual)}"
    for n, (shape, dtype) in form.items():
        want = (tuple(sent[n].shape), sent[n].dtype) if n in sent else usual[n]
        if (shape, dtype) != want:
            return f"its {n} is {dtype} of shape {shape}; needed is {want[1]} of shape {want[0]}"
        if not torch.isfinite(up[n]).all():
            return f"its {n} is not finite (its training diverged?)"
    return "" if form else "its upload is empty"


def _rows(p: Params, sel: Tensor) -> dict[int, Model]:
    return {k: {n: v[i].contiguous() for n, v in p.items()} for i, k in enumerate(sel.tolist())}


# -- Flower --------------------------------------------------------------------------------------------------------------

APP = """[project]
name = "pfl-core-app"
version = "1.0.0"
description = {description}
license = "MIT"
dependencies = []

[tool.flwr.app]
publisher = "pfl-core"

[tool.flwr.app.components]
serverapp = "pfl_core_app:server"
clientapp = "pfl_core_app:client"

[tool.flwr.app.config]
experiment = {experiment}
output = {output}
"""
MODULE = "from pfl_core.extras.flower import client_app, server_app\n\nclient = client_app()\nserver = server_app()\n"


def write_app(folder: str | Path, e: Experiment, output: str | Path = "result.npz") -> Path:
    """Write the Flower app of an Experiment; its server leaves rounds, correct, loss and n, as from `serve`, in `output`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = dict(
        experiment=json.dumps(e.plain()),
        output=str(Path(output).resolve()),
        description=f"{e.method} of pfl_core",
    )
    (folder / "pyproject.toml").write_text(
        APP.format(**{n: _toml(v) for n, v in text.items()}), encoding="utf-8"
    )
    (folder / "pfl_core_app.py").write_text(MODULE)
    return folder


def _toml(text: str) -> str:
    # A basic string of TOML: JSON's, but for what lies beyond 16 bits, and for DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def client_app() -> Any:
    """The ClientApp of `write_app`. ImportError without flwr."""
    from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    def here(context: Any) -> Client:
        kept = context.state.get("kept")
        e = Experiment.from_plain(json.loads(context.run_config["experiment"]))
        return Client(
            e, int(context.node_config["client"]), kept and dict(kept.to_torch_state_dict())
        )

    @app.query()
    def query(message: Any, context: Any) -> Any:
        return Message(RecordDict({"about": ConfigRecord(here(context).about())}), reply_to=message)

    def answer(message: Any, context: Any) -> Any:
        client, asked = here(context), message.content["asked"]
        sent = dict(message.content["sent"].to_torch_state_dict())
        up, numbers = client.answer(asked["kind"], asked["round"], sent)
        context.state["kept"] = ArrayRecord(client.kept)
        return Message(
            RecordDict({"up": ArrayRecord(up), "numbers": ConfigRecord(numbers)}), reply_to=message
        )

    app.train()(answer)
    app.evaluate()(answer)
    return app


def server_app(wait_s: float = 0.5, enough: float = 0.5) -> Any:
    """The ServerApp of `write_app`; looks every `wait_s` seconds whether all clients are there; `enough` as for `serve`.

    ImportError without flwr.
    """
    import time

    from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        e = Experiment.from_plain(json.loads(context.run_config["experiment"]))
        while len(nodes := list(grid.get_node_ids())) < e.clients:
            time.sleep(wait_s)

        asked = [Message(RecordDict(), dst_node_id=node, message_type="query") for node in nodes]
        replies = list(grid.send_and_receive(asked))
        if bad := [r for r in replies if r.has_error()]:
            raise RuntimeError(f"client node {bad[0].metadata.src_node_id}: {bad[0].error}")
        about = {r.metadata.src_node_id: dict(r.content["about"]) for r in replies}
        node_of = {a["client"]: node for node, a in about.items()}
        if sorted(node_of) != list(range(e.clients)):
            raise ValueError(
                f"nodes say that they are clients {sorted(node_of)}; needed is each of 0..{e.clients - 1} once"
            )
        client_of = {node: k for k, node in node_of.items()}

        def ask(kind: str, round: int, sent: dict[int, Model]) -> dict[int, Answer]:
            asked = ConfigRecord({"kind": kind, "round": round})
            messages = [
                Message(
                    RecordDict({"sent": ArrayRecord(p), "asked": asked}),
                    dst_node_id=node_of[k],
                    message_type=kind,
                )
                for k, p in sent.items()
            ]
            return {
                client_of[r.metadata.src_node_id]: _read(r) for r in grid.send_and_receive(messages)
            }

        _, seen = serve(e, [about[node_of[k]] for k in range(e.clients)], ask, enough)
        np.savez(context.run_config["output"], **seen)

    return app


def _read(reply: Any) -> Answer:
    if reply.has_error():
        return f"{reply.error}"
    try:
        return dict(reply.content["up"].to_torch_state_dict()), dict(reply.content["numbers"])
    except Exception as error:  # whatever a client may send instead
        return f"its answer cannot be read ({error!r:.100})"
