"""Azure CycleCloud: a parser of cluster templates, a catalogue of Azure's sizes, and an offline linter."""
