"""A process as a rank of a run: bootstrap, rendezvous, heartbeat, watchdog, failures, logs, fencing; and the trainer."""
