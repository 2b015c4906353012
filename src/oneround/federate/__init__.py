"""The Flower transport: the same three acts between machines. Nothing outside this folder knows Flower.

The ServerApp (`server.py`) carries a Broadcast down and takes Uploads in; the ClientApp (`client.py`) trains and keeps what it
trained. What travels is the safetensors blob itself.
"""
