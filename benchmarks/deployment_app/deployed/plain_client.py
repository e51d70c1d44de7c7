"""A client in the clear: trains and evaluates."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model on local data."""
    from deployed.common import EXAMPLES, make_net  # noqa: PLC0415 - a process that does not train needs no torch
    from deployed.common import train as step  # noqa: PLC0415

    net = make_net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    step(net, int(context.node_config["partition-id"]))
    content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"num-examples": EXAMPLES})}
    return Message(RecordDict(content), reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Test the model on local data."""
    from deployed.common import EXAMPLES, make_net, test  # noqa: PLC0415

    net = make_net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    metrics = {"accuracy": test(net, int(context.node_config["partition-id"])), "num-examples": EXAMPLES}
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)
