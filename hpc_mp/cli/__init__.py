"""The command line: one file per verb, argument parsing and printing only."""
