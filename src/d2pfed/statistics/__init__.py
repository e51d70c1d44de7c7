"""Private statistics: clients' data as bounded vectors, what their sums mean, and the calls that users make."""
