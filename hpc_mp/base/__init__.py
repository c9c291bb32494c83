"""What every room may use and what uses no room: errors, files, commands, assets, exit codes."""
