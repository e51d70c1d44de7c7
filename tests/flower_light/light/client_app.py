"""A client whose update is one-hot at its own place; `signals` is where a test sees and steers it."""

import time
from pathlib import Path

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from d2pfed.flower.client import private

app = ClientApp(mods=[private])


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Add one at this client's own place."""
    client, number = int(context.node_config["partition-id"]), int(msg.content["config"]["server-round"])
    signals = Path(str(context.run_config["signals"]))
    (signals / f"training-{client}-{number}").touch()
    delay = signals / f"delay-{client}-{number}"
    if delay.exists():
        seconds = float(delay.read_text())
        delay.rename(signals / f"delayed-{client}-{number}")  # the next attempt is answered at once
        time.sleep(seconds)
    planted = (signals / "planted").read_text()
    params = msg.content["arrays"]["params"].numpy().copy()
    params[client] += 1.0
    content = {
        "arrays": ArrayRecord({"params": Array(params)}),
        "metrics": MetricRecord({planted: 1.0, "num-examples": 7}),
    }
    return Message(RecordDict(content), reply_to=msg)
