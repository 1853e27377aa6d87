"""The contract of the two services: pydantic and PyYAML only, never torch."""
