"""The same client, private."""

from flwr.clientapp import ClientApp

from d2pfed.flower.client import private
from deployed.plain_client import train

app = ClientApp(mods=[private])
app.train()(train)
