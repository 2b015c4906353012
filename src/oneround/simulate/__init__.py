"""Transport 1: all clients on this machine."""

from oneround.simulate.simulation import run

__all__ = ["run"]
