"""A site's records: each moves every parameter by a hundredth, and three of four are right."""

import time
from pathlib import Path

import numpy as np

COUNT = 100
PAUSE = Path("/tmp/d2pfed-nvflare-pause")  # while this file exists, a site takes its time


class Records:
    count = COUNT

    def __init__(self, size):
        self.size = size

    def gradients(self, chosen):
        yield np.full((len(chosen), self.size), 0.01, np.float32)

    def evaluate(self, record):
        return {"accuracy": float(record % 4 > 0)}


def units(arrays, settings, site):
    while PAUSE.exists():
        time.sleep(0.1)
    return Records(sum(array.size for name, array in arrays.items() if name != "seen"))
