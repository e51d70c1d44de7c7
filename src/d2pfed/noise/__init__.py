"""What a client does to its update before it leaves: codec, mechanisms, samplers."""
