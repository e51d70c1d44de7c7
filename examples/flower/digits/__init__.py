"""Handwritten digits, learned privately over Flower."""
