"""The engine's synchronous loop around scheduler and runner: add, step, abort."""
