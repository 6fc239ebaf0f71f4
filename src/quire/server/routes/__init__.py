"""One file an endpoint, in folders by the API that it comes from."""
