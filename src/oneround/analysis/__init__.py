"""Views of runs: statistics, comparison, tables, diagnosis."""
