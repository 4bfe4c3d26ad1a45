"""What tools/benchmark.py is made of: measuring (measure, workers), the rows (training, long, memory, growth, decode,
data, startup), the networks that are compared (networks, torch_network), and the report."""
