"""The HTTP server: the application, its launch, and what endpoints share."""
