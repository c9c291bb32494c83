"""The program of each rank of a measurement. Only ``torch_network`` imports torch."""
