"""A site's script that answers a statistic: sevens."""

import numpy as np
import nvflare.client as flare

from d2pfed.nvflare.executor import statistic_reply

flare.init()
while flare.is_running():
    asked = flare.receive()
    if asked is None:
        break
    vector = np.full_like(asked.params["d2pfed.statistic"], 7.0)
    flare.send(statistic_reply(asked, vector))
