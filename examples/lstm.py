"""An LSTM predicts the next word of sentences of unequal length: python examples/lstm.py [PHONES]."""

import sys

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import d2pfed


def pad(sentences: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the words and the words that follow them; what is filled up with -100 counts for nothing."""
    ends = pad_sequence([each[1:] for each in sentences], batch_first=True, padding_value=-100)
    return pad_sequence([each[:-1] for each in sentences], batch_first=True), ends


if __name__ == "__main__":
    count = int((sys.argv[1:] or ["2000"])[0])
    ends = torch.randint(20, 60, (count + 1, 10), generator=torch.Generator().manual_seed(0)).tolist()
    *phones, held_out = [[torch.arange(end % 7, end, 3) % 20 for end in phone] for phone in ends]
    net = nn.Sequential(nn.Embedding(20, 16), nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 20))
    training = {"collate": pad, "forward": lambda net, words: {"logits": net[2](net[1](net[0](words))[0])}}
    training |= {"optimizer": torch.optim.AdamW, "max_grad_norm": 1.0}
    print(d2pfed.fit(net, phones, privacy={"epsilon": 8.0}, validation=held_out, training=training, lr=0.01))
