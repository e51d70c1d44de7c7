"""Private rounds between machines, carried by Flower: `flower.server` in a ServerApp, `flower.client` in a ClientApp.

Flower moves bytes and nothing more. Each side imports its own half, so a client loads nothing of the server's.
"""
