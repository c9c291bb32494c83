"""Models that build stages: Hugging Face models, lists of layers, modules with cut points."""
