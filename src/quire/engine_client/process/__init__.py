"""Engine processes and their messages: starts, watches and restarts them."""
