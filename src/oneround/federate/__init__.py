"""The Flower transport: the same three acts between machines. Nothing outside this folder imports Flower.

The ServerApp (`server_app.py`) sends a Broadcast and collects Uploads; the ClientApp (`client_app.py`) trains and keeps its upload.
What travels is the safetensors blob itself.
"""
