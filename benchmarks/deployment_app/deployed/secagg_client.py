"""The same client under Flower's SecAgg+."""

from flwr.app import Context
from flwr.client import Client, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp


class _Client(NumPyClient):
    def __init__(self, seed: int) -> None:
        self._seed = seed

    def fit(self, parameters: list, _config: dict) -> tuple[list, int, dict]:
        """Train the model on local data."""
        import torch  # noqa: PLC0415

        from deployed.common import EXAMPLES, make_net, train  # noqa: PLC0415

        net = make_net()
        named = zip(net.state_dict(), parameters, strict=True)
        net.load_state_dict({name: torch.tensor(value) for name, value in named})
        train(net, self._seed)
        return [value.numpy() for value in net.state_dict().values()], EXAMPLES, {}


def _make(context: Context) -> Client:
    return _Client(int(context.node_config["partition-id"])).to_client()


app = ClientApp(client_fn=_make, mods=[secaggplus_mod])
