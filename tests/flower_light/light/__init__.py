"""A federation of light clients."""
