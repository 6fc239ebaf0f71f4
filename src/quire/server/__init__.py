"""The HTTP server: its launch, the application, the endpoints, and limits of calls."""
