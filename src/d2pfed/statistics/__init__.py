"""How statistics become bounded vectors that may be summed: the same in one process and over Flower."""
