"""State in its places: made, held and addressed there."""
