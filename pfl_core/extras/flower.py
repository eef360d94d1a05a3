"""A method of ours over Flower's transport: a server process that holds no data, a process for each client that keeps what never leaves it.

write_app("my_app", Experiment(method="fedper", ...)) writes a Flower app, to be started as any other: `flwr run my_app`. Each
SuperNode says which client it is: flower-supernode --node-config "client=0". What travels is what `download` and `upload` name;
client k's rows of `state.clients` lie in its Flower context. Each client deals the Experiment's partition for itself and reads its own
part of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfl_core.engine import Engine
from pfl_core.experiments import Experiment, build_method, federation
from pfl_core.methods.base import Method, State
from pfl_core.simulate import evaluate_at, returned, sample
from pfl_core.stacked import Params

Model = dict[str, Tensor]  # of one client: no client axis
SUMS = ("correct", "loss", "n")  # over a client's test samples, before training
Ask = Callable[
    [str, int, dict[int, Model]], dict[int, tuple[Model, dict[str, float]]]
]  # kind, round, {client: what it is sent}


class Client:
    """Client `k` of an Experiment; `kept`: what it kept of an earlier round, {name: (*shape)}."""

    def __init__(self, e: Experiment, k: int, kept: Model | None = None):
        if not 0 <= k < e.clients:
            raise ValueError(f"client={k} is unknown; this Experiment has clients 0..{e.clients - 1}")
        self.e, self.k, self.fed = e, k, federation(e)
        self.method = build_method(e, self.fed)
        self.kept = kept or {n: v[k] for n, v in self.method.init().clients.items()}

    def about(self) -> dict[str, Any]:
        """What the server must know before round 0."""
        counts, shape = self.fed.label_counts[self.k].tolist(), list(self.fed.input_shape)
        return dict(client=self.k, n=int(self.fed.n[self.k]), counts=[int(c) for c in counts], shape=shape)

    def answer(self, kind: str, round: int, sent: Model) -> tuple[Model, dict[str, float]]:
        """What the client returns to `sent` at kind "train" or "evaluate", and its test accuracy before training, as sums."""
        sel, k = torch.tensor([self.k]), self.fed.K
        state = State({}, {n: v.expand(k, *v.shape) for n, v in self.kept.items()}, {}, round)
        engine, up = Engine(self.method, self.fed, self.e, "auto", 1), {}
        try:
            with torch.no_grad():
                down = {n: v[None] for n, v in sent.items()}
                start = self.method.begin(state, sel, down)
                got = engine.evaluate(self.method.serve(start), "test", [self.k])
                if kind == "train":
                    end = self.method.local(engine.context(state, sel, round), start)
                    kept, up = returned(self.method, state, start, down, end)
                    self.kept |= {n: v[0] for n, v in kept.items()}
        finally:
            engine.close()
        return {n: v[0] for n, v in up.items()}, {s: float(got[s][0]) for s in SUMS}


def serve(e: Experiment, about: list[dict[str, Any]], ask: Ask) -> tuple[State, dict[str, np.ndarray]]:
    """The server's side: `about` the clients, in their order; its last state, and {"rounds": (E,), "correct", "loss", "n": (E, K)}.

    ValueError for a method whose personal models are made with what only the server has.
    """
    counts = torch.tensor([a["counts"] for a in about])
    n = torch.tensor([a["n"] for a in about])
    known = dict(K=len(about), n=n, label_counts=counts, classes=counts.shape[1], input_shape=tuple(about[0]["shape"]))
    fed = SimpleNamespace(**known, device=torch.device("cpu"), dtype=getattr(torch, e.dtype))
    with torch.no_grad():
        method = build_method(e, fed)
        if type(method).personal is not Method.personal:
            raise ValueError(
                f"{e.method} makes its personal models from the server's state or by training: not over Flower; run it as a simulation"
            )
        state, seen = method.init(), {name: [] for name in ("rounds", *SUMS)}
        state.clients = {}  # they are with the clients
        for r in range(e.rounds + 1):
            sel, got = sample(e, fed.K, r), {}
            sent = method.download(state, sel)
            if r < e.rounds:
                got = ask("train", r, _rows(sent, sel))
            if evaluate_at(e, r):
                others = torch.tensor([k for k in range(fed.K) if k not in got])
                rest = ask("evaluate", r, _rows(method.download(state, others), others)) if len(others) else {}
                seen["rounds"].append(r)
                for name in SUMS:
                    seen[name].append([(got | rest)[k][1][name] for k in range(fed.K)])
            if r < e.rounds:
                up = {n: torch.stack([got[k][0][n] for k in sel.tolist()]) for n in got[int(sel[0])][0]}
                state = method.upload(state, sel, sent, up, fed.n[sel].to(fed.dtype))
                state.round = r + 1
    return state, {name: np.array(v) for name, v in seen.items()}


def _rows(p: Params, sel: Tensor) -> dict[int, Model]:
    return {k: {n: v[i].contiguous() for n, v in p.items()} for i, k in enumerate(sel.tolist())}


# -- Flower --------------------------------------------------------------------------------------------------------------

APP = """[project]
name = "pfl-core-app"
version = "1.0.0"
description = "{method} of pfl_core"
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
    text = dict(experiment=json.dumps(json.dumps(e.plain())), output=json.dumps(str(Path(output).resolve())))
    (folder / "pyproject.toml").write_text(APP.format(method=e.method, **text))
    (folder / "pfl_core_app.py").write_text(MODULE)
    return folder


def client_app() -> Any:
    """The ClientApp of `write_app`. ImportError without flwr."""
    from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    def here(context: Any) -> Client:
        kept = context.state.get("kept")
        e = Experiment.from_plain(json.loads(context.run_config["experiment"]))
        return Client(e, int(context.node_config["client"]), kept and dict(kept.to_torch_state_dict()))

    @app.query()
    def query(message: Any, context: Any) -> Any:
        return Message(RecordDict({"about": ConfigRecord(here(context).about())}), reply_to=message)

    def answer(message: Any, context: Any) -> Any:
        client, asked = here(context), message.content["asked"]
        sent = dict(message.content["sent"].to_torch_state_dict())
        up, numbers = client.answer(asked["kind"], asked["round"], sent)
        context.state["kept"] = ArrayRecord(client.kept)
        return Message(RecordDict({"up": ArrayRecord(up), "numbers": ConfigRecord(numbers)}), reply_to=message)

    app.train()(answer)
    app.evaluate()(answer)
    return app


def server_app(wait_s: float = 0.5) -> Any:
    """The ServerApp of `write_app`; looks every `wait_s` seconds whether all clients are there. ImportError without flwr."""
    import time

    from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        e = Experiment.from_plain(json.loads(context.run_config["experiment"]))
        while len(nodes := list(grid.get_node_ids())) < e.clients:
            time.sleep(wait_s)

        def answers(messages: list[Any]) -> list[Any]:
            replies = list(grid.send_and_receive(messages))
            if bad := [r for r in replies if r.has_error()]:
                raise RuntimeError(f"client node {bad[0].metadata.src_node_id}: {bad[0].error}")
            return replies

        about = {r.metadata.src_node_id: dict(r.content["about"]) for r in answers([
            Message(RecordDict(), dst_node_id=node, message_type="query") for node in nodes
        ])}  # fmt: skip
        node_of = {a["client"]: node for node, a in about.items()}
        if sorted(node_of) != list(range(e.clients)):
            raise ValueError(
                f"nodes say that they are clients {sorted(node_of)}; needed is each of 0..{e.clients - 1} once"
            )
        client_of = {node: k for k, node in node_of.items()}

        def ask(kind: str, round: int, sent: dict[int, Model]) -> dict[int, tuple[Model, dict[str, float]]]:
            asked = ConfigRecord({"kind": kind, "round": round})
            messages = [
                Message(RecordDict({"sent": ArrayRecord(p), "asked": asked}), dst_node_id=node_of[k], message_type=kind)
                for k, p in sent.items()
            ]
            got = [(client_of[r.metadata.src_node_id], r.content) for r in answers(messages)]
            return {k: (dict(c["up"].to_torch_state_dict()), dict(c["numbers"])) for k, c in got}

        _, seen = serve(e, [about[node_of[k]] for k in range(e.clients)], ask)
        np.savez(context.run_config["output"], **seen)

    return app
