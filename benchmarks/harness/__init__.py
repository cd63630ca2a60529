"""What the benchmarks share: processes on their cores, the C tools, the contenders, results."""
