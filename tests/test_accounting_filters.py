"""What a shared ledger may admit."""
