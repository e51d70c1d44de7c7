"""A federation without a word of any engine: the client agent, the server's half, and the transport between them."""
