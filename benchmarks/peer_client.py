"""A client of Flower's simulation, for peers.py: the textbook loop on its own samples."""

from __future__ import annotations

import os

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from benchmarks.plain_loop import quickstart

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """One epoch of SGD from the arrays that were sent; the new arrays and the number of samples.

    Batches are drawn by the round and the client, so that a run can be had again.
    """
    here, k = quickstart(int(os.environ["PEERS_SAMPLES"])), int(context.node_config["partition-id"])
    torch.manual_seed(1000 * int(message.content["config"]["server-round"]) + k)
    here.model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    here._local(k)
    metrics = MetricRecord({"num-examples": len(here.sets["train"][k])})
    return Message(
        content=RecordDict({"arrays": ArrayRecord(here.model.state_dict()), "metrics": metrics}),
        reply_to=message,
    )
