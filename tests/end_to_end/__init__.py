"""Tests of the walking pair through HTTP, with two live services on the tiny checkpoint."""
