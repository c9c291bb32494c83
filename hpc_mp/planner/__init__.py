"""What a layout needs and how fast it will run, from a model's shape, a placement and what links carry."""
