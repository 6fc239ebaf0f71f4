"""The scripts that measure quire, in folders by what is measured."""
