"""A client of a large model that trains nothing: what is measured is all the rest."""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from d2pfed.flower.client import private

app = ClientApp(mods=[private])


@app.train()
def train(msg: Message, _context: Context) -> Message:
    """Move every parameter a little."""
    params = msg.content["arrays"]["params"].numpy() + np.float32(1e-3)
    content = {"arrays": ArrayRecord({"params": Array(params)}), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=msg)
