"""The server of a run."""
