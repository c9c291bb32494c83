"""The axes along which ranks share out a model: tensor, sequence, context, experts, data."""
