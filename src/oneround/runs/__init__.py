"""A run on disk: its folder, its log, its result."""
