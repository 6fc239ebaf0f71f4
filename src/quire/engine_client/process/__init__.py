"""An engine's process, and the messages to it and from it: started, watched, started again."""
