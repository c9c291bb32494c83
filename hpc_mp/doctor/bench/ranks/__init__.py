"""What each rank of a measurement runs. ``torch_network`` alone imports torch."""
