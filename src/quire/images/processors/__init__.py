"""Image processors: turn a decoded image into an encoder's input and the prompt's text."""
