"""What the benchmarks of training share: a service to sample from, runs with their CPU time, curves."""
