"""Pairwise masks after Bonawitz et al.: keys for each attempt, shares of them, dropouts tolerated."""
