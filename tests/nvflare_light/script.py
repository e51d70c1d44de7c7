"""A site's script in NVFlare's own loop: moves every weight by one, is right in a quarter of four examples."""

import argparse

import nvflare.client as flare
from nvflare.client.tracking import SummaryWriter

parser = argparse.ArgumentParser()
parser.add_argument("--step", type=float, default=1.0)
step = parser.parse_args().step
flare.init()
while flare.is_running():
    asked = flare.receive()
    if asked is None:
        break
    SummaryWriter().add_scalar("a-secret-loss", 31337.0, 0)
    if flare.is_evaluate():
        flare.send(flare.FLModel(metrics={"accuracy": 0.25, "num-examples": 4}))
    else:
        params = {name: array + step if name != "seen" else array for name, array in asked.params.items()}
        flare.send(flare.FLModel(params=params, metrics={"a-secret-metric": 31337.0}))
