"""The synchronous loop around scheduler and runner: add, step, abort."""
