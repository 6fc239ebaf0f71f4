"""Endpoints, one file each, in folders by the API that they belong to."""
