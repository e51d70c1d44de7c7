"""Exact arithmetic that everything rests on: randomness, rings, rotations, canonical text."""
