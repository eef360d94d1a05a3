"""A method over Flower's transport: a server without data, and a process for each client.

`write_app("my_app", Experiment(method="fedper"))` writes a Flower app, which is started as any
other: `flwr run my_app`. Each SuperNode says which client it is: `flower-supernode --node-config
"client=0"`. Only what the method's `download` and `upload` name is sent. What a client keeps, its
row of `state.clients`, lies in its Flower context. Each client deals the Experiment's partition for
itself and reads its own part of it.

The server checks each answer before it uses it: names, shapes, finite values, counts in their
range. An answer that is refused counts as a failure, as in Flower's own strategies, and so does an
error instead of an answer: it is printed with the client and the reason, and the round goes on with
the others while the share `enough` of those asked remains. Values that are finite and wrong are not
recognised.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from pfl_core.engine import hooks, server
from pfl_core.engine.context import Context
from pfl_core.engine.engine import Engine
from pfl_core.engine.participation import answers, evaluate_at, paces, sample
from pfl_core.engine.simulate import news, returned
from pfl_core.experiments.build import build_method, client_data
from pfl_core.experiments.experiment import Experiment
from pfl_core.methods.base import Method, State, make_method
from pfl_core.stacked import Params
from pfl_core.util import checks, paths

SUMS = ("correct", "loss", "n")  # sums over a client's test samples, before training
Model = dict[str, Tensor]  # of one client: without an axis of clients
Sums = dict[str, float]  # {a name of SUMS: number}
Good = tuple[Model, Sums]  # an answer: the upload, {} to "evaluate", and the sums
Answer = Good | str  # a text says why there is no answer
Form = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and type of each name of a Model
# Asks clients: (kind, round, {client: what it is sent}) -> {client: what it answers}.
AskClients = Callable[[str, int, dict[int, Model]], dict[int, Answer]]
NOTHING: Good = ({}, dict.fromkeys(SUMS, math.nan))  # stands for a client without a good answer
# More than a client may say of itself: samples, classes, and numbers in a sample.
MOST = {"n": 10**12, "test": 10**12, "classes": 10**6, "shape": 10**8}


# -- a client --------------------------------------------------------------------------------------


class Client:
    """One client of an Experiment.

    Parameters
    ----------
    experiment : Experiment
        What is run.
    k : int
        Which client it is.
    kept : {name: (*shape)}, optional
        What it kept of an earlier round; by default what it has before the first one.

    Raises
    ------
    ValueError
        If there is no client k, or it kept what does not fit the model.
    """

    def __init__(self, experiment: Experiment, k: int, kept: Model | None = None):
        if not 0 <= k < experiment.clients:
            raise ValueError(
                f"client={k} is unknown; this Experiment has clients 0..{experiment.clients - 1}"
            )
        self.k, self.data = k, client_data(experiment)
        self.method = build_method(experiment, self.data)
        self.outside = hooks.Outside(self.method)
        self.kept = kept or {name: v[k] for name, v in self.method.init().clients.items()}
        for name, v in self.method.task.initial.items():
            if name in self.kept and self.kept[name].shape != v.shape:
                raise ValueError(
                    f"client {k} has kept {name} of shape {tuple(self.kept[name].shape)}, needed "
                    f"is {tuple(v.shape)}; start its node anew"
                )

    def about(self) -> dict[str, Any]:
        """What the server must know before round 0.

        Returns
        -------
        dict
            "client", its number; "n" and "test", how many training and test samples it has;
            "counts", its training samples by class; "shape", that of a sample.
        """
        counts = [int(count) for count in self.data.label_counts[self.k].tolist()]
        n, test = int(self.data.n[self.k]), len(self.data.index["test"][self.k])
        shape = list(self.data.input_shape)
        return dict(client=self.k, n=n, test=test, counts=counts, shape=shape)

    def answer(self, kind: str, round: int, sent: Model) -> Good:
        """Evaluate the model that was sent and, if asked to, train it.

        Parameters
        ----------
        kind : {"train", "evaluate"}
            What is asked.
        round : int
            The round, from 0.
        sent : {name: (*shape)}
            What the server sent.

        Returns
        -------
        upload : {name: (*shape)}
            What goes to the server; {} for "evaluate".
        sums : {"correct", "loss", "n": float}
            Over the client's test samples, before training.

        Raises
        ------
        ValueError
            If a hook of the method changed what is no part of its State.
        """
        sel, upload = torch.tensor([self.k]), {}
        clients = {name: v.expand(self.data.K, *v.shape) for name, v in self.kept.items()}
        state = State({}, clients, {}, round)
        engine = Engine(self.method, self.data, "auto", 1)
        try:
            with torch.no_grad():
                down = {name: v[None] for name, v in sent.items()}
                start = self.method.begin(state, sel, down)
                found = engine.evaluate(self.method.serve(start), "test", [self.k])
                if kind == "train":
                    pace = paces(self.method.task.config, [self.k], round)
                    ctx = Context(engine, state, sel, round, [self.k], pace)
                    end = self.method.local(ctx, start)
                    kept, up = returned(self.method, state, start, down, end)
                    upload = news(start, up)
                    self.outside.check(round)
                    self.kept |= {name: v[0] for name, v in kept.items()}
        finally:
            engine.close()
        sums = {name: float(found[name][0]) for name in SUMS}
        return {name: v[0] for name, v in upload.items()}, sums


# -- the server ------------------------------------------------------------------------------------


def serve(
    experiment: Experiment, about: list[dict[str, Any]], ask: AskClients, enough: float = 0.5
) -> tuple[State, dict[str, np.ndarray]]:
    """The server's side of a run, whatever the transport.

    Parameters
    ----------
    experiment : Experiment
        What is run.
    about : list of dict
        What each client says of itself (`Client.about`), in their order.
    ask : function of kind, round and {client: what it is sent} -> {client: answer}
        Asks these clients and waits for their answers; see `Client.answer`. A text in place of an
        answer says why there is none.
    enough : float
        Which share of the clients that are asked to train must answer well.

    Returns
    -------
    state : State
        The server's last state.
    seen : dict
        "rounds" (E,), those that were evaluated; "correct", "loss" and "n" (E, K), sums over each
        client's test samples, NaN for a client without a good answer.

    Raises
    ------
    ValueError
        For a method whose personal models are made with what only the server has, for `about` that
        cannot be, and if a hook changed what is no part of the State.
    RuntimeError
        If too few clients answer well, or the server's state is not finite any more.
    """
    _check_about(about)
    data = _Told(about, getattr(torch, experiment.dtype))
    with torch.no_grad():
        method = build_method(experiment, data)
        if experiment.earlier:
            raise ValueError(
                "init_from names an Experiment, whose end is not here: not over Flower; save its "
                "model's state_dict and give the file to every node, or run it as a simulation"
            )
        if experiment.finetune:
            raise ValueError(
                "finetune trains after the last round: not over Flower; leave it out, or run it as "
                "a simulation"
            )
        if experiment.metrics or experiment.keep_scores:
            raise ValueError(
                "metrics and keep_scores need class scores, which stay with a client: not over "
                "Flower; leave them out, or run it as a simulation"
            )
        if type(method).personal is not Method.personal:
            raise ValueError(
                f"{experiment.method} makes its personal models from the server's state or by "
                "training: not over Flower; run it as a simulation"
            )
        here = _Server(method, data, _Checked(ask, [said["test"] for said in about], enough))
        rounds = method.task.config.rounds
        for round in range(rounds):
            here.train(round)
        here.evaluate(rounds, {})
    return here.state, {name: np.array(values) for name, values in here.seen.items()}


class _Told:
    """What the server knows of its clients' data, from what they say of themselves."""

    def __init__(self, about: list[dict[str, Any]], dtype: torch.dtype):
        self.n = torch.tensor([said["n"] for said in about])
        self.label_counts = torch.tensor([said["counts"] for said in about])
        self.K, self.classes = self.label_counts.shape
        self.input_shape = tuple(about[0]["shape"])
        self.dtype, self.device = dtype, torch.device("cpu")

    def extremes(self) -> Tensor:
        """Two empty samples to try the model on, for the server has no others.

        They are black images, or texts of token 0.
        """
        text = len(self.input_shape) == 1
        return torch.zeros(2, *self.input_shape, dtype=torch.int32 if text else self.dtype)


class _Server:
    """The server's state and what was evaluated, from round to round."""

    def __init__(self, method: Method, data: _Told, clients: _Checked):
        self.method, self.data, self.clients = method, data, clients
        self.outside = hooks.Outside(method)
        self.state = method.init()
        server.begin(method, self.state)
        self.state.clients = {}  # each client has its own
        self.seen: dict[str, list] = {name: [] for name in ("rounds", *SUMS)}

    def train(self, round: int) -> None:
        """One round: ask participants to train, note what is to be evaluated, take the step.

        The models as they were sent are what is evaluated; therefore it comes before the step.
        Who does not answer by the Experiment's client_dropout is not asked to train.
        """
        config = self.method.task.config
        sel = sample(config, self.data.K, round)
        sent = self.method.download(self.state, sel)
        there = set(sel[answers(config, sel, round)].tolist())
        asked = {k: model for k, model in _rows(sent, sel).items() if k in there}
        good = self.clients.train(round, asked) if asked else {}
        self.evaluate(round, good)
        if not good:
            self.state.round = round + 1
            return
        answered = torch.tensor([k in good for k in sel.tolist()])
        sel, sent = sel[answered], {name: v[answered] for name, v in sent.items()}
        uploads = [good[k][0] for k in sel.tolist()]
        up = {name: torch.stack([upload[name] for upload in uploads]) for name in uploads[0]}
        samples = self.data.n[sel].to(self.data.dtype)
        # What clients return as they received it they do not send back.
        before = server.held(self.method, self.state)
        state = self.method.upload(self.state, sel, sent, sent | up, samples)
        self.state = server.stepped(self.method, self.state, state, before)
        self.outside.check(round)
        self.state.round = round + 1
        for name, v in self.state.server.items():
            if not torch.isfinite(v).all():
                raise RuntimeError(
                    f"round {round}: the server's {name} is not finite any more; lower lr"
                )

    def evaluate(self, round: int, good: dict[int, Good]) -> None:
        """Note the sums of every client in a round that is evaluated.

        `good` has the answers of those that trained; the others are asked for theirs.
        """
        if not evaluate_at(self.method.task.config, round):
            return
        others = torch.tensor([k for k in range(self.data.K) if k not in good])
        if len(others):
            sent = self.method.download(self.state, others)
            good = good | self.clients.evaluate(round, _rows(sent, others))
        self.seen["rounds"].append(round)
        sums = [good.get(k, NOTHING)[1] for k in range(self.data.K)]
        for name in SUMS:
            self.seen[name].append([of_client[name] for of_client in sums])


def _rows(p: Params, sel: Tensor) -> dict[int, Model]:
    """Stacked tensors client by client."""
    return {
        k: {name: v[row].contiguous() for name, v in p.items()}
        for row, k in enumerate(sel.tolist())
    }


# -- which answers are good ------------------------------------------------------------------------


class _Checked:
    """Asks clients, and lets only good answers through.

    test : how many test samples each client has; enough : see `serve`.
    """

    def __init__(self, ask: AskClients, test: list[int], enough: float):
        self.ask, self.test, self.enough = ask, test, enough
        self.form: Form = {}  # of uploads, once a round has had good ones

    def train(self, round: int, sent: dict[int, Model]) -> dict[int, Good]:
        """Good answers to "train"; RuntimeError if they are too few."""
        good, failed = self._with_sums("train", round, sent)
        forms = {k: _form(upload) for k, (upload, _) in good.items()}
        # The first good round decides, by its majority, what an upload looks like.
        usual = self.form or max(forms.values(), key=list(forms.values()).count, default={})
        for k, form in forms.items():
            if why := _fault(good[k][0], form, usual, sent[k]):
                failed[k] = why
                del good[k]
        _print_failed(round, failed)
        if len(good) < max(1, self.enough * len(sent)):
            reasons = "; ".join(f"client {k}: {why}" for k, why in failed.items())
            raise RuntimeError(
                f"round {round}: {len(good)} of {len(sent)} clients answered well, needed is a "
                f"share of {self.enough:g} ({reasons}); mend these clients and start again, or "
                "lower `enough`"
            )
        self.form = usual
        return good

    def evaluate(self, round: int, sent: dict[int, Model]) -> dict[int, Good]:
        """Good answers to "evaluate"."""
        good, failed = self._with_sums("evaluate", round, sent)
        _print_failed(round, failed)
        return good

    def _with_sums(
        self, kind: str, round: int, sent: dict[int, Model]
    ) -> tuple[dict[int, Good], dict[int, str]]:
        """Answers whose sums can be, and for each other client why it has none."""
        answers = self.ask(kind, round, sent)
        good, failed = {}, {}
        for k in sent:
            answer: Any = answers.get(k, "no answer")
            if why := _unlike(answer) or _wrong(answer[1], self.test[k]):
                failed[k] = why
            else:
                good[k] = answer
        return good, failed


def _unlike(answer: Any) -> str:
    """Why there is no answer, or it is no upload with sums; "" if it is."""
    if isinstance(answer, str):
        return answer or "no answer"
    if not (isinstance(answer, tuple) and [type(part) for part in answer] == [dict, dict]):
        return f"its answer is a {type(answer).__name__}, needed are two dicts, upload and sums"
    for name, v in answer[0].items():
        if not isinstance(v, Tensor) or v.layout != torch.strided or v.is_meta:
            what = f"{v.layout} on {v.device}" if isinstance(v, Tensor) else type(v).__name__
            return f"its {name} is {what}, needed is a plain tensor"
    return ""


def _form(upload: Model) -> Form:
    return {name: (tuple(v.shape), v.dtype) for name, v in upload.items()}


def _print_failed(round: int, failed: dict[int, str]) -> None:
    for k, why in failed.items():
        print(f"round {round}: client {k} is left out: {why}", flush=True)


def _number(v: Any) -> bool:
    return isinstance(v, int | float) and abs(v) <= sys.float_info.max


def _whole(v: Any, low: int = 0) -> bool:
    return _number(v) and not isinstance(v, bool) and v == int(v) and v >= low


def _sizes(v: Any) -> bool:
    """Whether this is a list of whole numbers with at least one entry."""
    return isinstance(v, list) and bool(v) and all(map(_whole, v))


def _check_about(about: list[dict[str, Any]]) -> None:
    """Raise ValueError for the first client that says of itself what cannot be."""
    for k, said in enumerate(about):
        if why := _contradiction(said, about[0]):
            raise ValueError(
                f"client {k} says of itself {said!r:.200}; {why}; mend its data, or start the app "
                "without it"
            )


def _contradiction(said: dict[str, Any], first: dict[str, Any]) -> str:
    """What is wrong with what a client says of itself; "" if nothing is.

    `first` is what client 0 says.
    """
    n, counts, shape = said.get("n"), said.get("counts"), said.get("shape")
    whole = _sizes(counts) and _sizes(shape) and _whole(n, 1) and _whole(said.get("test"))
    if not whole or counts is None or sum(counts) != n:
        return "n must be 1 or more and the sum of counts, test 0 or more, shape a list of sizes"
    sizes = (n or 0, said["test"], len(counts), math.prod(shape or ()))
    if any(size > most for size, most in zip(sizes, MOST.values(), strict=True)):
        return (
            f"allowed are at most {MOST['n']:,} samples, {MOST['classes']:,} classes and "
            f"{MOST['shape']:,} numbers in a sample"
        )
    if len(counts) != len(first["counts"]) or shape != first["shape"]:
        return (
            f"classes and shape must be those of client 0: {len(first['counts'])} and "
            f"{first['shape']}"
        )
    return ""


def _wrong(numbers: dict[str, Any], test: int) -> str:
    """Why a client's sums over its `test` samples cannot be; "" if they can."""
    correct, loss, n = (numbers.get(name) for name in SUMS)
    if not (_whole(correct) and _whole(n) and _number(loss)):
        why = "allowed are finite numbers, correct and n whole and >= 0"
    elif n != test or correct is None or correct > n:
        why = f"n must be its {test} test samples, correct at most that"
    else:
        return ""
    return f"it returned correct={correct!r:.20}, loss={loss!r:.20}, n={n!r:.20}; {why}"


def _fault(upload: Model, form: Form, usual: Form, sent: Model) -> str:
    """Why an upload cannot be averaged with the others; "" if it can."""
    if form.keys() != usual.keys():
        return f"its upload has {sorted(form)}, the others' {sorted(usual)}"
    for name, (shape, dtype) in form.items():
        needed = (tuple(sent[name].shape), sent[name].dtype) if name in sent else usual[name]
        if (shape, dtype) != needed:
            return (
                f"its {name} is {dtype} of shape {shape}; needed is {needed[1]} of shape "
                f"{needed[0]}"
            )
        if not torch.isfinite(upload[name]).all():
            return f"its {name} is not finite (its training diverged?)"
    return "" if form else "its upload is empty"


# -- Flower ----------------------------------------------------------------------------------------

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
MODULE = """from pfl_core.extras.flower import client_app, server_app

client = client_app()
server = server_app()
"""


def write_app(
    folder: str | Path, experiment: Experiment, output: str | Path = "result.npz"
) -> Path:
    """Write the Flower app of an Experiment.

    Parameters
    ----------
    folder : path
        Where the app is written.
    experiment : Experiment
        What it runs.
    output : path
        The file in which its server leaves rounds, correct, loss and n, as `serve` returns them.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    ValueError
        For an Experiment that nodes cannot run: over own data, from another one's end
        (`init_from`), with fine-tuning or metrics, of code that only this process has, or of a
        method that `serve` refuses.
    """
    _check_told_apart(experiment)
    folder = paths.expanded(folder, "folder")
    folder.mkdir(parents=True, exist_ok=True)
    values = dict(
        experiment=json.dumps(experiment.plain()),
        output=str(paths.absolute(output, "output").resolve()),
        description=f"{experiment.method} of pfl_core",
    )
    project = APP.format(**{name: _toml(text) for name, text in values.items()})
    (folder / "pyproject.toml").write_text(project, encoding="utf-8")
    (folder / "pfl_core_app.py").write_text(MODULE)
    return folder


def _check_told_apart(experiment: Experiment) -> None:
    method = make_method(experiment.method, **experiment.method_args)
    refused = {
        "own data; register_dataset in a module of `plugins` gives yours a name": (
            experiment.dataset == "own"
        ),
        "another Experiment's end; leave init_from out": experiment.init_from is not None,
        "fine-tuning; leave finetune out": bool(experiment.finetune),
        "metrics of class scores, which stay with the client; leave metrics and keep_scores out": (
            bool(experiment.metrics) or experiment.keep_scores
        ),
        "code of a notebook or script; move it into a module, and name that in `plugins`": (
            experiment.in_main
        ),
        f"{method.name}, whose personal models are made from the server's state or by training; "
        "run it as a simulation": type(method).personal is not Method.personal,
    }
    for what, there in refused.items():
        if there:
            raise ValueError(f"write_app: the nodes of a Flower app cannot have {what}")


def _toml(text: str) -> str:
    """A basic string of TOML: JSON's, but for characters beyond 16 bits and for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _experiment(context: Any) -> Experiment:
    """The Experiment of the app to which this Flower context belongs."""
    return Experiment.from_plain(json.loads(context.run_config["experiment"]))


def client_app() -> Any:
    """The ClientApp of `write_app`. ImportError without flwr."""
    with checks.extra("flower", "a Flower app"):
        from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
        from flwr.clientapp import ClientApp

    app = ClientApp()

    def here(context: Any) -> Client:
        record = context.state.get("kept")
        kept = record and dict(record.to_torch_state_dict())
        return Client(_experiment(context), int(context.node_config["client"]), kept)

    @app.query()
    def query(message: Any, context: Any) -> Any:
        about = ConfigRecord(here(context).about())
        return Message(RecordDict({"about": about}), reply_to=message)

    def answer(message: Any, context: Any) -> Any:
        client, asked = here(context), message.content["asked"]
        sent = dict(message.content["sent"].to_torch_state_dict())
        upload, sums = client.answer(asked["kind"], asked["round"], sent)
        context.state["kept"] = ArrayRecord(client.kept)
        numbers: dict[str, Any] = {**sums}
        records = {"up": ArrayRecord(upload), "numbers": ConfigRecord(numbers)}
        return Message(RecordDict(records), reply_to=message)

    app.train()(answer)
    app.evaluate()(answer)
    return app


def server_app(wait_s: float = 0.5, enough: float = 0.5, answer_s: float = 3600) -> Any:
    """The ServerApp of `write_app`.

    Parameters
    ----------
    wait_s : float
        It looks every so many seconds whether all clients are there, before it begins.
    enough : float
        As for `serve`.
    answer_s : float
        It waits so many seconds for an answer; a client without one is left out of the round.

    Raises
    ------
    ImportError
        Without flwr.
    """
    with checks.extra("flower", "a Flower app"):
        from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Any, context: Any) -> None:
        experiment = _experiment(context)
        nodes = _Nodes(grid, experiment.clients, wait_s, answer_s)
        _, seen = serve(experiment, nodes.about, nodes.ask, enough)
        np.savez(context.run_config["output"], **cast(dict[str, Any], seen))

    return app


class _Nodes:
    """The clients of a running app: Flower's nodes, which say which client each of them is.

    Parameters
    ----------
    grid : flwr.serverapp.Grid
        Flower's way to the nodes.
    clients : int
        How many there must be.
    wait_s : float
        Seconds between two looks at whether all are there.
    answer_s : float
        Seconds that an answer may take.
    """

    def __init__(self, grid: Any, clients: int, wait_s: float, answer_s: float):
        self.grid, self.answer_s = grid, answer_s
        while len(nodes := list(grid.get_node_ids())) < clients:
            time.sleep(wait_s)
        about = self._introduced(nodes)
        self.node_of = {said["client"]: node for node, said in about.items()}
        if sorted(self.node_of) != list(range(clients)):
            raise ValueError(
                f"nodes say that they are clients {sorted(self.node_of)}; needed is each of "
                f"0..{clients - 1} once"
            )
        self.client_of = {node: k for k, node in self.node_of.items()}
        self.about = [about[self.node_of[k]] for k in range(clients)]

    def _introduced(self, nodes: list[int]) -> dict[int, dict[str, Any]]:
        """{node: what it says of itself}; RuntimeError if one does not."""
        from flwr.app import Message, RecordDict

        asked = [Message(RecordDict(), dst_node_id=node, message_type="query") for node in nodes]
        replies = list(self.grid.send_and_receive(asked, timeout=self.answer_s))
        if silent := sorted({*nodes} - {reply.metadata.src_node_id for reply in replies}):
            raise RuntimeError(
                f"client nodes {silent} have not said within {self.answer_s:g} s which clients "
                "they are; start them anew, or wait longer: server_app(answer_s=...)"
            )
        for reply in replies:
            if reply.has_error():
                raise RuntimeError(f"client node {reply.metadata.src_node_id}: {reply.error}")
        return {reply.metadata.src_node_id: dict(reply.content["about"]) for reply in replies}

    def ask(self, kind: str, round: int, sent: dict[int, Model]) -> dict[int, Answer]:
        """Ask these clients over Flower; see `AskClients`."""
        from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

        asked = ConfigRecord({"kind": kind, "round": round})
        messages = []
        for k, model in sent.items():
            content = RecordDict({"sent": ArrayRecord(model), "asked": asked})
            node = self.node_of[k]
            messages.append(Message(content, dst_node_id=node, message_type=kind))
        answers: dict[int, Answer] = {}
        for reply in self.grid.send_and_receive(messages, timeout=self.answer_s):
            if (node := reply.metadata.src_node_id) in self.client_of:
                answers.setdefault(self.client_of[node], _read(reply))
        return answers


def _read(reply: Any) -> Answer:
    if reply.has_error():
        return f"{reply.error}"
    try:
        return dict(reply.content["up"].to_torch_state_dict()), dict(reply.content["numbers"])
    except Exception as error:  # whatever a client may send instead
        return f"its answer cannot be read ({error!r:.100})"
