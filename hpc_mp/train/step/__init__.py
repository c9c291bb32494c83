"""An optimizer step: its settings, its passes and its numbers."""
