"""Helpers that every room may use and that depend on no other room: errors, files, commands, assets, exit codes."""
