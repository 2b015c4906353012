"""Many runs: sweeps, and one recipe over several partitions."""
