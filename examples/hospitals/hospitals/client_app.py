"""A hospital that trains on its own patients."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from d2pfed.flower.client import PrivateRecords

if TYPE_CHECKING:
    from hospitals.task import Patients


def patients(arrays: Mapping, _config: Mapping, context: Context) -> "Patients":
    """Return this hospital's patients under the model that the server has sent."""
    # Flower starts a process for each message, and only this one needs torch.
    import torch  # noqa: PLC0415

    from hospitals.task import Patients, load_patients, make_net  # noqa: PLC0415

    data = context.run_config["data"]
    net = make_net(data)
    net.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in arrays.items()})
    return Patients(net, *load_patients(data, context.node_config["partition-id"]))


app = ClientApp(mods=[PrivateRecords(patients, evaluate=patients)])


@app.train()
@app.evaluate()
def answer(msg: Message, _context: Context) -> Message:
    """Answer nothing: Flower asks for a function, and `PrivateRecords` answers in its place."""
    return msg
