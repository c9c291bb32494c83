"""The makers of stages: Hugging Face models, lists of layers, modules with cut points."""
