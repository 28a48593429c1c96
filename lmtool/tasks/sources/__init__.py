"""Where a task's rows come from: local files, the hub."""
