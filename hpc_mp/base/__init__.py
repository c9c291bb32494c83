"""Helpers that every subpackage may use and that depend on no other subpackage: errors, files, commands, assets, exit codes."""
