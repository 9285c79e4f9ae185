"""What the library costs, next to its peers: `python -m benchmarks`."""
