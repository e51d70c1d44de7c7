"""Federated learning with secure aggregation and distributed differential privacy."""
