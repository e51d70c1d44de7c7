"""Standing keys: silos agree on keys once an epoch, and a round is one exchange."""
