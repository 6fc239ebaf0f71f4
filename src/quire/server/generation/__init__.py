"""One call for generated text: its fields, bounds, requests and answer."""
