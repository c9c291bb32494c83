"""The axes along which ranks divide a model and its batches: tensor, sequence, context, experts, data."""
