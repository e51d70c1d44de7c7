"""A client that trains on its own digits."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the model on local data."""
    # Flower starts a process for each message, and only this one needs torch.
    from digits.task import Net, load_data  # noqa: PLC0415
    from digits.task import train as train_fn  # noqa: PLC0415

    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    loader = load_data(context.node_config["partition-id"], context.node_config["num-partitions"])
    loss = train_fn(model, loader, context.run_config["local-epochs"], msg.content["config"]["lr"])
    metrics = {"train_loss": loss, "num-examples": len(loader.dataset)}
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)})
    return Message(content=content, reply_to=msg)
