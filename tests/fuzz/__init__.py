"""Random requests against both services, drawn from what they say about themselves."""
