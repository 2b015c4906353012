"""What a run leaves to look at: its log, its environment, pictures, tables, statistics."""
